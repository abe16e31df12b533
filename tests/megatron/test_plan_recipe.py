"""``ampipe plan`` and ``config`` with small recipes of the form of NVIDIA's."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Command

pytestmark = [pytest.mark.ranks(1), pytest.mark.timeout(900)]

RECIPE = """\
ENV_VARS:
  NCCL_GRAPH_REGISTER: '0'
  NVLINK_DOMAIN_SIZE: '72'
ARGS:
  tokenizer_type: HuggingFaceTokenizer
  tokenizer_model: nobody/nothing
  mock_data: true
  num_layers: 6
  hidden_size: 1024
  num_attention_heads: 16
  max_position_embeddings: 2048
  seq_length: 2048
  position_embedding_type: rope
  normalization: RMSNorm
  swiglu: true
  disable_bias_linear: true
  untie_embeddings_and_output_weights: true
  num_experts: 32
  moe_router_topk: 4
  moe_ffn_hidden_size: 512
  moe_router_pre_softmax: false
  moe_grouped_gemm: true
  moe_token_dispatcher_type: alltoall
  expert_model_parallel_size: 16
  pipeline_model_parallel_size: 2
  account_for_embedding_in_pipeline_split: true
  account_for_loss_in_pipeline_split: true
  num_layers_per_virtual_pipeline_stage: 2
  use_distributed_optimizer: true
  use_precision_aware_optimizer: true
  exp_avg_dtype: bf16
  transformer_impl: transformer_engine
  recompute_granularity: selective
  recompute_modules: layernorm moe_act
  attention_dropout: 0.0
  hidden_dropout: 0.0
  micro_batch_size: 1
  global_batch_size: 128
  train_iters: 10
  lr: 1e-4
  bf16: true
  load: ${NOWHERE_SET}
"""
QUICK = ["--degrees", "2", "--stack", "1", "--exchange", "rows"]


def answer(ampipe: Command, file: Path, *words: object) -> dict[str, Any]:
    cluster = [] if "--cluster" in words else ["--cluster", "h100-ethernet-100g"]
    said = ampipe("plan", "--recipe", file, "--json", "-", *cluster, *QUICK, *words)
    found: dict[str, Any] = json.loads(said.out)
    return found


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "bf16_32GPU_EP16.yaml"
    path.write_text(RECIPE)
    return path


def test_an_accepted_recipe_is_predicted(ampipe: Command, recipe: Path) -> None:
    found = answer(ampipe, recipe, "--set", "vocab-size=32000")
    assert found["recipe"]["accepted"] and found["recipe"]["ranks"] == 32
    assert found["recipe"]["checked_with"] == found["flags"]
    assert {"chunks", "partners", "graphs"} <= found["gains"].keys()
    assert found["gains"]["partners"]["speedup"] > 1
    assert found["gains"]["graphs"]["stock_speedup"] >= 1
    assert found["nvlink_domain"] is None
    assert found["rank_memory"]["optimizer_gib"] > 0
    assert any("NVLINK_DOMAIN_SIZE=72" in sentence for sentence in found["assumed"])
    assert found["next"].startswith(f"next: ampipe config --recipe {recipe} --vocab-size 32000 ")
    shown = ampipe("plan", "--recipe", recipe, "--cluster", "h100-ethernet-100g", *QUICK).out
    assert ": 36 flags, 32 ranks, with --ampipe-" in shown and "accepted" in shown.splitlines()[0]
    assert "gain by chunks: 1." in shown and "gain by graphs: 1." in shown
    checked = ampipe("config", "--recipe", recipe, "--ampipe-degree", "2")
    assert "# The run on 32 ranks, and what decides it:" in checked.out
    assert f"num-layers: 6  # {recipe}:8\n" in checked.out
    assert "recompute-modules: [layernorm, moe_act]" in checked.out
    assert "#   export NCCL_GRAPH_REGISTER=0\n" in checked.out
    assert f"{recipe}:42: --load is left out" in checked.out


def test_everything_that_stops_a_launch_is_said_at_once(ampipe: Command, recipe: Path) -> None:
    """Flags of another Megatron, a wrong choice, what Megatron's checks refuse, and what AMPipe does."""
    more = {
        "flag_of_tomorrow": "1",
        "experimental_attention_variant": "of_tomorrow",
        "cross_entropy_loss_fusion": "true",
        "cross_entropy_fusion_impl": "te",
        "moe_paged_stash": "true",
        "save_dgrads_interval": "1",
    }
    lines = [f"  {key}: {value}\n" for key, value in more.items()]
    recipe.write_text(RECIPE + "".join(lines))
    found = answer(ampipe, recipe)
    stops = found["recipe"]["stops"]
    parts = [
        "has no --flag-of-tomorrow, so its parser ends the launch",
        f"{recipe}:44: --experimental-attention-variant of_tomorrow: is not one of its values",
        "(refused by Megatron): Transformer Engine cross entropy loss fusion is disabled",
        f"{recipe}:48: --save-dgrads-interval 1: with --ampipe-",
        f"{recipe}:47: --moe-paged-stash True: with --ampipe-",
    ]
    for part in parts:
        assert any(part in stop for stop in stops), stops
    assert not found["recipe"]["accepted"] and found["predicted_speedup"] > 1
    words = found["next"].split()
    assert words[words.index("--without") + 1] == "experimental-attention-variant,flag-of-tomorrow"
    assert words[words.index("--cross-entropy-fusion-impl") + 1] == "native"
    refused = ampipe("config", "--recipe", recipe, code=2).err
    assert ":43: --flag-of-tomorrow: there are no such flags in Megatron" in refused
    assert "--without flag-of-tomorrow" in refused


def test_a_layout_that_does_not_fit_is_the_answer(ampipe: Command, recipe: Path) -> None:
    found = answer(ampipe, recipe, "--ranks", "24")
    (stop,) = found["recipe"]["stops"]
    assert "which must divide the 24 ranks of the run" in stop
    assert "must divide the 24 ranks" in found["not_predicted"]


def test_in_one_nvlink_domain_the_answer_is_no(ampipe: Command, recipe: Path) -> None:
    words = ["--set", "expert-model-parallel-size=8"]
    shown = ampipe("plan", "--recipe", recipe, "--cluster", "dgx-h100", *QUICK, *words).out
    no = "no: your all-to-alls stay in one NVLink domain, of 8 ranks; use Megatron's overlap of two micro-"
    assert no in shown and "hybridep" in shown and "full_iteration" in shown
    assert "no: your" not in ampipe("plan", "--recipe", recipe, "--cluster", "dgx-h100", *QUICK).out


def test_a_job_script_is_planned_on_the_fewest_nodes_that_hold_it(ampipe: Command, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(
        "EP=${EP_OF_NOBODY:-16}\n"
        "ARGS=(\n  --num-layers 2 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048\n"
        "  --max-position-embeddings 2048 --num-experts 32 --moe-router-topk 4\n"
        "  --moe-token-dispatcher-type alltoall --expert-model-parallel-size $EP --micro-batch-size 1\n"
        "  --global-batch-size 64 --lr 1e-4 --train-iters 5 --bf16 --tokenizer-type NullTokenizer\n"
        "  --vocab-size 1000 --data-path $1 --ampipe-degree 2\n)\n"
        "torchrun pretrain_gpt.py ${ARGS[@]}\n"
    )
    found = answer(ampipe, script, "--no-partner")
    assert found["recipe"]["accepted"], found["recipe"]["stops"]
    assert found["recipe"]["ranks"] == 16
    assert any("--data-path is left out: the value of $1" in sentence for sentence in found["assumed"])
    said = ampipe("config", "--recipe", script, "--mock-data", "--ranks", 16, "--format", "command")
    assert "--ampipe-degree 2 \\\n" in said.out and "--data-path is left out" in said.err
