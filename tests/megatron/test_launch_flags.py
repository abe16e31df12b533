"""Training runs with flags of well-known models and of records of the routing, compared with stock runs.

All share their ranks, data and seed; they must log the same digits, and write the same records.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.megatron.launcher import MOCK_DATA, TINY_GPT, TINY_MOE, Run
from tests.megatron.pairs import assert_same_digits, runs_of

pytestmark = pytest.mark.timeout(900)

COMMON = [
    *TINY_GPT,
    *TINY_MOE,
    *MOCK_DATA,
    *shlex.split(
        "--seq-length 32 --attention-dropout 0 --hidden-dropout 0 --lr-decay-style constant "
        "--position-embedding-type rope --expert-model-parallel-size 2"
    ),
]
PAIRS = {
    "sinks": (
        "--softmax-type learnable --attention-output-gate --group-query-attention --num-query-groups 2 "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --window-size 16,0 "
        "--window-attn-skip-freq 2",
        "--ampipe-degree 4",
    ),
    "latent": (
        "--moe-latent-size 16 --moe-shared-expert-intermediate-size 32 --moe-expert-capacity-factor -1 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--ampipe-degree 2 --ampipe-stack all",
    ),
    "records": (
        "--moe-routing-trace-path {folder}/{run} --moe-enable-routing-replay "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-router-bias-update-rate 1e-2 --tensor-model-parallel-size 2 --sequence-parallel "
        "--expert-tensor-parallel-size 1",
        "--ampipe-degree 4 --ampipe-stack all",
    ),
    "sinkhorn": (
        "--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0 --moe-z-loss-coeff 0.01 "
        "--moe-shared-expert-intermediate-size 32 --use-distributed-optimizer --overlap-grad-reduce "
        "--overlap-param-gather",
        "--ampipe-degree 4",
    ),
    "quantiles": (
        "--moe-router-load-balancing-type quantile_balancing --moe-aux-loss-coeff 0 "
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
        "--ampipe-degree 2 --ampipe-stack all",
    ),
    "probs": (
        "--moe-expert-capacity-factor 0.8 --moe-token-drop-policy probs "
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1 --micro-batch-size 2",
        "--ampipe-degree 4 --ampipe-backward-degree 2 --ampipe-stack all",
    ),
    "padded": (
        "--moe-expert-capacity-factor 1.25 --moe-token-drop-policy position "
        "--moe-pad-expert-input-to-capacity --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff -0.1 "
        "--moe-z-loss-coeff -0.001",
        "--ampipe-degree 4",
    ),
}
"""Flags of both runs, and those of AMPipe."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("launch_flags")


@pytest.fixture(scope="module")
def runs(folder: Path) -> Mapping[str, Run]:
    """All runs by name; that of AMPipe has ``-ampipe`` added to its name."""
    lines = {}
    for name, (flags, ours) in PAIRS.items():
        for run, added in ((name, ""), (f"{name}-ampipe", ours)):
            lines[run] = [*COMMON, *shlex.split(flags.format(folder=folder, run=run)), *added.split()]
    return runs_of(lines)


@pytest.mark.parametrize("name", PAIRS)
def test_trains_like_stock(name: str, runs: Mapping[str, Run]) -> None:
    assert_same_digits(runs[name], runs[f"{name}-ampipe"], iterations=4)


def test_a_loss_that_megatron_leaves_out_is_reported(runs: Mapping[str, Run]) -> None:
    assert "--moe-aux-loss-coeff -0.1 ignored: Megatron adds no loss" in runs["padded-ampipe"].table


def test_the_records_of_the_routing_are_those_of_stock(folder: Path, runs: Mapping[str, Run]) -> None:
    assert "records of the routing need Megatron's order of the rows" in runs["records-ampipe"].table
    for rank in (0, 1):
        stock, ours = (_records(folder / name, rank) for name in ("records", "records-ampipe"))
        # Two layers, four micro-batches, four iterations; 16 rows of a sequence are on each rank.
        assert len(stock) == 2 * 4 * 4 and {record["num_tokens"] for record in stock} == {16}
        assert ours == stock


def _records(folder: Path, rank: int) -> list[dict[str, Any]]:
    lines = (folder / f"router_trace_rank{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
