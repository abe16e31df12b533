"""Every row of ``refusals.REFUSALS``, with Megatron's parser and with the complete entry point."""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from typing import Any

import pytest

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.flag_values import RANGES
from megatron_ampipe.launch.refusals import REFUSALS, Refusal, refuse_unsupported
from megatron_ampipe.schedule.config import AMPipeConfig
from tests.megatron.launcher import REPOSITORY, environment, launch
from tests.megatron.refusal_flags import ACCEPTED

PROCESS_GROUP_MADE = 99

OTHERS = {
    "degree-0": ([*ACCEPTED, "--ampipe-degree", "0"], "--ampipe-degree 0: must be a whole number"),
    "degree-negative": ([*ACCEPTED, "--ampipe-degree", "-1"], "--ampipe-degree -1: must be a whole number"),
    "padding-for-8-bit-without": (
        [*ACCEPTED, "--moe-router-padding-for-fp8"],
        "fp8/fp4 must be specified when moe_router_padding_for_quantization is True",
    ),
    "padding-for-quantization-without": (
        [*ACCEPTED, "--moe-router-padding-for-quantization"],
        "fp8/fp4 must be specified when moe_router_padding_for_quantization is True",
    ),
    "degree-word": ([*ACCEPTED, "--ampipe-degree", "four"], "--ampipe-degree 'four': "),
    "degree-fraction": ([*ACCEPTED, "--ampipe-degree", "2.5"], "--ampipe-degree '2.5': "),
    "degree-above-sequence": (
        [*ACCEPTED, "--ampipe-degree", "65"],
        "--ampipe-degree 65: is larger than the sequence length (--seq-length 64). Use --ampipe-degree 4.",
    ),
    "backward-degree-3-of-4": (
        [*ACCEPTED, "--ampipe-backward-degree", "3"],
        "--ampipe-backward-degree 3: must be a divisor or a multiple of the degree of the forward pass (4). "
        "Use --ampipe-backward-degree 8, 1 or 4.",
    ),
    "backward-degree-above-sequence": (
        [*ACCEPTED, "--ampipe-backward-degree", "128"],
        "--ampipe-backward-degree 128: is larger than the sequence length (--seq-length 64).",
    ),
    "backward-degree-at-degree-1": (
        [*ACCEPTED, "--ampipe-degree", "1", "--ampipe-backward-degree", "2"],
        "--ampipe-backward-degree 2: has no effect at --ampipe-degree 1",
    ),
    "chunks-of-another-degree": (
        [*ACCEPTED, "--ampipe-chunks", "0.4,0.3,0.3"],
        "--ampipe-degree 4: is not the number of shares of --ampipe-chunks (3). Leave it out",
    ),
    "chunks-of-no-row": (
        [*ACCEPTED, "--ampipe-chunks", "0.5,0.001,0.3,0.199"],
        "--ampipe-chunks 0.5,0.001,0.3,0.199: chunk 1 would have none of the 64 rows of a rank.",
    ),
    "chunks-no-numbers": (
        [*ACCEPTED, "--ampipe-chunks", "a,b"],
        "--ampipe-chunks a,b: is not a list of numbers",
    ),
    "stack-0": (
        [*ACCEPTED, "--ampipe-stack", "0"],
        "--ampipe-stack 0: must be a whole number of layers, at least 1, or all. Use --ampipe-stack all, or "
        "--ampipe-stack 1 to run layer by layer.",
    ),
    "stack-at-degree-1": (
        [*ACCEPTED, "--ampipe-degree", "1", "--ampipe-stack", "all"],
        "--ampipe-stack all: has no effect at --ampipe-degree 1",
    ),
    "exchange-of-no-kind": (
        [*ACCEPTED, "--ampipe-exchange", "once"],
        "--ampipe-exchange 'once': ",
    ),
    "exchange-auto-at-degree-4": (
        [*ACCEPTED, "--ampipe-exchange", "auto"],
        "--ampipe-exchange auto: requires --ampipe-degree auto. Add --ampipe-degree auto, or leave "
        "--ampipe-exchange out.",
    ),
    "stack-in-one-chunk": (
        [*ACCEPTED, "--ampipe-degree", "1", "--ampipe-exchange", "ranks", "--ampipe-stack", "all"],
        "--ampipe-stack all: has no effect at --ampipe-degree 1, which is one chunk.",
    ),
    "exchange-in-one-chunk": (
        [*ACCEPTED, "--ampipe-degree", "1", "--ampipe-exchange", "ranks", "--cpu-offloading-num-layers", "1"],
        "--cpu-offloading-num-layers 1: with --ampipe-exchange ranks, activation offloading is not supported "
        "yet. Leave it out, or train with --ampipe-exchange rows.",
    ),
    "cluster-at-degree-4": (
        [*ACCEPTED, "--ampipe-cluster", "dgx-h100"],
        "--ampipe-cluster dgx-h100: requires --ampipe-degree auto or --ampipe-memory-budget. Add "
        "--ampipe-degree auto, or leave --ampipe-cluster out.",
    ),
    "chunks-with-auto": (
        [*ACCEPTED, "--ampipe-degree", "auto", "--ampipe-chunks", "0.5,0.5"],
        "--ampipe-chunks 0.5,0.5: is what --ampipe-degree auto chooses. Leave --ampipe-chunks out",
    ),
    "backward-degree-with-auto": (
        [*ACCEPTED, "--ampipe-degree", "auto", "--ampipe-backward-degree", "2"],
        "--ampipe-backward-degree 2: is what --ampipe-degree auto chooses.",
    ),
    "cluster-unknown": (
        [*ACCEPTED, "--ampipe-degree", "auto", "--ampipe-cluster", "nowhere"],
        "--ampipe-cluster nowhere: is neither a file nor a built-in cluster",
    ),
    "schedule-with-cluster": (
        [*ACCEPTED, "--ampipe-degree", "auto", "--ampipe-cluster", "dgx-h100", "--ampipe-schedule", "ampipe"],
        "--ampipe-schedule ampipe: is what a plan from --ampipe-cluster chooses",
    ),
    "plan-with-degree": (
        [*ACCEPTED, "--ampipe-plan", "plan.yaml"],
        "--ampipe-degree 4: is what the plan plan.yaml says. Leave --ampipe-degree or --ampipe-plan out.",
    ),
    "save-plan-at-degree-4": (
        [*ACCEPTED, "--ampipe-save-plan", "plan.yaml"],
        "--ampipe-save-plan plan.yaml: requires --ampipe-degree auto.",
    ),
    "save-plan-in-proc": (
        [*ACCEPTED, "--ampipe-degree", "auto", "--ampipe-save-plan", "/proc/no/plan.yaml"],
        "--ampipe-save-plan /proc/no/plan.yaml: cannot be written",
    ),
    "save-plan-is-a-folder": (
        [*ACCEPTED, "--ampipe-degree", "auto", "--ampipe-save-plan", "/tmp"],
        "--ampipe-save-plan /tmp: cannot be written (it is a folder)",
    ),
    "train-iters-negative": (
        [*ACCEPTED, "--train-iters", "-5"],
        "error: --train-iters -5: must be at least 1. Use 1 or more, or",
    ),
    "topk-0-at-degree-1": (
        [*ACCEPTED, "--ampipe-degree", "1", "--moe-router-topk", "0"],
        "error: --moe-router-topk 0: must be at least 1.",
    ),
    "save-without-interval": (
        [*ACCEPTED, "--save", "runs"],
        "error: --save-interval (not given): with --save, Megatron needs to know how often.",
    ),
    "wandb-without-save": (
        [*ACCEPTED, "--wandb-project", "mine", "--wandb-exp-name", "first"],
        "error: --wandb-project mine: Weights & Biases keeps its files in the folder of --save",
    ),
    "schedule-unknown": ([*ACCEPTED, "--ampipe-schedule", "best"], "Use one of: "),
    "schedule-at-degree-1": (
        [*ACCEPTED, "--ampipe-degree", "1", "--ampipe-schedule", "ampipe"],
        "--ampipe-schedule ampipe: has no effect at --ampipe-degree 1",
    ),
    "trace-at-degree-1": (
        [*ACCEPTED, "--ampipe-degree", "1", "--ampipe-trace-dir", "/tmp/trace"],
        "--ampipe-trace-dir /tmp/trace: has no effect at --ampipe-degree 1",
    ),
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of one process that parses and launches everything."""
    path = tmp_path_factory.mktemp("refusals") / "report.json"
    others = {name: arguments for name, (arguments, _) in OTHERS.items()}
    done = subprocess.run(
        [sys.executable, "-m", "tests.megatron.refusals_worker", json.dumps([ACCEPTED, others])],
        cwd=REPOSITORY,
        # A world size of four for Megatron's checks; the other ranks never exist.
        env=environment()
        | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
        | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "AMPIPE_TEST_REPORT": str(path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_an_accepted_launch_reaches_its_process_group(report: dict[str, Any]) -> None:
    """Otherwise the refusals below could have a different cause."""
    assert report["accepted"]["code"] == PROCESS_GROUP_MADE, report["accepted"]["output"]


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: row.setting.strip("-"))
def test_a_row_applies_to_the_parsed_value_of_its_flag(row: Refusal, report: dict[str, Any]) -> None:
    found = report["rows"][row.setting]
    assert found["known"], f"Megatron's parser has no flag {row.setting}"
    assert found["tried"]
    for refused in found["tried"]:
        assert refused["name"] == row.setting, refused
        assert refused["code"] == 2
        message = refused["message"]
        assert message.startswith(f"{row.setting} {refused['value']}: ")
        assert "with --ampipe-degree 4" in message
        assert row.rule in message
        assert message.endswith(row.remedy)
        given = list(itertools.takewhile(lambda word: not word.startswith("--"), refused["flags"][1:]))
        assert not given or any(word.split(",")[0] in refused["value"] for word in given)


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: row.setting.strip("-"))
def test_a_row_ends_a_launch_with_one_line(row: Refusal, report: dict[str, Any]) -> None:
    """Megatron or the host platform may refuse the same flag first; the launch ends in the same way."""
    _assert_refused(report["rows"][row.setting]["launch"])


@pytest.mark.parametrize("name", OTHERS)
def test_bad_ampipe_flags(name: str, report: dict[str, Any]) -> None:
    _assert_refused(report["others"][name])
    assert OTHERS[name][1] in report["others"][name]["errors"][0]


def _assert_refused(launch: dict[str, Any]) -> None:
    assert launch["code"] == 2, launch["output"]
    assert len(launch["errors"]) == 1, launch["output"]
    assert not launch["traceback"], launch["output"]


@pytest.mark.parametrize("flag", RANGES)
def test_a_number_that_no_run_can_have_is_refused_by_megatron_s_parser(
    flag: str, report: dict[str, Any]
) -> None:
    found = report["ranges"][flag]
    assert found["known"], f"Megatron's parser has no flag {flag}"
    assert found["message"].startswith(f"{flag} -1: must "), found


def test_most_rows_are_reached_by_a_launch(report: dict[str, Any]) -> None:
    """If something else always refuses a flag first, a launch does not test its row; these rows are few."""
    unreached = [
        setting
        for setting, row in report["rows"].items()
        if "with --ampipe-degree 4" not in row["launch"]["errors"][0]
    ]
    print(f"refused earlier by Megatron or the host platform: {unreached}")
    assert len(unreached) < len(REFUSALS) / 2


def test_no_row_applies_twice_or_at_degree_1() -> None:
    settings = [row.setting for row in REFUSALS]
    assert len(settings) == len(set(settings))
    refuse_unsupported(AMPipeConfig(), argparse.Namespace(seq_length=64, window_size=(8, 0)))


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: row.setting.strip("-"))
def test_rules_and_remedies_have_the_right_form(row: Refusal) -> None:
    error = BadInput(row.setting, "value", rule=row.rule, remedy=row.remedy)
    assert str(error) == f"{row.setting} value: {row.rule}. {row.remedy}"
    assert not row.rule.endswith(".")
    assert row.remedy.endswith(".") and not row.remedy.endswith("..")
    assert "--" in row.remedy or "Leave it out" in row.remedy or "Use " in row.remedy


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            [*ACCEPTED, "--mlp-chunks-for-training", "2"],
            "--mlp-chunks-for-training 2: with --ampipe-degree 4, ",
        ),
        ([*ACCEPTED, "--ampipe-degree", "0"], "--ampipe-degree 0: "),
    ],
    ids=["refused-combination", "degree-0"],
)
def test_under_torchrun_the_message_is_printed_once(arguments: list[str], expected: str) -> None:
    run = launch(*arguments)
    # Not Run.error: both ranks write to one stream, and their lines can be interleaved.
    shown = f"traceback : error: {expected}"
    assert run.output.count(expected) - run.output.count(shown) == 1, run.output[-4000:]
    assert run.output.count("exitcode  : 2") == 2, "both ranks"
    # torchrun's last block contains the error of both ranks.
    assert run.output.count(shown) == 2
    assert "error_file: <N/A>" not in run.output
    assert run.output.count("Traceback (most recent call last)") == 1, "only torchrun's own"
    assert "initializing torch distributed" not in run.output
