"""Training with ``--ampipe-router``, compared with Megatron's layers with the same class; ``ampipe gate``."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from megatron_ampipe.block.named_values import SHIPPED_GATES
from tests.forked import REPOSITORY
from tests.megatron.launcher import MOCK_DATA, TINY_GPT, TINY_MOE, Run, environment
from tests.megatron.pairs import assert_resumed, assert_same_digits, digits, runs_of

pytestmark = pytest.mark.timeout(900)

COMMON = [
    *TINY_GPT,
    *TINY_MOE,
    *MOCK_DATA,
    *[
        "--seq-length",
        "32",
        "--attention-dropout",
        "0",
        "--hidden-dropout",
        "0",
        "--lr-decay-style",
        "constant",
    ],
    *["--expert-model-parallel-size", "2"],
]
PIPELINED = ["--ampipe-degree", "4"]
SAVED = 2
"""The iteration from which runs go on."""
NO_LOSS = ["--moe-aux-loss-coeff", "0", "--moe-router-load-balancing-type", "none"]


@dataclass(frozen=True, slots=True)
class Pair:
    """A run of Megatron's layers with a class, and one in chunks.

    Attributes:
        stock: The class in Megatron's layers; None for the same.
        both: Flags of both runs.
        of_stock: Flags that Megatron's layers need in addition.
        in_chunks: Flags that chunks need in addition.
    """

    stock: str | None = None
    both: tuple[str, ...] = ()
    of_stock: tuple[str, ...] = ()
    in_chunks: tuple[str, ...] = ()


# The same numbers are drawn in a whole sequence and in chunks, one layer after the other.
ONE_BY_ONE = ("--ampipe-stack", "1")
ALL_KEPT = ("--moe-expert-capacity-factor", "4", "--moe-token-drop-policy", "position")
ROUTERS = {
    "noisy-topk": Pair(in_chunks=ONE_BY_ONE),
    "cosine": Pair(),
    "sigmoid": Pair(),
    "expert-choice": Pair(
        stock="tests.gates:ExpertChoiceOfEight",
        both=tuple(NO_LOSS),
        of_stock=ALL_KEPT,
        in_chunks=("--ampipe-router-scope", "chunk"),
    ),
    "hash": Pair(both=tuple(NO_LOSS)),
    "tests.gates:ForwardRouter": Pair(),
    "tests.gates:BiasedByIdRouter": Pair(),
}
PARTS = (tuple(ROUTERS)[:3], tuple(ROUTERS)[3:])
"""Routers that share a launch."""


def lines_of(name: str, folder: Path) -> dict[str, list[str]]:
    """The runs of a router; those of a shipped one are also saved, and continued in both ways."""
    pair = ROUTERS[name]
    kinds = {
        "stock": [*COMMON, "--ampipe-router", pair.stock or name, *pair.both, *pair.of_stock],
        "chunks": [*COMMON, "--ampipe-router", name, *pair.both, *PIPELINED, *pair.in_chunks],
    }
    if name not in SHIPPED_GATES:
        return {f"{name} {kind}": words for kind, words in kinds.items()}
    lines = {}
    for kind, words in kinds.items():
        folder_of = {other: folder / name / other for other in kinds}
        lines[f"{name} {kind}"] = [*words, "--save", str(folder_of[kind]), "--save-interval", str(SAVED)]
        for other in kinds if kind == "chunks" else ["chunks"]:
            load = ["--load", str(folder_of[other]), "--ckpt-step", str(SAVED)]
            lines[f"{name} {kind} from {other}"] = [*words, *load]
    # A run can only go on from one that is there.
    return dict(sorted(lines.items(), key=lambda line: " from " in line[0]))


@cache
def runs_of_part(part: int, folder: Path) -> Mapping[str, Run]:
    """All runs of some routers, in one launch."""
    lines: dict[str, list[str]] = {}
    for name in PARTS[part]:
        lines |= lines_of(name, folder)
    if part == 0:
        cosine = [*COMMON, "--ampipe-router", "cosine", *PIPELINED]
        # Exact: only equal tokens are condensed, and the wire changes no row.
        lines["condensed"] = [*cosine, "--ampipe-condense", "1", "--ampipe-wire", "tests.wires:HalvesWire"]
        lines["fp8"] = [*cosine, "--ampipe-wire", "fp8"]
        scope = ["--ampipe-router-scope", "chunk"]
        lines["sinkhorn"] = [*COMMON, *PIPELINED, *scope, *NO_LOSS[:-1], "sinkhorn"]
    return runs_of(lines)


class Runs:
    """All runs by name, started when the first of a launch is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitem__(self, name: str) -> Run:
        router = name.partition(" ")[0]
        part = next((index for index, part in enumerate(PARTS) if router in part), 0)
        return runs_of_part(part, self._folder)[name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("name", ROUTERS)
def test_chunks_train_like_megatrons_layers_with_the_same_class(name: str, runs: Runs) -> None:
    stock, ours = runs[f"{name} stock"], runs[f"{name} chunks"]
    assert_same_digits(stock, ours, iterations=4)
    assert "in place of Megatron's" in stock.table and "in place of Megatron's" in ours.table


@pytest.mark.parametrize("name", SHIPPED_GATES)
def test_a_run_goes_on_from_its_own_checkpoint_and_from_that_of_megatrons_layers(
    name: str, runs: Runs
) -> None:
    for kind, other in (("chunks", "chunks"), ("chunks", "stock"), ("stock", "chunks")):
        assert_resumed(runs[f"{name} {kind} from {other}"], runs[f"{name} {kind}"], first=SAVED + 1)


def test_every_shipped_router_is_tested(runs: Runs) -> None:
    assert set(SHIPPED_GATES) < set(ROUTERS) == {name for part in PARTS for name in part}


def test_the_classes_are_different_functions(runs: Runs) -> None:
    """Otherwise the pairs would also agree if the flag did nothing."""
    assert len({tuple(runs[f"{name} stock"].lm_loss) for name in ROUTERS}) == len(ROUTERS)


@pytest.mark.parametrize("name", ["expert-choice chunks", "sinkhorn"])
def test_routers_that_compare_tokens_train_in_chunks(name: str, runs: Runs) -> None:
    run = runs[name]
    assert run.lm_loss[-1] < run.lm_loss[0]
    assert "compares the tokens of a chunk, which is another function for each degree" in run.table


DEEP = [*COMMON, "--num-layers", "4", "--global-batch-size", "8", "--ckpt-format", "torch_dist"]
DEEP += ["--position-embedding-type", "rope", "--eval-iters", "1", "--eval-interval", "4"]
INTERLEAVED = shlex.split("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1")
RECOMPUTED = shlex.split("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
MOE_AGAIN = shlex.split("--recompute-granularity selective --recompute-modules moe")
SEQUENCE = shlex.split("--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1")
CONTEXT = shlex.split("--context-parallel-size 2 --cp-comm-type p2p")
WIDER_BATCH = ["--micro-batch-size", "2"]
PIPELINE = [*INTERLEAVED, "--expert-model-parallel-size", "1"]
LAYOUTS = {
    "interleaved stock": [*PIPELINE, *RECOMPUTED],
    "interleaved chunks": [*PIPELINE, *PIPELINED, *RECOMPUTED],
    "one after the other": [*PIPELINE[:2], *PIPELINE[4:], *PIPELINED, *ONE_BY_ONE, *MOE_AGAIN],
    "rows over ranks": [*SEQUENCE, *PIPELINED, *RECOMPUTED, *WIDER_BATCH],
    "rows over ranks, stock": [*SEQUENCE, *MOE_AGAIN],
    "context": [*CONTEXT, *PIPELINED],
    "overlapped gathers": ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"],
}
"""Flags of runs that must log the digits of one pipeline stage in which every rank has whole sequences."""


def test_every_layout_reads_the_ids_of_its_rows(tmp_path: Path) -> None:
    """From one checkpoint: experts by ids are the same in every layout."""
    common = [*DEEP, "--ampipe-router", "hash", *NO_LOSS]
    saving = ["--save", str(tmp_path), "--save-interval", str(SAVED)]
    # Of the weights alone: another layout has other parameter groups.
    load = ["--load", str(tmp_path), "--ckpt-step", str(SAVED), "--no-load-rng", "--no-load-optim"]
    lines = {"saved": [*common, *saving], "whole": [*common, *load]}
    lines |= {name: [*common, *load, *flags] for name, flags in LAYOUTS.items()}
    found = runs_of(lines)
    whole = found["whole"]
    assert whole.iterations == [3, 4] and len(whole.validation_loss) == 1
    assert_same_digits(whole, *(found[name] for name in LAYOUTS))
    for name in LAYOUTS:
        assert found[name].validation_loss == digits(whole.validation_loss), name


def test_condensed_tokens_and_wires_train(runs: Runs) -> None:
    exact, condensed, fp8 = runs["cosine stock"], runs["condensed"], runs["fp8"]
    assert condensed.lm_loss == digits(exact.lm_loss)
    assert condensed.grad_norm == pytest.approx(exact.grad_norm, abs=1.001e-3)
    assert "another function than a stock run's" in condensed.table and "HalvesWire" in condensed.table
    assert condensed.output.count("condensed share: 0.") == 4
    assert fp8.lm_loss == pytest.approx(exact.lm_loss, rel=1e-2) and fp8.lm_loss != exact.lm_loss
    assert "fp8 (e4m3) with a scale per row" in fp8.table


def test_the_checker_finds_what_is_wrong() -> None:
    good = [*SHIPPED_GATES, "tests.gates:ForwardRouter", "tests.gates:BiasedByIdRouter"]
    bad = ["tests.gates:LookingAheadRouter", "tests.gates:OwnLossRouter"]
    command = [
        sys.executable,
        "-m",
        "megatron_ampipe.cli",
        "gate",
        *good,
        "tests.gates:ThresholdRouter",
        *bad,
    ]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 4, done.stderr
    wrong = ("tests.gates:LookingAheadRouter, tests.gates:OwnLossRouter: a check failed", "see above")
    assert all(text in done.stderr for text in wrong)
    assert "a change of token 0 changes the choice for token" in done.stdout
    assert "its routing computes a separate loss" in done.stdout
    assert "not so, and the class says why: each expert chooses among all tokens" in done.stdout
    assert "gradients: none: the choice is fixed, and there is nothing to train" in done.stdout
