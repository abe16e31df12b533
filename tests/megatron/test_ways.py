"""The three ways to launch do the same: our entry, the launcher with a script, and a patched tree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron_ampipe.cli import main as ampipe
from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.schedule import BlockFeatures, build
from tests.megatron.checkout.layout import lay_out
from tests.megatron.forked_launch import BY_HAND, PROCESS_GROUP_MADE, TRAIN
from tests.megatron.launcher import MOCK_DATA, REPOSITORY, TINY_GPT, TINY_MOE, environment

WAYS = ("entry", "launcher", "patched")
MODEL = [*TINY_GPT, *TINY_MOE]
RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "29999"}
ADDRESS = {"MASTER_ADDR": "localhost"}
REFUSED = {
    "half a dataset": ([*MODEL, "--data-path", "{folder}/half"], "dataset {folder}/half: "),
    "an unknown flag": ([*MODEL, *MOCK_DATA, "--lrr", "1"], "argument --lrr 1: there is no such flag"),
}
"""Command lines without AMPipe's flags, and with what the error begins."""


class Ways:
    """The launches of this module; those that share a tree run when the first of them is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "half.bin").write_bytes(bytes(64))
        schedule = build("ampipe", degree=2, features=BlockFeatures(losses=True, chunked_qkv=True))
        Plan(schedule=schedule, shares=(0.5, 0.5), reason="a test").write(folder / "plan.yaml", head="test")
        self._launched = cache(self._launch)

    def of(self, way: str, name: str) -> dict[str, Any]:
        """The result of one launch."""
        return self._launched(way == "patched")[f"{way} {name}"]

    def script(self, way: str) -> Path:
        return self.folder / ("patched" if way == "patched" else "checkout") / "pretrain_gpt.py"

    def _launch(self, is_patched: bool) -> dict[str, dict[str, Any]]:
        ways = ("patched",) if is_patched else ("entry", "launcher")
        tree = lay_out(self.script(ways[0]).parent, "0.19", copy=is_patched).parent
        if is_patched:
            assert ampipe(["patch", "apply", str(tree)]) == 0
        asked = {f"{way} {name}": line for way in ways for name, line in self._command_lines(way).items()}
        (self.folder / "asked").write_text(json.dumps(asked))
        report = self.folder / "report.json"
        # As when the script is started by hand: the megatron next to it is the one that is imported.
        paths = os.pathsep.join([str(tree), str(REPOSITORY)])
        subprocess.run(
            [sys.executable, "-m", "tests.megatron.forked_launch", str(self.folder / "asked")],
            cwd=REPOSITORY,
            env=environment() | RANK | {"PYTHONPATH": paths, "AMPIPE_TEST_REPORT": str(report)},
            check=True,
            timeout=280,
        )
        found: dict[str, dict[str, Any]] = json.loads(report.read_text())
        return found

    def _command_lines(self, way: str) -> dict[str, tuple[list[str], dict[str, str]]]:
        """Words and environment by name."""
        script = str(self.script(way))
        begin = {"entry": [TRAIN], "launcher": [script], "patched": [BY_HAND, script]}[way]
        logs = ["--save", f"{{folder}}/logs of {way}", "--save-interval", "10"]
        asked = {name: [*words, "--ampipe-degree", "2"] for name, (words, _) in REFUSED.items()} | {
            "a plan": [*MODEL, *MOCK_DATA, *logs, "--ampipe-plan", "{folder}/plan.yaml"],
            "degree 1": [*MODEL, *MOCK_DATA, "--lr-warmup-iters", "9"],
        }
        return {
            name: (
                [*begin, *(word.replace("{folder}", str(self.folder)) for word in words)],
                ADDRESS,
            )
            for name, words in asked.items()
        }


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Ways:
    return Ways(tmp_path_factory.mktemp("ways"))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_train_is_refused_identically(name: str, way: str, ways: Ways) -> None:
    found = ways.of(way, name)
    (error,) = found["errors"]
    assert error.startswith("error: " + REFUSED[name][1].replace("{folder}", str(ways.folder)))
    assert found["code"] == 2
    assert not found["traceback"]


@pytest.mark.parametrize("way", WAYS)
def test_a_run_is_recorded(way: str, ways: Ways) -> None:
    found = ways.of(way, "a plan")
    assert found["code"] == PROCESS_GROUP_MADE, found
    lines = (ways.folder / f"logs of {way}" / "resolved.yaml").read_text().splitlines()
    run = "A run" if way == "entry" else f"A run of {ways.script(way)}"
    assert lines[0].startswith(f"# {run} on 1 ranks with ")
    assert "train-iters: 4  # command line" in lines
    assert f"  plan: {ways.folder}/plan.yaml  # command line" in lines


def test_a_patched_tree_without_ampipe_is_left_to_megatron(ways: Ways) -> None:
    assert ways.of("patched", "degree 1")["code"] == PROCESS_GROUP_MADE
