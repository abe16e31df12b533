"""Every row of ``refusals.REFUSALS``, with Megatron's parser; one of them in a launch."""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from typing import Any

import pytest

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.refusals import REFUSALS, Refusal, refuse_unsupported
from megatron_ampipe.schedule.pipeline import AMPipeConfig
from tests.megatron.launcher import REPOSITORY, environment, launch
from tests.megatron.refusal_flags import ACCEPTED


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("refusals") / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.megatron.refusals_worker"],
        cwd=REPOSITORY,
        env=environment() | {"AMPIPE_TEST_REPORT": str(path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: row.setting.strip("-"))
def test_a_row_applies_to_the_parsed_value_of_its_flag(row: Refusal, report: dict[str, Any]) -> None:
    for refused in report[row.setting]:
        assert refused["name"] == row.setting, refused
        assert refused["code"] == 2
        expected = BadInput(
            row.setting, refused["value"], rule=f"with --ampipe-degree 4, {row.rule}", remedy=row.remedy
        )
        assert refused["message"] == str(expected)
        given = list(itertools.takewhile(lambda word: not word.startswith("--"), refused["flags"][1:]))
        assert not given or any(word.split(",")[0] in refused["value"] for word in given)


def test_rows_have_the_right_form_and_none_applies_twice_or_at_degree_1() -> None:
    settings = [row.setting for row in REFUSALS]
    assert len(settings) == len(set(settings))
    refuse_unsupported(AMPipeConfig(), argparse.Namespace(seq_length=64, window_size=(8, 0)))
    for row in REFUSALS:
        assert not row.rule.endswith(".")
        assert row.remedy.endswith(".") and not row.remedy.endswith("..")
        assert "--" in row.remedy or "Leave it out" in row.remedy or "Use " in row.remedy


def test_under_torchrun_the_message_is_printed_once() -> None:
    run = launch(*ACCEPTED, "--mlp-chunks-for-training", "2")
    expected = "--mlp-chunks-for-training 2: with --ampipe-degree 4, "
    # Not Run.error: both ranks write to one stream, and their lines can be interleaved.
    shown = f"traceback : error: {expected}"
    assert run.output.count(expected) - run.output.count(shown) == 1, run.output[-4000:]
    assert run.output.count("exitcode  : 2") == 2, "both ranks"
    # torchrun's last block contains the error of both ranks.
    assert run.output.count(shown) == 2
    assert run.output.count("Traceback (most recent call last)") == 1, "only torchrun's own"
    assert "initializing torch distributed" not in run.output
