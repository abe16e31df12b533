"""The scripts of ``docs/measured`` find what they import. Running them takes minutes and a quiet machine."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from megatron_ampipe.launch import host

SCRIPTS = sorted((Path(__file__).parents[2] / "docs" / "measured").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_what_it_imports_is_there(script: Path) -> None:
    host.install()
    imports = [
        (node.module, name.name)
        for node in ast.walk(ast.parse(script.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_ampipe")
        for name in node.names
    ]
    assert imports
    missing = [
        f"{module}.{name}"
        for module, name in imports
        if not hasattr(importlib.import_module(module), name) and not is_module(f"{module}.{name}")
    ]
    assert not missing


def is_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
