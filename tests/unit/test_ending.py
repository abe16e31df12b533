"""How a process of a launch ends: exit code, last output, and the error that torchrun prints."""

import faulthandler
import json
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from megatron_ampipe.launch import ending

HERE = (__name__, "fail")
LOADING = ("megatron.training.checkpointing", "load_checkpoint")
TRAINING = ("megatron.training.training", "train")


@pytest.fixture(autouse=True)
def _of_rank_0_in_the_foreground(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # In place of Megatron, whose import takes long.
    training: Any = ModuleType("megatron.training")
    training.get_args = lambda: SimpleNamespace(load="/loaded")
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    monkeypatch.setattr(faulthandler, "enable", lambda: None)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    # A shell that runs the tests in the background ignores SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
    logging.disable(logging.NOTSET)


End = Callable[[Callable[[], Any]], tuple[int, str, str | None]]
"""Runs a launch to its end: exit code, output, and what torchrun's error block would show for it."""


@pytest.fixture
def end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> End:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))

    def run(launch: Callable[[], Any]) -> tuple[int, str, str | None]:
        code = ending.run_to_end(launch)
        left = json.loads(file.read_text())["message"]["extraInfo"]["py_callstack"] if file.exists() else None
        return code, "".join(capfd.readouterr()), left

    return run


def raising(error: BaseException, *places: tuple[str, str]) -> Callable[[], Any]:
    """What raises an error through functions of these modules, the outermost first."""
    line, names = "raise error", {"error": error}
    for module, function in reversed(places):
        names: dict[str, Any] = {"__name__": module, **names}
        exec(f"def {function}():\n    {line}", names)
        line, names = "call()", {"call": names[function]}
    return names["call"]


def meet_nowhere() -> None:
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)


@pytest.mark.parametrize(
    ("launch", "code", "begin"),
    [
        (
            raising(RuntimeError("cannot read\nmore"), LOADING, ("torch", "read")),
            2,
            "--load /loaded: the checkpoint cannot be loaded (cannot read). Name the folder",
        ),
        (raising(SystemExit(), TRAINING), 3, "Megatron ended the run and printed the reason above, on rank"),
        (meet_nowhere, 1, "environment variable MASTER_ADDR expected, but not set. It says where ranks find"),
    ],
)
def test_what_is_known_is_one_line_there_and_here(
    launch: Callable[[], Any], code: int, begin: str, end: End
) -> None:
    ended, output, left = end(launch)
    assert ended == code and output.startswith(f"\nerror: {begin}")
    assert len(output.splitlines()) == 2
    assert left == output.strip()


@pytest.mark.parametrize(
    ("error", "places"),
    [
        (ValueError("deep inside"), [HERE]),
        # No fault of a checkpoint.
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), [LOADING, ("torch", "read")]),
        (ValueError("a fault"), [LOADING, ("megatron_ampipe.layers.layer", "read")]),
        # No lost peer.
        (RuntimeError("DataLoader timed out after 30 seconds"), [HERE]),
    ],
    ids=["anywhere", "out of memory in loading", "our own in loading", "a worker timed out"],
)
def test_another_failure_keeps_its_traceback_and_leaves_it_for_torchrun(
    error: Exception, places: list[tuple[str, str]], end: End
) -> None:
    code, output, left = end(raising(error, *places))
    assert code == 3 and output.startswith("Traceback")
    assert output.endswith("error: rank 0 failed; the cause is above.\n")
    assert left is not None and output.startswith(left)


def test_a_lost_peer_is_named_as_the_cause(end: End) -> None:
    error = RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer [10.0.0.1]:1")
    code, output, left = end(raising(error, HERE))
    last = output.splitlines()[-1]
    assert code == 3 and last.startswith("error: rank 0 failed: it has lost a peer, see above.")
    assert left is not None and left.endswith(last)


@pytest.mark.parametrize(
    ("text", "code"), [("pretrain()", 2), ("if __name__ == '__main__':\n    pretrain()", 3)]
)
def test_a_script_that_spawned_processes_would_train_again_is_named(
    text: str, code: int, end: End, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a guard, the process that writes checkpoints has ended for another reason."""
    (tmp_path / "train.py").write_text(text)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py")])
    failing = raising(
        EOFError(), TRAINING, ("multiprocessing.managers", "start"), ("multiprocessing", "recv")
    )
    ended, output, _ = end(failing)
    assert ended == code
    guarded = (
        "train.py: a process that writes checkpoints imports it, and it then trains again: it has no guard"
    )
    assert (guarded in output) == (code == 2), output


def test_a_code_of_the_script_stays(end: End) -> None:
    with pytest.raises(SystemExit, match="5"):
        end(raising(SystemExit(5), HERE))


def test_an_interrupted_launch_says_how_to_go_on(end: End) -> None:
    code, output, _ = end(lambda: signal.raise_signal(signal.SIGINT))
    assert code == 130
    assert output.strip().splitlines() == [
        "interrupted. A run that was started with --save continues from its last checkpoint with --load."
    ]
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "torchrun sends another one"


def test_a_failure_is_that_of_the_module_whatever_the_folders_above_are_called() -> None:
    """A checkout of this repository has the package's name, and contains the environment."""
    path = "/home/me/megatron_ampipe/.venv/lib/python3.12/site-packages/megatron/training/utils.py"
    with pytest.raises(TypeError) as caught:
        exec(compile("x = []\nx['train']", path, "exec"), {"__name__": "megatron.training.utils"})
    assert ending.raised_in("megatron", caught.value)
    assert not ending.raised_in("megatron_ampipe", caught.value)
