"""Training with ``--ampipe-router``, compared with Megatron's layers with the same class; ``ampipe gate``."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.forked import REPOSITORY
from tests.megatron.launcher import MOCK_DATA, TINY_GPT, TINY_MOE, Run, environment, pretrain_several

pytestmark = pytest.mark.timeout(300)

TOLERANCE = 1e-5
"""Relative difference of a loss due to fp32 rounding."""
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
ROUTERS = {
    "noisy-topk": ["--ampipe-stack", "1"],
    "cosine": [],
    "sigmoid": [],
    "tests.gates:ForwardRouter": [],
}
"""Each with what a run in chunks needs to draw the numbers of a run without."""


@cache
def runs_of(folder: Path) -> dict[str, Run]:
    """All runs, in one launch."""
    runs: dict[str, list[str]] = {}
    for name, more in ROUTERS.items():
        runs[f"{name} 1"] = [*COMMON, "--ampipe-router", name]
        runs[f"{name} 4"] = [*COMMON, "--ampipe-router", name, *PIPELINED, *more]
    saved = ["--save", str(folder), "--save-interval", "2"]
    runs["cosine 4"] += saved
    runs["continued"] = [*COMMON, "--ampipe-router", "cosine", "--load", str(folder), "--ckpt-step", "2"]
    scope = [*PIPELINED, "--ampipe-router-scope", "chunk"]
    no_loss = ["--moe-aux-loss-coeff", "0", "--moe-router-load-balancing-type"]
    runs["expert-choice"] = [*COMMON, *scope, "--ampipe-router", "expert-choice", *no_loss, "none"]
    runs["sinkhorn"] = [*COMMON, *scope, *no_loss, "sinkhorn"]
    # Exact: only equal tokens are condensed, and the wire changes no row.
    sending = ["--ampipe-condense", "1", "--ampipe-wire", "tests.wires:HalvesWire"]
    runs["condensed"] = [*COMMON, "--ampipe-router", "cosine", *PIPELINED, *sending]
    runs["fp8"] = [*COMMON, "--ampipe-router", "cosine", *PIPELINED, "--ampipe-wire", "fp8"]
    found = pretrain_several(runs, num_ranks=2, timeout_s=280)
    for name, run in found.items():
        assert run.exit_code == 0, f"{name}:\n{run.output[-6000:]}"
    assert found.keys() == runs.keys()
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    return runs_of(tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize("name", ROUTERS)
def test_chunks_train_like_megatrons_layers_with_the_same_class(name: str, runs: dict[str, Run]) -> None:
    stock, ours = runs[f"{name} 1"], runs[f"{name} 4"]
    assert stock.iterations == [1, 2, 3, 4]
    assert stock.lm_loss[-1] < stock.lm_loss[0], "a run that learns nothing proves little"
    assert ours.lm_loss == pytest.approx(stock.lm_loss, rel=TOLERANCE)
    assert ours.load_balancing_loss == pytest.approx(stock.load_balancing_loss, rel=TOLERANCE)
    assert ours.grad_norm == pytest.approx(stock.grad_norm, abs=1.001e-3)
    assert "in place of Megatron's" in stock.table and "in place of Megatron's" in ours.table


def test_the_classes_are_different_functions(runs: dict[str, Run]) -> None:
    """Otherwise the pairs would also agree if the flag did nothing."""
    assert len({tuple(runs[f"{name} 1"].lm_loss) for name in ROUTERS}) == len(ROUTERS)


def test_a_checkpoint_of_chunks_continues_in_megatrons_layers(runs: dict[str, Run]) -> None:
    unbroken, resumed = runs["cosine 1"], runs["continued"]
    assert resumed.iterations == [3, 4]
    assert resumed.lm_loss[0] == pytest.approx(unbroken.lm_loss[2], rel=TOLERANCE)


@pytest.mark.parametrize("name", ["expert-choice", "sinkhorn"])
def test_routers_that_compare_tokens_train_in_chunks(name: str, runs: dict[str, Run]) -> None:
    run = runs[name]
    assert run.lm_loss[-1] < run.lm_loss[0]
    assert "compares the tokens of a chunk, which is another function for each degree" in run.table


def test_condensed_tokens_and_wires_train(runs: dict[str, Run]) -> None:
    exact, condensed, fp8 = runs["cosine 1"], runs["condensed"], runs["fp8"]
    assert condensed.lm_loss == pytest.approx(exact.lm_loss, rel=TOLERANCE)
    assert condensed.grad_norm == pytest.approx(exact.grad_norm, abs=1.001e-3)
    assert "another function than a stock run's" in condensed.table and "HalvesWire" in condensed.table
    assert condensed.output.count("condensed share: 0.") == 4
    assert fp8.lm_loss == pytest.approx(exact.lm_loss, rel=1e-2) and fp8.lm_loss != exact.lm_loss
    assert "fp8 (e4m3) with a scale per row" in fp8.table


def test_the_checker_finds_what_is_wrong() -> None:
    good = ["noisy-topk", "cosine", "sigmoid", "expert-choice", "tests.gates:ForwardRouter"]
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
