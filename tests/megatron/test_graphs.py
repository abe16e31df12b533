"""Trainings whose stages are captured as CUDA graphs, over a stand-in, log the digits of stock ones."""

import re
import shlex

import pytest

from tests.megatron.launcher import assert_same_digits, train
from tests.megatron.trainings import COMMON, EP, LLAMA, NUM_ITERATIONS, PP, SHARED

pytestmark = pytest.mark.timeout(600)

WORKER = "tests.megatron.graphs_worker"
GRAPHS = "--cuda-graph-impl local --cuda-graph-modules attn moe_router moe_preprocess mlp "


def test_trains_like_megatrons_layers() -> None:
    """In a pipeline several micro-batches are in flight, each with its own graphs."""
    flags = EP + PP + LLAMA + SHARED + "--num-layers 4 "
    stock, ours = (
        train(*COMMON, *shlex.split(flags + added), num_ranks=4, timeout_s=300, module=WORKER)
        for added in ("", f"{GRAPHS}--ampipe-degree 4")
    )
    assert_same_digits(stock, ours, iterations=NUM_ITERATIONS)
    replays = [int(count) for count in re.findall(r"replays: (\d+)", ours.output)]
    # Also on the last rank, which logs every iteration.
    assert len(replays) == 4
    assert min(replays) > 0
