"""Scripts of ``docs/measured`` call what is there. Running them takes minutes and a quiet machine."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCRIPTS = sorted((Path(__file__).parents[2] / "docs" / "measured").glob("*.py"))


def test_what_they_call_is_there() -> None:
    # In another process: the host platform replaces functions of torch.
    command = [sys.executable, "-m", "tests.unit.test_measured_scripts"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=SCRIPTS[0].parents[2])
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == []
    assert found["calls"] > len(SCRIPTS)


def calls_of(tree: ast.Module) -> Iterator[tuple[int, Any, ast.Call | None]]:
    """Line and object of everything of the package that a script names, and the call if it is one.

    Raises:
        AttributeError: the package has no such name.
        ImportError: or no such module.
    """
    names: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_ampipe"):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
                names[alias.asname or alias.name] = getattr(module, alias.name)
                yield node.lineno, names[alias.asname or alias.name], None
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if inspect.ismodule(names.get(name)):
                yield node.lineno, getattr(names[name], attribute), None
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in names:
                yield node.lineno, names[name], node
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attribute)) if name in names:
                yield node.lineno, getattr(names[name], attribute), node


def mistake(function: Any, call: ast.Call) -> str | None:
    """Why a call does not fit what is called; None if it does."""
    if any(isinstance(argument, ast.Starred) for argument in call.args):
        return None
    given = {word.arg: None for word in call.keywords if word.arg is not None}
    unpacked = any(word.arg is None for word in call.keywords)
    signature = inspect.signature(function)
    try:
        (signature.bind_partial if unpacked else signature.bind)(*call.args, **given)
    except TypeError as error:
        return str(error)
    return None


def main() -> None:
    from megatron_ampipe.launch import host

    host.install()
    wrong, calls = [], 0
    for script in SCRIPTS:
        for line, named, call in calls_of(ast.parse(script.read_text())):
            if call is not None:
                calls += 1
                if why := mistake(named, call):
                    wrong.append(f"{script.name}:{line}: {why}")
    print(json.dumps({"wrong": wrong, "calls": calls}))


if __name__ == "__main__":
    main()
