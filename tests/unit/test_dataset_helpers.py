"""Compiling the dataset helper of a checkout: when it is necessary, and messages if it fails. No torch."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from megatron_ampipe.errors import EnvironmentMissing
from megatron_ampipe.launch.dataset_helpers import missing_tools, must_be_compiled, use_built_helpers
from megatron_ampipe.tools import checkup

SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
TOOLS = {"make": "", "g++": "", "python3": "", "python3-config": f"echo {SUFFIX}"}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The folder of a checkout's datasets that was never compiled."""
    folder = tmp_path / "datasets"
    folder.mkdir()
    for name in ("Makefile", "helpers.cpp"):
        (folder / name).touch()
    return folder


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH that contains only fakes of all necessary tools."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, does in TOOLS.items():
        stand_in(folder, name, does)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    return folder


def stand_in(folder: Path, name: str, does: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{does}\n")
    (folder / name).chmod(0o755)


def test_with_all_tools_nothing_is_missing(checkout: Path, tools: Path) -> None:
    assert must_be_compiled(checkout)
    assert missing_tools() == []


@pytest.mark.parametrize(
    ("name", "does", "expected"),
    [
        ("make", None, "make is not on the PATH"),
        ("g++", None, "g++ is not on the PATH"),
        ("python3-config", None, "python3-config is not there or of another Python: it says None, not "),
        ("python3-config", "echo .cpython-38-x.so", "of another Python: it says .cpython-38-x.so, not "),
        ("python3", "exit 1", "the python3 on the PATH has no pybind11"),
    ],
)
def test_what_is_missing_is_named_by_launch_and_doctor(
    name: str, does: str | None, expected: str, checkout: Path, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tools / name).unlink()
    if does is not None:
        stand_in(tools, name, does)
    component = checkup.dataset_helper()
    assert expected in component.found and "pip install pybind11" in component.remedy
    assert component.problem is None, "the Megatron that is installed here is a wheel"
    package = ModuleType("megatron.core.datasets")
    package.utils = SimpleNamespace(__file__=str(checkout / "utils.py"))  # type: ignore[attr-defined]
    for module in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    with pytest.raises(EnvironmentMissing, match="pip install pybind11") as caught:
        use_built_helpers()
    assert expected in str(caught.value)


def test_what_is_built_and_newer_is_not_built_again(
    checkout: Path, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tools / "make").unlink()
    built = checkout / f"helpers_cpp{SUFFIX}"
    built.touch()
    os.utime(checkout / "helpers.cpp", (1, 1))
    assert not must_be_compiled(checkout)
    os.utime(built, (0, 0))
    assert must_be_compiled(checkout)
    (checkout / "Makefile").unlink()
    assert not must_be_compiled(checkout), "a wheel"


def test_of_a_checkout_that_is_not_built_the_doctor_demands_the_tools(
    checkout: Path, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tools / "make").unlink()
    monkeypatch.setattr("megatron_ampipe.compat.megatron_folder", lambda: checkout.parent)
    assert checkup.dataset_helper().problem is not None
