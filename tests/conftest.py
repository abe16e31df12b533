"""Implements the markers that pyproject.toml declares, and holds the fixtures of more than one module."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest

from tests.ranks import on_ranks

GPU_TESTS = Path(__file__).parent / "gpu"


class Said(NamedTuple):
    """What a command has printed."""

    out: str
    err: str


class Command(Protocol):
    """Runs ``ampipe`` with these arguments in this process; fails the test if it ends with another code."""

    def __call__(self, *words: object, code: int = 0) -> Said: ...


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Take back what a test sets in the environment, also where the code it calls does so."""
    before = dict(os.environ)
    yield
    if before != dict(os.environ):
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def ampipe(capsys: pytest.CaptureFixture[str]) -> Command:
    """A way to run commands."""

    def run(*words: object, code: int = 0) -> Said:
        # On a GPU machine some tests run without what tools need.
        from megatron_ampipe.cli import main

        capsys.readouterr()
        ended = main([str(word) for word in words])
        said = Said(*capsys.readouterr())
        assert ended == code, said
        return said

    return run


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Let tests with the mark ``ranks`` run on ranks."""
    on_ranks(session.items)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark all tests in tests/gpu as ``gpu``, and skip tests with that mark if there is no CUDA device."""
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    stand_ins = config.pluginmanager.has_plugin("cuda-stand-ins")
    reason = _why_no_gpu() if marked and not stand_ins else None
    if reason is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_gpu() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "needs a CUDA device, and torch is not installed"
    import torch

    return None if torch.cuda.is_available() else "needs a CUDA device, and torch finds none"
