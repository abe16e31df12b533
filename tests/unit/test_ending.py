"""How a process of a launch ends: exit code, last output, and the error that torchrun prints."""

import json
import os
import sys
from typing import NamedTuple

import pytest

from megatron_ampipe.launch.ending import raised_in
from tests.forked import REPOSITORY, completed, variables_of


class Ended(NamedTuple):
    """One process that has ended."""

    code: int
    output: str
    left: str | None
    """What torchrun's error block would show for it; None for nothing."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("ended")
    env = os.environ | variables_of(0, 1) | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    completed(sys.executable, "-m", "tests.unit.ending_worker", folder, env=env)
    found = {}
    for name, code in json.loads((folder / "codes.json").read_text()).items():
        file = folder / f"{name}.json"
        left = json.loads(file.read_text())["message"]["extraInfo"]["py_callstack"] if file.exists() else None
        found[name] = Ended(code, (folder / f"{name}.log").read_text(), left)
    return found


@pytest.mark.parametrize(
    ("name", "code", "begin"),
    [
        ("refuse", 2, "--flag 7: is wrong. Use --flag 8.\n"),
        (
            "fail_to_load",
            2,
            "--load /loaded: the checkpoint cannot be loaded (PytorchStreamReader failed). Na",
        ),
        ("leave_as_megatron", 3, "Megatron ended the run and printed the reason above, on rank 0, at"),
        (
            "meet_nowhere",
            1,
            "environment variable MASTER_ADDR expected, but not set. It says where ranks find",
        ),
    ],
)
def test_what_is_known_is_one_line_there_and_here(
    name: str, code: int, begin: str, ended: dict[str, Ended]
) -> None:
    found = ended[name]
    assert found.code == code and found.output.startswith(f"\nerror: {begin}")
    assert len(found.output.splitlines()) == 2
    assert found.left == found.output.strip()


@pytest.mark.parametrize(
    "name",
    [
        "fail",
        # No fault of a checkpoint.
        "run_out_of_memory_in_loading",
        "fail_by_ourselves_in_loading",
        # No lost peer.
        "wait_for_a_worker",
    ],
)
def test_another_failure_keeps_its_traceback_and_leaves_it_for_torchrun(
    name: str, ended: dict[str, Ended]
) -> None:
    found = ended[name]
    assert found.code == 3 and found.output.startswith("Traceback")
    assert found.output.endswith("error: rank 0 failed; the cause is above.\n")
    assert found.left is not None and found.output.startswith(found.left)


def test_other_ends_are_as_they_were_asked_for(ended: dict[str, Ended]) -> None:
    assert ended["finish"] == Ended(0, "", None)
    assert ended["leave_as_script"].code == 5
    found = ended["be_interrupted"]
    assert found.code == 130
    assert found.output.strip().splitlines() == [
        "interrupted. A run that was started with --save continues from its last checkpoint with --load."
    ]


def test_a_lost_peer_is_named_as_the_cause(ended: dict[str, Ended]) -> None:
    found = ended["lose_a_peer"]
    assert found.code == 3
    last = found.output.strip().splitlines()[-1]
    assert last.startswith("error: rank 0 failed: it has lost a peer, see above.")
    assert found.left is not None and found.left.endswith(last)


def test_a_failure_is_that_of_the_module_whatever_the_folders_above_are_called() -> None:
    """A checkout of this repository has the package's name, and contains the environment."""
    path = "/home/me/megatron_ampipe/.venv/lib/python3.12/site-packages/megatron/training/utils.py"
    with pytest.raises(TypeError) as caught:
        exec(compile("x = []\nx['train']", path, "exec"), {"__name__": "megatron.training.utils"})
    assert raised_in("megatron", caught.value)
    assert not raised_in("megatron_ampipe", caught.value)
