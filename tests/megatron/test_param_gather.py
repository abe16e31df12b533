"""``--overlap-param-gather``: parameters are gathered during the forward pass, and training equals stock.

Megatron gathers the parameters bucket by bucket, and waits for a bucket when a module with a parameter in it
is called. The bucket size determines how many gathers are in flight; it does not change results. All runs of
a layout share the same ranks.
"""

from __future__ import annotations

import shlex

import pytest

from tests.megatron.launcher import MOCK_DATA, TINY_GPT, TINY_MOE, pretrain_several
from tests.megatron.pairs import assert_same_digits

NUM_ITERATIONS = 4
"""Iterations: a bucket without a wait fails in the third."""

COMMON = [
    *TINY_GPT,
    *TINY_MOE,
    *MOCK_DATA,
    *shlex.split(
        f"--train-iters {NUM_ITERATIONS} --attention-dropout 0 --hidden-dropout 0 "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    ),
]
LAYOUTS = {
    "dp2": (2, []),
    "dp2-ep2": (4, ["--expert-model-parallel-size", "2"]),
    "dp2-pp2": (4, ["--pipeline-model-parallel-size", "2"]),
}
BUCKETS = {
    "every-parameter": ["--ddp-bucket-size", "1"],
    "some-parameters": ["--ddp-bucket-size", "1000"],
    "default": [],
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_buckets_of_every_size_train_like_stock(layout: str) -> None:
    num_ranks, flags = LAYOUTS[layout]
    runs = {"stock": [*COMMON, *flags, *BUCKETS["every-parameter"]]}
    runs |= {name: [*COMMON, *flags, *size, "--ampipe-degree", "4"] for name, size in BUCKETS.items()}
    found = pretrain_several(runs, num_ranks=num_ranks, timeout_s=800)
    for name, run in found.items():
        assert run.exit_code == 0, f"{name}:\n{run.output[-6000:]}"
    assert found.keys() == runs.keys()
    stock = found.pop("stock")
    assert stock.iterations == list(range(1, NUM_ITERATIONS + 1))
    assert_same_digits(stock, *found.values())
