"""Training runs of hybrid models, compared with stock runs of the same data and seed: the same digits.

Through AMPipe's entry point, all of a layout on the same ranks, and once through the script of a checkout.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.megatron.checkout.layout import lay_out
from tests.megatron.launcher import (
    MOCK_DATA,
    TINY_GPT,
    TINY_MOE,
    Run,
    execute,
    torchrun_command,
)
from tests.megatron.pairs import assert_resumed, assert_same_digits, numbered, runs_of

pytestmark = pytest.mark.timeout(900)

COMMON = [
    *TINY_GPT,
    *TINY_MOE,
    *MOCK_DATA,
    *shlex.split(
        "--seq-length 32 --attention-dropout 0 --hidden-dropout 0 --lr-decay-style constant "
        "--position-embedding-type rope --normalization RMSNorm --mamba-head-dim 16 --mamba-num-groups 2 "
        "--mamba-state-dim 16"
    ),
]
BLOCKS = "--ampipe-degree 4 --ampipe-stack 1"
STACKS = "--ampipe-degree 2 --ampipe-stack all"


@dataclass(frozen=True, slots=True)
class Pair:
    """A stock run, and what is added to its flags in runs that must equal it."""

    pattern: str
    row: str
    """What the start-up table says of the layers."""
    flags: str = "--expert-model-parallel-size 2"
    added: tuple[str, ...] = (STACKS,)


LAYOUTS: dict[str, dict[str, Pair]] = {
    "ep2": {
        "attention-moe": Pair("*E*E", "2 pairs of 4 layers"),
        # A dense pair in a stack, an MLP and an MoE layer on their own, an attention layer on its own.
        "dense-layers": Pair("*-*E-*EE*", "2 pairs of 9 layers"),
        "mamba-between": Pair("M*EM*-*EM", "2 pairs of 9 layers", added=(BLOCKS, STACKS)),
        "latent": Pair(
            "+E+E",
            "2 pairs of 4 layers",
            flags="--expert-model-parallel-size 2 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
            "--v-head-dim 16",
        ),
        "full-recompute": Pair(
            "*EM*E",
            "2 pairs of 5 layers",
            flags="--expert-model-parallel-size 2 --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1",
        ),
        "mtp": Pair("*E*E/*E", "those of multi-token prediction too"),
    },
    "tp2": {
        "sequence-parallel": Pair(
            "*E*EM*E",
            "3 pairs of 7 layers",
            flags="--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
            "--expert-tensor-parallel-size 1",
        ),
    },
    "pp2": {
        "stages": Pair("*EM*E|*E*-", "3 pairs of 9 layers", flags="--pipeline-model-parallel-size 2"),
        "stages-hash": Pair(
            "*EM*E|*E*-E",
            "3 pairs of 10 layers",
            flags="--pipeline-model-parallel-size 2 --ampipe-router hash --moe-aux-loss-coeff 0 "
            "--moe-router-load-balancing-type none",
        ),
    },
}
PAIRS = {name: (layout, pair) for layout, pairs in LAYOUTS.items() for name, pair in pairs.items()}


def _words(pair: Pair, *, added: str = "") -> list[str]:
    return [*COMMON, "--hybrid-layer-pattern", pair.pattern, *shlex.split(pair.flags), *shlex.split(added)]


@cache
def layout_runs(layout: str) -> Mapping[str, Run]:
    """All runs of a layout, by case and number; the stock run is number 0."""
    return runs_of(
        numbered(
            {name: (_words(pair), *map(shlex.split, pair.added)) for name, pair in LAYOUTS[layout].items()}
        )
    )


@pytest.mark.parametrize("name", PAIRS)
def test_hybrid_models_train_like_stock(name: str) -> None:
    layout, pair = PAIRS[name]
    stock, *ours = (layout_runs(layout)[f"{name} {number}"] for number in range(len(pair.added) + 1))
    assert_same_digits(stock, *ours, iterations=4)
    assert all(pair.row in run.table for run in ours)


def test_checkpoints_interchange(tmp_path: Path) -> None:
    """A pipelined run saves, a stock run goes on for one iteration, a pipelined one for the last."""
    common = _words(LAYOUTS["ep2"]["mamba-between"])
    every = ["--save-interval", "1"]
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    runs = {
        "pipelined": [*STACKS.split(), "--save", first, *every],
        "stock": ["--load", first, "--ckpt-step", "2", "--save", second, *every],
        "pipelined again": [*STACKS.split(), "--load", second, "--ckpt-step", "3"],
    }
    found = runs_of({name: [*common, *words] for name, words in runs.items()})
    unbroken = layout_runs("ep2")["mamba-between 0"]
    assert_resumed(found["stock"], unbroken, first=3)
    assert_resumed(found["pipelined again"], unbroken, first=4)


def test_the_script_of_a_checkout_trains_like_stock(tmp_path: Path) -> None:
    """``pretrain_hybrid.py`` with the launcher; every pair of both ranks is in the trace."""
    script = lay_out(tmp_path / "checkout", "0.19").with_name("pretrain_hybrid.py")
    pair = LAYOUTS["ep2"]["mamba-between"]
    spec = "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
    words = _words(pair, added=f"{STACKS} {spec} --ampipe-trace-dir {tmp_path / 'trace'}")
    run = execute(torchrun_command("-m", "megatron_ampipe.launch", str(script), *words))
    assert run.exit_code == 0, run.output[-6000:]
    assert_same_digits(layout_runs("ep2")["mamba-between 0"], run)
    for rank in (0, 1):
        events = json.loads((tmp_path / "trace" / f"rank{rank}.trace.json").read_text())["traceEvents"]
        layers = {event["args"]["layer"] for event in events if "layer" in event.get("args", {})}
        # Of the pattern M*EM*-*EM: the dense pair shares the schedule of the pair after it.
        assert layers == {2, 5, 7}
