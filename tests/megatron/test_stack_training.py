"""Training runs of four layers that share a schedule (``--ampipe-stack``), compared with stock runs.

Each case is a stock run and runs with AMPipe, of the same mock data and seed; they must log the same digits.
All cases of a layout share the same ranks.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron_ampipe.schedule import Pipeline
from tests.megatron.launcher import MOCK_DATA, TINY_GPT, TINY_MOE, Run
from tests.megatron.pairs import assert_resumed, assert_same_digits, digits, numbered, runs_of

pytestmark = pytest.mark.timeout(900)

NUM_ITERATIONS = 4
SAVED_ITERATION = 2

COMMON = [
    *TINY_GPT,
    *TINY_MOE,
    *MOCK_DATA,
    *shlex.split(
        f"--num-layers 4 --train-iters {NUM_ITERATIONS} --seq-length 32 --attention-dropout 0 "
        "--hidden-dropout 0 --lr-decay-style constant --global-batch-size 4"
    ),
]
EP = "--expert-model-parallel-size 2 "
ALL = "--ampipe-stack all --ampipe-degree 2"
REBUILD, REDISPATCH = (f"{ALL} --ampipe-memory {two}" for two in ("rebuild/offload", "redispatch/S3"))
PLACED = "--ampipe-grad-reduce placed"
OTHERS = (ALL, "--ampipe-stack 2 --ampipe-degree 4 --ampipe-backward-degree 2")


@dataclass(frozen=True, slots=True)
class Pair:
    """A stock run, and what is added to its flags in runs that must equal it."""

    flags: str
    added: tuple[str, ...] = (ALL,)
    boundary: str = "boundaries between pipeline stages"
    """What the start-up table says of the first of these runs."""


LAYOUTS: dict[str, dict[str, Pair]] = {
    "ep2": {
        # The dense parameters are data-parallel. An evaluation takes the pre-hooks of the gather away.
        # With Megatron's own seed, one token of the last iteration is between two experts: rounding sends it
        # to another one at degree 4 on some machines, block by block too.
        "overlaps": Pair(
            EP + "--seed 7 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
            "--ddp-bucket-size 1000 --eval-iters 1 --eval-interval 2 --global-batch-size 8",
            added=(*OTHERS, REDISPATCH, f"{ALL} {PLACED}", f"--ampipe-schedule lancet {PLACED}"),
        ),
        "dense-first": Pair(EP + "--moe-layer-freq [0,1,1,1] --moe-shared-expert-intermediate-size 32"),
        "dense-between": Pair(EP + "--moe-layer-freq [1,0,1,0] --moe-z-loss-coeff 1e-3", added=OTHERS),
        "recompute": Pair(
            EP + "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        ),
        # Layers of the user's own specification.
        "spec": Pair(
            EP + "--spec tests.megatron.custom_spec block",
            added=(ALL, "--ampipe-degree 4"),
        ),
        "mtp": Pair(
            EP + "--mtp-num-layers 1 --position-embedding-type rope",
            boundary="each MTP layer has its own schedule",
        ),
    },
    "tp2": {
        "sequence-parallel": Pair(
            EP + "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
            added=OTHERS,
        ),
    },
    "pp2": {
        "interleaved": Pair(
            "--pipeline-model-parallel-size 2 --num-layers 8 --num-layers-per-virtual-pipeline-stage 2 "
            "--global-batch-size 8",
            # Several micro-batches wait for their backward at the same time.
            added=(ALL, f"{REBUILD} --overlap-grad-reduce {PLACED}"),
            boundary="boundaries between virtual pipeline stages",
        ),
    },
}
PAIRS = {name: (layout, pair) for layout, pairs in LAYOUTS.items() for name, pair in pairs.items()}


@cache
def layout_runs(layout: str) -> Mapping[str, Run]:
    """All runs of a layout, by case and number; the stock run is number 0."""
    return runs_of(
        numbered(
            {
                name: ([*COMMON, *shlex.split(pair.flags)], *map(shlex.split, pair.added))
                for name, pair in LAYOUTS[layout].items()
            }
        )
    )


@pytest.mark.parametrize("name", PAIRS)
def test_layers_that_share_a_schedule_train_like_stock(name: str) -> None:
    layout, pair = PAIRS[name]
    stock, *ours = (layout_runs(layout)[f"{name} {number}"] for number in range(len(pair.added) + 1))
    assert_same_digits(stock, *ours, iterations=NUM_ITERATIONS)
    table = layout_runs(layout)[f"{name} 1"].table
    assert "layers per schedule all " in table
    assert pair.boundary in table


def test_an_evaluation_runs_through_the_stack() -> None:
    stock, *stacked = (layout_runs("ep2")[f"overlaps {number}"] for number in range(4))
    assert len(stock.validation_loss) == NUM_ITERATIONS // 2
    for ours in stacked:
        assert ours.validation_loss == digits(stock.validation_loss)


def test_checkpoints_of_stacks_and_of_stock_interchange(tmp_path: Path) -> None:
    """Each kind of run goes on from a checkpoint of the other, its optimizer state included.

    The experts of the stack keep more after the restart than before.
    """
    common = [*COMMON, *EP.split()]
    kinds = {"stock": [], "stack": REDISPATCH.split()}
    runs = {
        kind: [*common, *flags, "--save", str(tmp_path / kind), "--save-interval", str(SAVED_ITERATION)]
        for kind, flags in kinds.items()
    }
    runs |= {
        f"{kind} from {other}": [
            *common,
            *flags,
            *("--load", str(tmp_path / other), "--ckpt-step", str(SAVED_ITERATION)),
        ]
        for kind, flags in kinds.items()
        for other in kinds
        if other != kind
    }
    runs["rebuild from stack"] = [*runs["stock from stack"], *REBUILD.split()]
    found = runs_of(runs)
    assert_same_digits(found["stock"], found["stack"])
    for name in ("stock from stack", "stack from stock", "rebuild from stack"):
        assert_resumed(found[name], found["stock"], first=SAVED_ITERATION + 1)


ROWS: dict[str, tuple[int, dict[str, Any], tuple[str, str]]] = {
    "all": (0, {}, ("all", "boundaries between pipeline stages")),
    "four": (4, {}, ("4", "boundaries between pipeline stages, and after every 4 layers")),
    "one": (1, {}, ("1", "layer by layer; --ampipe-stack all lets consecutive layers share a schedule")),
    "virtual-stages-and-mtp": (
        2,
        {"virtual_pipeline_model_parallel_size": 2, "mtp_num_layers": 1},
        (
            "2",
            "boundaries between virtual pipeline stages, and after every 2 layers; each MTP layer has its "
            "own schedule",
        ),
    ),
    "hybrid": (
        0,
        {"hybrid_layer_pattern": "*E*E"},
        ("all", "boundaries between pipeline stages, and at layers that are not in pairs"),
    ),
    "context": (
        0,
        {"context_parallel_size": 2},
        (
            "1, in place of all",
            "a boundary after every layer: with context parallelism, a layer needs keys and values of the "
            "whole sequence",
        ),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_start_up_table_says_where_boundaries_are(name: str) -> None:
    from megatron_ampipe.launch.startup import stack_row

    stack, settings, expected = ROWS[name]
    plain = {
        "context_parallel_size": 1,
        "tensor_model_parallel_size": 1,
        "moe_expert_capacity_factor": None,
        "recompute_granularity": None,
        "virtual_pipeline_model_parallel_size": None,
        "mtp_num_layers": None,
        "hybrid_layer_pattern": None,
    }
    args = argparse.Namespace(**plain | settings)
    assert stack_row(args, Pipeline.of(4, stack=stack)) == ("layers per schedule", *expected)
