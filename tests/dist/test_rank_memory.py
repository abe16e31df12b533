"""What a rank holds by the planner's count equals what Megatron's model, gradient buffers, optimizer hold."""

import math
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron_ampipe.plan.model_block import block_of
from megatron_ampipe.plan.model_file import read_model
from megatron_ampipe.plan.rank_memory import memory_by_stage
from megatron_ampipe.schedule import Pipeline

pytestmark = pytest.mark.ranks(2)
BASE = (
    "--hidden-size 96 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --train-iters 4 --lr 1e-3 --num-layers 4 --vocab-size 300 --num-experts 4 "
    "--ffn-hidden-size 160 --transformer-impl local --expert-model-parallel-size 1"
)
ELSEWHERE = (
    "--tokenizer-type NullTokenizer --mock-data --eval-iters 0 --eval-interval 100 --global-batch-size 4"
)
LAYOUTS = {
    "plain": "",
    "experts": "--expert-model-parallel-size 2 --swiglu --normalization RMSNorm --disable-bias-linear",
    "tensor": "--tensor-model-parallel-size 2 --sequence-parallel --group-query-attention "
    "--num-query-groups 2 --qk-layernorm --kv-channels 32 --untie-embeddings-and-output-weights "
    "--disable-bias-linear",
    "tensor-bias": "--tensor-model-parallel-size 2 --sequence-parallel --position-embedding-type rope "
    "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
    "latent": "--tensor-model-parallel-size 2 --sequence-parallel --multi-latent-attention --q-lora-rank 24 "
    "--kv-lora-rank 32 --qk-layernorm --position-embedding-type rope --disable-bias-linear "
    "--moe-shared-expert-intermediate-size 64 --moe-layer-freq ([0]+[1]*3)",
    "pipeline": "--pipeline-model-parallel-size 2 --add-qkv-bias --disable-bias-linear",
    "virtual": "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
    "--untie-embeddings-and-output-weights --moe-layer-freq 2",
    "predictor": "--pipeline-model-parallel-size 2 --mtp-num-layers 1 --untie-embeddings-and-output-weights "
    "--position-embedding-type rope --disable-bias-linear",
    "sharded": "--use-distributed-optimizer --bf16",
    "sharded-experts": "--use-distributed-optimizer --bf16 --expert-model-parallel-size 2 "
    "--disable-bias-linear",
    "bf16-gradients": "--bf16 --grad-reduce-in-bf16",
    "sgd": "--optimizer sgd",
}


def model_file(words: list[str], path: Path) -> Path:
    """The same flags as a model file."""
    values: dict[str, Any] = {}
    for place, word in enumerate(words):
        if word.startswith("--"):
            alone = place + 1 == len(words) or words[place + 1].startswith("--")
            values[word.removeprefix("--")] = True if alone else yaml.safe_load(words[place + 1])
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_of_a_rank_equal_those_of_megatron(name: str, tmp_path: Path) -> None:
    from megatron.core import mpu
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.models.gpt import GPTModelBuilder
    from megatron.training.training import get_megatron_ddp_config, get_megatron_optimizer_config

    from tests.dist.command_lines import launched, use_groups_of, with_stock_layers

    words = shlex.split(f"{BASE} {LAYOUTS[name]}")
    launch = launched([*words, *shlex.split(ELSEWHERE), "--ampipe-degree", "2"])
    with launch as (args, config), with_stock_layers():
        use_groups_of(args)
        config.finalize()
        chunks = GPTModelBuilder(config).build_distributed_models(
            ProcessGroupCollection.use_mpu_process_groups(), ddp_config=get_megatron_ddp_config(args)
        )
        optimizer_config, _ = get_megatron_optimizer_config(args)
        optimizer = get_megatron_optimizer(optimizer_config, chunks, use_gloo_process_groups=False)
        stage = mpu.get_pipeline_model_parallel_rank()

    model = read_model(model_file(words, tmp_path / "model.yaml"))
    block, _ = block_of(model, None, ranks=2)
    ranks = memory_by_stage(model, block, Pipeline.of(2))
    assert not isinstance(ranks, str)
    found = ranks[stage]

    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    experts = [one for one in parameters if not getattr(one, "allreduce", True)]
    # Megatron gives experts separate buffers only where fewer ranks reduce them.
    counted = (sum(found.parameters), found.parameters.experts if experts else 0)
    assert counted == tuple(sum(map(torch.Tensor.numel, those)) for those in (parameters, experts))
    assert found.weights == sum(parameter.nbytes for parameter in parameters)
    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    padding = 256 * len(parameters) * (4 if block.shards_optimizer else 0)
    gradients = sum(buffer.grad_data.nbytes for buffer in buffers)
    assert 0 <= gradients - found.gradients <= padding
    for buffer in buffers:
        buffer.grad_data.zero_()
    optimizer.step()
    kept = kept_bytes(optimizer)
    assert kept == pytest.approx(found.optimizer, rel=0.02 if block.shards_optimizer else 1e-12)
    assert not math.isnan(found.activations) and found.activations > 0


def kept_bytes(optimizer: Any) -> int:
    """Master weights and moments, without Adam's counters of steps."""
    total = 0
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        state = part.optimizer.state
        tensors = [value for of in state.values() for value in of.values() if isinstance(value, torch.Tensor)]
        total += sum(tensor.nbytes for tensor in tensors if tensor.dim())
        for groups in ("fp32_from_float16_groups", "shard_fp32_from_float16_groups"):
            of_groups = getattr(part, groups, [])
            total += sum(tensor.nbytes for group in of_groups for tensor in group)
    return total
