"""Trainings with Megatron-FSDP, whose ranks hold parts of the parameters, log the digits of stock ones."""

import shlex

import pytest

from tests.megatron.launcher import Run, assert_same_digits, pretrain
from tests.megatron.trainings import COMMON, EP, LLAMA, MOCK_DATA, NUM_ITERATIONS, SHARED

pytestmark = pytest.mark.timeout(900)

FSDP = (
    EP + LLAMA + SHARED + "--use-megatron-fsdp --use-distributed-optimizer --ckpt-format fsdp_dtensor "
    "--untie-embeddings-and-output-weights --calculate-per-token-loss --data-parallel-sharding-strategy "
)
AGAIN = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "


def train(flags: str) -> Run:
    """On four ranks: two expert-parallel ones, and two that share the experts."""
    words = [*COMMON, *MOCK_DATA, *shlex.split(flags)]
    run = pretrain(*words, num_ranks=4, timeout_s=400, module="tests.megatron.fsdp_worker")
    assert run.exit_code == 0, run.output[-6000:]
    return run


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim_grads"])
def test_trains_like_megatrons_layers(strategy: str) -> None:
    flags = f"{FSDP}{strategy} "
    stock = train(flags)
    ours = [train(f"{flags}{again}--ampipe-degree 4") for again in ("", AGAIN)]
    assert_same_digits(stock, *ours, iterations=NUM_ITERATIONS)
    for run in ours:
        assert "layers per schedule 1, in place of all Megatron-FSDP gathers the parameters" in run.table
