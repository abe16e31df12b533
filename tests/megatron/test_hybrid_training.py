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
    pretrain_several,
    torchrun_command,
)

pytestmark = pytest.mark.timeout(400)

TOLERANCE = 1e-5
"""Relative difference of a loss due to fp32 rounding; measured: 0."""
LAST_DIGIT_OF_GRAD_NORM = 1.001e-3

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
    },
}
PAIRS = {name: (layout, pair) for layout, pairs in LAYOUTS.items() for name, pair in pairs.items()}


def _words(pair: Pair, *, added: str = "") -> list[str]:
    return [*COMMON, "--hybrid-layer-pattern", pair.pattern, *shlex.split(pair.flags), *shlex.split(added)]


@cache
def runs_of(layout: str) -> Mapping[str, Run]:
    """All runs of a layout, by case and number; the stock run is number 0."""
    runs = {
        f"{name} {number}": _words(pair, added=added)
        for name, pair in LAYOUTS[layout].items()
        for number, added in enumerate(("", *pair.added))
    }
    found = pretrain_several(runs, num_ranks=2, timeout_s=380)
    for name, run in found.items():
        assert run.exit_code == 0, f"{name}:\n{run.output[-6000:]}"
    assert found.keys() == runs.keys()
    return found


@pytest.mark.parametrize("name", PAIRS)
def test_hybrid_models_train_like_stock(name: str) -> None:
    layout, pair = PAIRS[name]
    stock = runs_of(layout)[f"{name} 0"]
    assert stock.iterations == [1, 2, 3, 4]
    assert stock.lm_loss[-1] < stock.lm_loss[0], "a run that learns nothing proves little"
    for number in range(1, len(pair.added) + 1):
        ours = runs_of(layout)[f"{name} {number}"]
        _assert_same_digits(stock, ours)
        assert pair.row in ours.table


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
    found = pretrain_several(
        {name: [*common, *words] for name, words in runs.items()}, num_ranks=2, timeout_s=280
    )
    for name, run in found.items():
        assert run.exit_code == 0, f"{name}:\n{run.output[-6000:]}"
    unbroken = runs_of("ep2")["mamba-between 0"]
    assert found["stock"].iterations == [3, 4]
    assert found["pipelined again"].iterations == [4]
    for name, begin in (("stock", 2), ("pipelined again", 3)):
        resumed = found[name]
        # Of the second iteration after a resume, Megatron prints the mean of the first two losses.
        assert resumed.lm_loss[0] == pytest.approx(unbroken.lm_loss[begin], rel=TOLERANCE)
        assert resumed.grad_norm == pytest.approx(unbroken.grad_norm[begin:], abs=LAST_DIGIT_OF_GRAD_NORM)


def test_the_script_of_a_checkout_trains_like_stock(tmp_path: Path) -> None:
    """``pretrain_hybrid.py`` with the launcher; every pair of both ranks is in the trace."""
    script = lay_out(tmp_path / "checkout", "0.19").with_name("pretrain_hybrid.py")
    pair = LAYOUTS["ep2"]["mamba-between"]
    spec = "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
    words = _words(pair, added=f"{STACKS} {spec} --ampipe-trace-dir {tmp_path / 'trace'}")
    run = execute(torchrun_command("-m", "megatron_ampipe.launch", str(script), *words))
    assert run.exit_code == 0, run.output[-6000:]
    _assert_same_digits(runs_of("ep2")["mamba-between 0"], run)
    for rank in (0, 1):
        events = json.loads((tmp_path / "trace" / f"rank{rank}.trace.json").read_text())["traceEvents"]
        layers = {event["args"]["layer"] for event in events if "layer" in event.get("args", {})}
        # Of the pattern M*EM*-*EM: the dense pair shares the schedule of the pair after it.
        assert layers == {2, 5, 7}


def _assert_same_digits(stock: Run, ours: Run) -> None:
    assert ours.iterations == stock.iterations
    assert ours.lm_loss == pytest.approx(stock.lm_loss, rel=TOLERANCE)
    assert ours.load_balancing_loss == pytest.approx(stock.load_balancing_loss, rel=TOLERANCE)
    assert ours.grad_norm == pytest.approx(stock.grad_norm, abs=LAST_DIGIT_OF_GRAD_NORM)
