"""The memory of a whole rank: published numbers of parameters, bytes of each, what is not known."""

from pathlib import Path
from typing import Any

import pytest

from megatron_ampipe.plan.model_block import block_of
from megatron_ampipe.plan.model_file import find_model, read_model
from megatron_ampipe.plan.rank_memory import RankMemory, memory_by_stage
from megatron_ampipe.schedule import Pipeline
from tests.plan_cases import cluster, model_file


def ranks_of(path: Path, ranks: int, degree: int = 2, **settings: Any) -> list[RankMemory]:
    """By pipeline stage; ``settings`` are flags with underscores."""
    overrides = {key.replace("_", "-"): value for key, value in settings.items()}
    model = read_model(path, overrides=overrides)
    block, _ = block_of(model, cluster("dgx-h100"), ranks=ranks)
    memory = memory_by_stage(model, block, Pipeline.of(degree))
    assert not isinstance(memory, str), memory
    return memory


@pytest.mark.parametrize(
    ("name", "published", "stages"),
    [
        ("qwen3-30b-a3b-like", 30_532_122_624, (4, 48)),
        ("mixtral-8x7b", 46_702_792_704, (4, 32)),
        ("deepseek-v2-lite", 15_706_484_224, (3, 27)),
        # Without predictors of later tokens, and without the bias of the router, which is not trained.
        ("deepseek-v3-like", 671_026_419_200 - 58 * 256, (61,)),
    ],
)
def test_a_model_has_as_many_parameters_as_published(
    name: str, published: int, stages: tuple[int, ...]
) -> None:
    settings = {"expert_model_parallel_size": 1, "mtp_num_layers": 0}
    (whole,) = ranks_of(find_model(name), 1, **settings)
    assert sum(whole.parameters) == published
    # Parts of it are on the ranks of pipeline stages.
    for number in stages:
        ranks = ranks_of(find_model(name), number, **settings, pipeline_model_parallel_size=number)
        assert sum(sum(rank.parameters) for rank in ranks) == published


def test_bytes_of_a_parameter_on_a_gpu(tmp_path: Path) -> None:
    """Of optimizers that Megatron does not build on a CPU; tests/dist/test_rank_memory.py has the others."""
    model = model_file(tmp_path, "vocab-size: 1000\n")
    (half,) = ranks_of(model, 8, bf16=False, fp16=True, optimizer="sgd")
    assert half.optimizer == 8 * sum(half.parameters)
    aware = {"use_distributed_optimizer": True, "use_precision_aware_optimizer": True}
    (sharded,) = ranks_of(model, 8, use_distributed_optimizer=True)
    (rank,) = ranks_of(model, 8, **aware, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    # Half of a master weight, and moments in 16 bit.
    assert rank.optimizer == sharded.optimizer / 12 * 6
    (rank,) = ranks_of(model, 8, **aware, main_grads_dtype="bf16")
    assert (rank.gradients, rank.optimizer) == (2 * sum(rank.parameters), sharded.optimizer / 12 * 10)


def test_activations_of_the_first_stage_wait_for_all_others(tmp_path: Path) -> None:
    model = model_file(tmp_path, "vocab-size: 1000\n")
    first, second = ranks_of(model, 16, pipeline_model_parallel_size=2)
    logits = 16384 * 1024 * 6
    assert first.activations > 1.8 * (second.activations - logits)
    (alone,) = ranks_of(model, 8)
    # With as many layers in flight; only the last stage has logits.
    assert first.activations == pytest.approx(alone.activations - logits)
    (again,) = ranks_of(model, 8, recompute_granularity="full")
    assert again.activations < alone.activations / 3
    (virtual, _) = ranks_of(model, 16, pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2)
    # Stages of three layers: two warm up for the other rank, two more, and one in work.
    assert virtual.activations / first.activations == pytest.approx(5 / 4, rel=0.1)
    assert ranks_of(model, 8, moe_token_dispatcher_type="flex")[0].buffers > 0 == alone.buffers


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no vocab-size"),
        ("vocab-size: 10\noptimizer: muon\n", "the optimizer muon"),
        ("vocab-size: 10\nmoe-latent-size: 64\n", "--moe-latent-size"),
        ("vocab-size: 10\nhybrid-layer-pattern: M*E*E\n", "hybrid models"),
    ],
)
def test_what_cannot_be_estimated_is_said(text: str, why: str, tmp_path: Path) -> None:
    model = read_model(model_file(tmp_path, text))
    block, _ = block_of(model, cluster("dgx-h100"))
    reason = memory_by_stage(model, block, Pipeline.of(2))
    assert isinstance(reason, str) and why in reason
