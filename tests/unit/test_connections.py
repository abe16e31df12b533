"""Hardware queues: what AMPipe sets, and what it says. ``tests/megatron/test_launches.py`` has Megatron's."""

import argparse
import os
from collections.abc import Iterator

import pytest

from megatron_ampipe.launch import connections, flags

DEGREE_4 = ("--ampipe-degree", "4")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(connections.VARIABLE, raising=False)
    yield
    os.environ.pop(connections.VARIABLE, None)


def parse(*words: str) -> str | None:
    """The variable after these flags have been parsed."""
    flags.add_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(words)
    return os.environ.get(connections.VARIABLE)


def test_queues_are_chosen_when_flags_are_parsed_of_pipelined_runs_alone() -> None:
    assert parse() is None and parse("--ampipe-degree", "1") is None
    assert parse(*DEGREE_4) == connections.QUEUES
    os.environ[connections.VARIABLE] = "8"
    assert parse(*DEGREE_4) == "8", "the user's choice"


def test_after_cuda_is_initialised_nothing_is_set_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    why = connections.warning(parse(*DEGREE_4))
    assert "8 hardware queues" in why and connections.EXPORT in why
