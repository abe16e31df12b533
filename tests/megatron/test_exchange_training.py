"""Training runs that send a token once to each rank or node, or in two hops (``--ampipe-exchange``).

All runs of a layout have the same mock data and seed as stock's and share its ranks; they must log the
same digits.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.megatron.launcher import MOCK_DATA, TINY_GPT, TINY_MOE, Run
from tests.megatron.pairs import assert_resumed, assert_same_digits, runs_of

pytestmark = pytest.mark.timeout(900)

SAVED_ITERATION = 2
COMMON = [
    *TINY_GPT,
    *TINY_MOE,
    *MOCK_DATA,
    *shlex.split(
        "--attention-dropout 0 --hidden-dropout 0 --lr-decay-style constant --seq-length 32 "
        "--expert-model-parallel-size 2 --num-experts 8 --moe-router-topk 4 --moe-z-loss-coeff 1e-3 "
        "--moe-expert-capacity-factor 1.0 --moe-token-drop-policy position "
        "--moe-shared-expert-intermediate-size 32"
    ),
]
KINDS = {
    "stock": "",
    "one-chunk": "--ampipe-exchange ranks",
    "chunks": "--ampipe-exchange ranks --ampipe-degree 4",
}


def test_runs_and_their_restarts_equal_stock(tmp_path: Path) -> None:
    """With a capacity, shared experts and losses. Each kind goes on from a checkpoint of another."""
    runs = {
        kind: f"{flags} --save {tmp_path / kind} --save-interval {SAVED_ITERATION}"
        for kind, flags in KINDS.items()
    }
    for kind, other in (("stock", "chunks"), ("one-chunk", "stock")):
        runs[f"{kind} from {other}"] = (
            f"{KINDS[kind]} --load {tmp_path / other} --ckpt-step {SAVED_ITERATION}"
        )
    found = _train(runs)
    stock = found["stock"]
    for kind in ("one-chunk", "chunks"):
        assert_same_digits(stock, found[kind], iterations=4)
        assert "exchange ranks a row for each rank that has experts of a token" in found[kind].table
    for name in list(runs)[len(KINDS) :]:
        assert_resumed(found[name], stock, first=SAVED_ITERATION + 1)


def test_tensor_parallel_runs_equal_stock() -> None:
    """Experts whole on each rank, in stacks; the parity cases have those that are spread over ranks."""
    layout = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
    found = _train({kind: f"{layout} {KINDS[kind]}" for kind in ("stock", "chunks")})
    assert_same_digits(found["stock"], found["chunks"], iterations=4)


def test_gathers_of_experts_that_ranks_share_equal_stock() -> None:
    """Four ranks on two nodes, and what each memory strategy gathers once more."""
    layout = (
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2 "
        "--moe-token-dispatcher-type alltoall"
    )
    ours = f"{layout} --ampipe-degree 4 --ampipe-ranks-per-node 2"
    found = _train(
        {
            "stock": layout,
            "gathers": f"{ours} --ampipe-memory rebuild/redispatch/S2/S3",
            "ranks": f"{ours} --ampipe-exchange ranks --ampipe-schedule lancet",
        },
        num_ranks=4,
    )
    for kind in ("gathers", "ranks"):
        assert_same_digits(found["stock"], found[kind], iterations=4)


def test_two_hops_and_their_restarts_equal_stock(tmp_path: Path) -> None:
    """Four ranks on two nodes. Each goes on from a checkpoint of the other."""
    layout = "--expert-model-parallel-size 4"
    in_hops = f"{layout} --ampipe-ranks-per-node 2 --ampipe-degree 4 --ampipe-exchange"
    kinds = {"stock": layout, "nodes": f"{in_hops} nodes", "2dh": f"{in_hops} 2dh"}
    runs = {}
    for (kind, flags), other in zip(kinds.items(), ("2dh", "stock", "nodes"), strict=True):
        runs[kind] = f"{flags} --save {tmp_path / kind} --save-interval {SAVED_ITERATION}"
        runs[f"{kind} from {other}"] = f"{flags} --load {tmp_path / other} --ckpt-step {SAVED_ITERATION}"
    # Checkpoints have to be there first.
    found = _train(dict(sorted(runs.items(), key=lambda run: "from" in run[0])), num_ranks=4)
    for kind, told in (
        ("nodes", "a row for each node that has experts of a token"),
        ("2dh", "a row for each expert of a token, to its node and then inside it"),
    ):
        assert_same_digits(found["stock"], found[kind], iterations=4)
        assert f"exchange {kind} {told}" in found[kind].table
    for resumed in ("stock from 2dh", "nodes from stock", "2dh from nodes"):
        assert_resumed(found[resumed], found["stock"], first=SAVED_ITERATION + 1)


def _train(runs: dict[str, str], *, num_ranks: int = 2) -> Mapping[str, Run]:
    lines = {name: [*COMMON, *shlex.split(flags)] for name, flags in runs.items()}
    return runs_of(lines, num_ranks=num_ranks)
