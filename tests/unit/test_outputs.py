"""Output files of tools: checked before the work begins, and written atomically."""

import io
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_ampipe import errors
from megatron_ampipe.files import outputs
from megatron_ampipe.plan.cluster import find_cluster, read_cluster, write_cluster
from megatron_ampipe.tools import bench_command, doctor_command, plan_command, profile_command, progress
from tests.conftest import Command

PLAN = ["plan", "--model", "mixtral-8x7b", "--cluster", "dgx-h100"]
SBATCH = ["sbatch", "--no-check", "--nodes", "1", "--gpus-per-node", "8"]
NO_FILES = {
    ".": "is not a regular file",
    "": "is not a regular file",
    "/proc/nope": "/proc cannot be written to",
    "/dev/null": "is not a regular file",
    "x" * 300: "File name too long",
    "file/inside": "cannot be written to",
}
"""Paths that cannot be written, each with a part of its message. ``file`` is a regular file."""
OUTPUTS = (
    ["bench", "--json"],
    ["bench", "--csv"],
    ["doctor", "--quick", "--json"],
    *([*PLAN, flag] for flag in ("--output", "--json", "--trace", "--tape")),
    ["profile", "--output"],
    [*SBATCH, "--output"],
)
"""Command lines that end with the path of an output file."""


def test_a_command_line_is_one_line_that_a_shell_reads_back() -> None:
    words = ["ampipe", "it's", "a b", "", "x\ny", "\\n\r'\u2028\x07\U000e0001é"]
    line = outputs.shell_line(words)
    assert line.isprintable() and line.startswith("ampipe 'it'")
    bash = ["bash", "-c", f"printf '%s\\0' {line}"]
    done = subprocess.run(bash, capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"})
    assert done.stdout.decode().split("\0")[:-1] == words


def test_a_comment_in_yaml_ends_where_its_line_ends(tmp_path: Path) -> None:
    """YAML has other line breaks than ``\\n``."""
    cluster = read_cluster(find_cluster("dgx-h100"))
    write_cluster(cluster, tmp_path / "again.yaml", head="a\nranks_per_node: 1\r\x85\u2028b: 2")
    assert read_cluster(tmp_path / "again.yaml") == cluster


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the work of all tools fail, to test that outputs are checked first."""

    def begun(*words: object, **more: object) -> Any:
        raise AssertionError("work began before the output was checked")

    monkeypatch.setattr(bench_command, "_measure", begun)
    monkeypatch.setattr(profile_command, "read_grid", begun)
    monkeypatch.setattr(doctor_command, "check", begun)
    monkeypatch.setattr(plan_command, "make_plans", begun)


@pytest.mark.parametrize("target", NO_FILES)
@pytest.mark.parametrize("words", OUTPUTS, ids=lambda words: f"{words[0]}{words[-1]}")
def test_an_unwritable_output_is_refused_before_work_begins(
    words: list[str],
    target: str,
    no_work: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ampipe: Command,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    said = ampipe(*words, target, *(["--", "--lr", "1"] if words[0] == "sbatch" else []), code=2)
    assert said.err.startswith(f"ampipe: {words[-1]} ") and NO_FILES[target] in said.err
    assert said.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_is_checked_without_a_trace_and_written_atomically(tmp_path: Path) -> None:
    path = tmp_path / "a/b/x.json"
    outputs.check(path, flag="--json")
    assert not list(tmp_path.iterdir())
    outputs.write_text(path, "earlier")
    outputs.check(path, flag="--json")
    with pytest.raises(ZeroDivisionError), outputs.atomic_file(path) as partial:
        partial.write_text("half")
        assert path.read_text() == "earlier"
        raise ZeroDivisionError
    assert path.read_text() == "earlier" and list(path.parent.iterdir()) == [path]


def test_a_full_disk_ends_with_3_and_a_message(tmp_path: Path) -> None:
    with (
        pytest.raises(errors.RunFailed, match=r"x.json cannot be written \(No space left on device\)"),
        outputs.atomic_file(tmp_path / "x.json"),
    ):
        Path("/dev/full").write_text("x")
    assert not list(tmp_path.iterdir())


def test_bench_keeps_its_result_when_the_file_is_lost_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ampipe: Command
) -> None:
    """If the disk fills while it measures, the table is printed before the error."""
    folder = tmp_path / "out"
    folder.mkdir()

    def measured(arguments: object) -> dict[str, Any]:
        folder.rmdir()
        folder.touch()
        return {"measured": True, "emulated": False, "cases": []}

    monkeypatch.setattr(bench_command, "_measure", measured)
    monkeypatch.setattr(
        "megatron_ampipe.tools.measuring.result.show", lambda document, console: print("the table")
    )
    said = ampipe("bench", "--json", folder / "x.json", code=3)
    assert said.out == "the table\n"
    assert "x.json cannot be written" in said.err


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_a_command_does_is_shown_on_a_terminal_alone(is_terminal: bool) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=80)
    with progress.shown("ampipe config: importing Megatron", console=console) as tell:
        tell("ampipe config: checking [a] launch")
    written = file.getvalue()
    assert ("importing Megatron" in written or "checking [a] launch" in written) is is_terminal
    assert is_terminal or written == ""
