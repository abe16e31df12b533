"""Scripts of ``docs/measured`` call what is there. Running them takes minutes and a quiet machine."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def test_what_they_call_is_there() -> None:
    # In another process: the host platform replaces functions of torch.
    command = [sys.executable, "-m", "tests.unit.test_measured_scripts"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == ""


def wrong_calls(tree: ast.Module) -> Iterator[str]:
    """Calls of functions of the package that do not fit them; what is not there raises."""
    names: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("megatron_ampipe"):
            exec(ast.unparse(node), names)
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(value=ast.Name(id=name))) if name in names:
                signature = inspect.signature(eval(ast.unparse(node.func), names))
            case _:
                continue
        given = {word.arg: None for word in node.keywords if word.arg is not None}
        unpacks = len(given) < len(node.keywords) or any(isinstance(one, ast.Starred) for one in node.args)
        try:
            (signature.bind_partial if unpacks else signature.bind)(*node.args, **given)
        except TypeError as error:
            yield f"{node.lineno}: {error}"


if __name__ == "__main__":
    from megatron_ampipe.launch import host

    host.install()
    for script in sorted((ROOT / "docs" / "measured").glob("*.py")):
        for wrong in wrong_calls(ast.parse(script.read_text())):
            print(f"{script.name}:{wrong}")
