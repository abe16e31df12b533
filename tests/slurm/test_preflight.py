"""The check of training flags before submission: with Megatron, and on a login node without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ampipe.cli import main
from megatron_ampipe.errors import BadInput
from megatron_ampipe.tools.slurm import preflight
from tests.forked import REPOSITORY

pytestmark = pytest.mark.timeout(900)

SBATCH = ["sbatch", "--nodes", "1", "--gpus-per-node", "8"]
NOTE = "flags of Megatron are not checked: "


def sbatch(folder: Path, *words: str, without_torch: bool) -> subprocess.CompletedProcess[str]:
    path = [str(REPOSITORY)]
    if without_torch:
        (folder / "fake/torch").mkdir(parents=True)
        (folder / "fake/torch/__init__.py").write_text("raise ImportError('not on this login node')\n")
        path.insert(0, str(folder / "fake"))
    return subprocess.run(
        [sys.executable, "-m", "megatron_ampipe.cli", *SBATCH, *words],
        cwd=folder, env=os.environ | {"PYTHONPATH": os.pathsep.join(path)}, capture_output=True, text=True,
    )  # fmt: skip


def test_megatron_refuses_a_value_of_a_file_with_its_line(tmp_path: Path) -> None:
    """The only test here that runs Megatron; its answers are tested in tests/megatron/test_settings.py."""
    (tmp_path / "run.yaml").write_text("train-iters: 10\nlr: abc\n")
    done = sbatch(tmp_path, "--model", "mixtral-8x7b", "--run", "run.yaml", without_torch=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("ampipe: run.yaml:2: lr: 'abc': invalid float value. ")
    assert done.stderr.endswith("To submit it anyway, add --no-check.\n")


def test_without_megatron_it_says_what_is_not_checked(tmp_path: Path) -> None:
    done = sbatch(tmp_path, "--model", "mixtral-8x7b", "--", "--lr", "abc", without_torch=True)
    assert done.returncode == 0, done.stderr
    assert f"note: {NOTE}PyTorch cannot be imported (not on this login node). To check" in done.stderr
    assert "ampipe config --ranks 8" in done.stderr


@pytest.fixture
def no_megatron(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(preflight, "_ask_megatron", lambda words, ranks: "it is not here")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.yaml").write_text("num-experts: 8\nexpert-model-parallel-size: 32\n")
    (tmp_path / "odd.yaml").write_text("num-layers: 2\nhidden-sze: 64\n")
    (tmp_path / "own.yaml").write_text("ampipe:\n  degre: 64\n")
    (tmp_path / "value.yaml").write_text("ampipe:\n  degree: four\n")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--", "--swiglu", "--ampipe-degree", "4", "more"], "argument more: is unexpected. "),
        (["--", "--ampipe-degree", "x"], "--ampipe-degree 'x': is neither a whole number nor auto"),
        (
            ["--", "--ampipe-degre", "4"],
            "argument --ampipe-degre 4: there is no such flag. Did you mean --amp",
        ),
        (
            ["--model", "own.yaml"],
            "own.yaml:2: ampipe.degre: there is no such setting of AMPipe. Did you mean degree",
        ),
        (
            ["--model", "value.yaml"],
            "value.yaml:2: ampipe.degree: 'four': is neither a whole number nor auto.",
        ),
        (
            ["--model", "model.yaml"],
            "--expert-model-parallel-size 32: does not divide the 8 experts of --num-experts. Use for exam",
        ),
        (
            [
                "--model",
                "model.yaml",
                "--",
                "--expert-model-parallel-size",
                "8",
                "--pipeline-model-parallel-size=3",
            ],
            "--nodes times --gpus-per-node 8: is not a multiple of 3, the product of the tensor, pipeline",
        ),
        (
            ["--model", "model.yaml", "--", "--num-experts", "16", "--expert-model-parallel-size", "16"],
            "is not a multiple of 16, the product of the tensor parallel size of the experts, expert",
        ),
    ],
)
def test_errors_that_are_found_without_megatron_are_refused(
    words: list[str], message: str, no_megatron: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SBATCH, *words]) == 2
    said = capsys.readouterr().err
    assert message in said and said.endswith("To submit it anyway, add --no-check.\n")


def test_what_looks_misspelt_without_megatron_is_named(
    no_megatron: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "odd.yaml", "--", "--a-flag-of-the-next-megatron", "3", "--hidden_size=64"]
    assert main([*SBATCH, *words]) == 0
    said = capsys.readouterr().err
    assert f"note: {NOTE}it is not here. To check them, run in the environment of the job: ampipe con" in said
    assert "odd.yaml:2: hidden-sze: did you mean hidden-size?" in said
    assert "flag --hidden_size: did you mean hidden-size?" in said
    assert "next-megatron" not in said


def test_a_check_that_crashes_or_hangs_gives_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """A login node may kill a process that uses much memory."""

    def ended(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], -9, stdout="a greeting\n", stderr="x\nMemoryError\n")

    monkeypatch.setattr(subprocess, "run", ended)
    said = preflight.check(["--lr", "1"], num_ranks=8, files=[])
    assert said is not None and said.startswith(NOTE + "Megatron's check ended with -9 here (MemoryError)")

    def hangs(*_: object, timeout: int, **__: object) -> None:
        raise subprocess.TimeoutExpired("x", timeout)

    monkeypatch.setattr(subprocess, "run", hangs)
    said = preflight.check(["--lr", "1"], num_ranks=8, files=[])
    assert said is not None and "took more than 180 s" in said
    with pytest.raises(BadInput, match="--ampipe-degre 4: there is no such flag"):
        preflight.check(["--ampipe-degre", "4"], num_ranks=8, files=[])
