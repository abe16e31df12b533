"""Implements the markers that pyproject.toml declares. Fixtures are in the modules of their tests."""

import importlib.util
from pathlib import Path

import pytest

from tests.ranks import on_ranks

GPU_TESTS = Path(__file__).parent / "gpu"


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
