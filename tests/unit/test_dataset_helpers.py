"""Compiling the dataset helper of a checkout: when it is necessary, and what is missing for it. No torch."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest

from megatron_ampipe.launch.datasets import missing_tools, must_be_compiled

SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
TOOLS = dict.fromkeys(("make", "g++", "python3", "python3-config"), "")


@pytest.mark.parametrize(
    ("name", "does", "expected"),
    [
        ("make", "", None),
        ("make", None, "make is not on the PATH"),
        ("python3", "exit 1", "the python3 on the PATH has no pybind11"),
    ],
)
def test_what_is_missing_is_named(
    name: str, does: str | None, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tool, command in {**TOOLS, name: does}.items():
        if command is not None:
            (tmp_path / tool).write_text(f"#!/bin/sh\n{command}\n")
            (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    missing = missing_tools()
    assert missing == [] if expected is None else any(expected in clause for clause in missing)


def test_what_is_built_and_newer_is_not_built_again(tmp_path: Path) -> None:
    for name in ("Makefile", "helpers.cpp"):
        (tmp_path / name).touch()
    assert must_be_compiled(tmp_path)
    built = tmp_path / f"helpers_cpp{SUFFIX}"
    built.touch()
    os.utime(tmp_path / "helpers.cpp", (1, 1))
    assert not must_be_compiled(tmp_path)
    os.utime(built, (0, 0))
    assert must_be_compiled(tmp_path)
    (tmp_path / "Makefile").unlink()
    assert not must_be_compiled(tmp_path), "a wheel"
