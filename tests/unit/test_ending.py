"""How a process of a launch ends: exit code, last output, and the error that torchrun prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_ampipe.launch.failures import raised_in

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Ended:
    """One process that has ended."""

    code: int
    output: str
    left: str | None
    """What torchrun's error block would show for it; None for nothing."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("ended")
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.ending_worker", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for name, code in json.loads((folder / "codes.json").read_text()).items():
        file = folder / f"{name}.json"
        left = json.loads(file.read_text())["message"]["extraInfo"]["py_callstack"] if file.exists() else None
        found[name] = Ended(code, (folder / f"{name}.log").read_text(), left)
    return found


def test_a_failure_keeps_its_traceback_and_leaves_it_for_torchrun(ended: dict[str, Ended]) -> None:
    found = ended["fail"]
    assert found.code == 3
    assert "ValueError: deep inside" in found.output
    assert found.output.endswith("error: rank 0 failed; the cause is above.\n")
    assert found.left is not None and found.left.strip().endswith("ValueError: deep inside")


def test_bad_input_is_one_line_there_and_here(ended: dict[str, Ended]) -> None:
    line = "error: --flag 7: is wrong. Use --flag 8."
    assert ended["refuse"] == Ended(2, f"\n{line}\n", line)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fill_disk", "/data/file could not be written (No space left on device). "),
        ("fail_to_save", "a checkpoint could not be written (unexpected pos 704 vs 598). "),
    ],
)
def test_a_full_disk_is_named_with_the_last_checkpoint(
    name: str, words: str, ended: dict[str, Ended]
) -> None:
    found = ended[name]
    assert found.code == 3
    assert found.output.startswith(f"\nerror: {words}Make room, and continue with --load ")
    assert "Traceback" not in found.output
    assert found.left == found.output.strip()


def test_ranks_that_cannot_meet_are_told_to_use_torchrun(ended: dict[str, Ended]) -> None:
    found = ended["meet_nowhere"]
    assert found.code == 1 and "Traceback" not in found.output
    assert "environment variable MASTER_ADDR expected, but not set." in found.output
    assert "Start the run with torchrun" in found.output


def test_a_checkpoint_that_cannot_be_read_is_named(ended: dict[str, Ended]) -> None:
    found = ended["fail_to_load"]
    assert found.code == 2
    assert found.output.startswith(
        "\nerror: --load /loaded: the checkpoint cannot be loaded (PytorchStreamReader failed). Name the"
    )


@pytest.mark.parametrize("name", ["run_out_of_memory_in_loading", "fail_by_ourselves_in_loading"])
def test_what_is_no_fault_of_a_checkpoint_keeps_its_traceback(ended: dict[str, Ended], name: str) -> None:
    assert ended[name].code == 3
    assert ended[name].output.startswith("Traceback")


def test_megatrons_silent_exit_is_no_success(ended: dict[str, Ended]) -> None:
    found = ended["leave_as_megatron"]
    assert found.code == 3
    assert "It did so at /site-packages/megatron/training/training.py:2." in found.output
    assert ended["leave_as_script"].code == 5


def test_ctrl_c_ends_with_130_and_one_line(ended: dict[str, Ended]) -> None:
    found = ended["be_interrupted"]
    assert found.code == 130
    assert found.output.strip().splitlines() == [
        "interrupted. A run that was started with --save continues from its last checkpoint with --load."
    ]
    assert ended["finish"] == Ended(0, "", None)


def test_a_rank_that_is_stopped_is_named_with_the_flag_of_the_time(ended: dict[str, Ended]) -> None:
    found = ended["silent"]
    assert found.code == 3
    last = found.output.strip().splitlines()[-1]
    assert last.startswith(
        "error: rank 0 failed: it has lost a peer, see above. No answer from rank 1: stopped"
    )
    assert last.endswith("is set by --distributed-timeout-minutes, now 10.")
    assert found.left is not None and found.left.endswith(last)


@pytest.mark.parametrize("name", ["wait_for_a_worker", "wait_for_a_server"])
def test_a_timeout_of_something_else_is_no_lost_peer(ended: dict[str, Ended], name: str) -> None:
    assert ended[name].code == 3
    assert ended[name].output.endswith("error: rank 0 failed; the cause is above.\n")


def test_another_rank_waits_in_silence_for_its_end(ended: dict[str, Ended]) -> None:
    found = ended["refuse_on_another_rank"]
    assert (found.code, found.output) == (2, "")
    assert found.left == "error: --flag 7: is wrong. Use --flag 8."


def test_a_failure_is_that_of_the_module_whatever_the_folders_above_are_called() -> None:
    """A checkout of this repository has the package's name, and contains the environment."""
    path = "/home/me/megatron_ampipe/.venv/lib/python3.12/site-packages/megatron/training/utils.py"
    with pytest.raises(TypeError) as caught:
        exec(compile("x = []\nx['train']", path, "exec"), {"__name__": "megatron.training.utils"})
    assert raised_in("megatron", caught.value)
    assert not raised_in("megatron_ampipe", caught.value)
