"""Hardware queues: what AMPipe sets, what it says, and that Megatron's demand for one queue is lifted."""

import argparse
import contextlib
import io
import os
import shlex
from collections.abc import Iterator

import pytest

pytest.importorskip("megatron.training")

from megatron.training import arguments

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch import connections, flags
from megatron_ampipe.launch.pretrain import check_launch
from tests.megatron.launcher import MOCK_DATA, TINY_GPT, TINY_MOE

DEGREE_4 = ("--ampipe-degree", "4")
LAYOUTS = {
    "context": "--context-parallel-size 2",
    "tensor": "--tensor-model-parallel-size 2 --sequence-parallel",
}


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(connections.VARIABLE, raising=False)
    yield
    os.environ.pop(connections.VARIABLE, None)


def parse(*words: str) -> argparse.Namespace:
    return flags.add_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(list(words))


def launch(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """What a launch of two ranks checks on Hopper, where Megatron would import and ask the same."""
    monkeypatch.setattr(arguments, "get_device_arch_version", lambda: 9)
    monkeypatch.setattr("sys.argv", [])
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0")):
        monkeypatch.setenv(name, value)
    plain = shlex.split("--attention-dropout 0 --hidden-dropout 0 --transformer-impl local --no-rope-fusion")
    with contextlib.redirect_stdout(io.StringIO()):
        check_launch([*TINY_GPT, *TINY_MOE, *MOCK_DATA, *plain, *words])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [None, "1", "8", "32"])
@pytest.mark.parametrize("overlap", [[], ["--overlap-moe-expert-parallel-comm"]], ids=["plain", "overlap"])
def test_any_number_of_queues_is_accepted_with_tensor_and_context_parallelism(
    layout: str, value: str | None, overlap: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is not None:
        monkeypatch.setenv(connections.VARIABLE, value)
    launch(monkeypatch, *shlex.split(LAYOUTS[layout]), *overlap, *DEGREE_4)
    assert os.environ[connections.VARIABLE] == (value or connections.QUEUES)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_ampipe_refuses_is_said_before_megatrons_demand(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlap = ["--overlap-moe-expert-parallel-comm", *DEGREE_4]
    with pytest.raises(BadInput, match="--ampipe-memory all"):
        launch(monkeypatch, *shlex.split(LAYOUTS[layout]), *overlap, "--ampipe-memory", "all")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stock_run_is_left_to_megatron(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match="require setting the environment variable CUDA_DEVICE_MAX_CONN"):
        launch(monkeypatch, *shlex.split(LAYOUTS[layout]))
    assert connections.VARIABLE not in os.environ


def test_queues_are_chosen_when_flags_are_parsed_of_pipelined_runs_alone() -> None:
    parse()
    parse("--ampipe-degree", "1")
    assert connections.VARIABLE not in os.environ
    for words in (DEGREE_4, ("--ampipe-degree", "auto"), ("--ampipe-exchange", "ranks")):
        parse(*words)
        assert os.environ.pop(connections.VARIABLE) == connections.QUEUES


def test_after_cuda_is_initialised_nothing_is_set_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    parse(*DEGREE_4)
    why = connections.warning(os.environ.get(connections.VARIABLE))
    assert "8 hardware queues" in why and connections.EXPORT in why
