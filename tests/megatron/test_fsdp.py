"""Trainings with Megatron-FSDP, whose ranks hold parts of the parameters, log the digits of stock ones."""

import shlex

import pytest

from tests.megatron.launcher import assert_same_digits, train
from tests.megatron.trainings import COMMON, EP, LLAMA, NUM_ITERATIONS, SHARED

pytestmark = pytest.mark.timeout(900)

WORKER = "tests.megatron.fsdp_worker"
FSDP = (
    EP + LLAMA + SHARED + "--use-megatron-fsdp --use-distributed-optimizer --ckpt-format fsdp_dtensor "
    "--untie-embeddings-and-output-weights --calculate-per-token-loss --data-parallel-sharding-strategy "
)
AGAIN = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim_grads"])
def test_trains_like_megatrons_layers(strategy: str) -> None:
    """On four ranks: two expert-parallel ones, and two that share the experts."""
    stock, *ours = (
        train(*COMMON, *shlex.split(f"{FSDP}{strategy} {added}"), num_ranks=4, timeout_s=400, module=WORKER)
        for added in ("", "--ampipe-degree 4", f"{AGAIN}--ampipe-degree 4")
    )
    assert_same_digits(stock, *ours, iterations=NUM_ITERATIONS)
    for run in ours:
        assert "layers per schedule 1, in place of all Megatron-FSDP gathers the parameters" in run.table
