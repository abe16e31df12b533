"""The ``ampipe`` command: exit codes, output, and imports."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_ampipe
from megatron_ampipe import errors
from megatron_ampipe.cli import TOOLS
from megatron_ampipe.tools import draw_command
from tests.conftest import Command

ROOT = Path(megatron_ampipe.__file__).parents[1]


def test_version_and_help_with_every_tool(ampipe: Command) -> None:
    assert megatron_ampipe.__version__ in ampipe("--version").out
    text = " ".join(ampipe("--help").out.split())
    assert all(f"{name} {summary}" in text for name, summary in TOOLS.items())
    shown = ampipe(code=2).err
    assert all(f"\n    {name} " in shown for name in TOOLS)


@pytest.mark.parametrize(
    "words", [[], ["nonsense"], ["draw"], ["data"], ["draw", "x", "--output", "y", "--no"]]
)
def test_bad_arguments_end_with_2(words: list[str], ampipe: Command) -> None:
    assert "usage: ampipe" in ampipe(*words, code=2).err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (errors.EnvironmentMissing("no torch"), 1, "no torch"),
        (errors.BadInput("--x", 3, rule="is odd", remedy="Use --x 4."), 2, "--x 3: is odd. Use --x 4."),
        (errors.RunFailed("broke"), 3, "broke"),
        (errors.DifferenceFound("differ"), 4, "differ"),
        (
            ModuleNotFoundError("No module named 'torch'", name="torch"),
            1,
            "No module named 'torch'. 'ampipe doctor' says what is missing, and how to get it.",
        ),
        (KeyboardInterrupt(), 130, "interrupted; incomplete output was not saved under its final name"),
    ],
)
def test_an_error_gives_one_line_and_its_exit_code(
    error: BaseException, code: int, said: str, ampipe: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(arguments: object) -> int:
        raise error

    monkeypatch.setattr(draw_command, "run", fail)
    assert ampipe("draw", "x", "--output", "y", code=code).err == f"ampipe: {said}\n"


@pytest.mark.parametrize(
    "words",
    [
        "sbatch --no-check --nodes 1 --gpus-per-node 1 -- --lr 1",
        "plan --model mixtral-8x7b --cluster dgx-h100 --json -",
    ],
)
def test_a_closed_standard_output_ends_it_without_a_traceback(words: str) -> None:
    command = f"exec {sys.executable} -m megatron_ampipe.cli {words}"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, shell=True, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert done.returncode == 141
    assert b"BrokenPipe" not in done.stderr and b"Traceback" not in done.stderr


def test_a_flag_of_training_before_the_dashes_says_where_it_belongs(ampipe: Command) -> None:
    text = "unrecognized arguments: --lr=1e-4; write flags of Megatron and AMPipe after --"
    assert text in ampipe("sbatch", "--lr=1e-4", code=2).err
    assert "after --" not in ampipe("doctor", "--lr=1e-4", code=2).err
