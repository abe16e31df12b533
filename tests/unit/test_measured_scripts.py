"""The scripts of ``docs/measured`` find what they import. Running them takes minutes and a quiet machine."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

SCRIPTS = sorted((Path(__file__).parents[2] / "docs" / "measured").glob("*.py"))


def test_what_they_import_is_there() -> None:
    imports = {
        ast.unparse(node)
        for script in SCRIPTS
        for node in ast.walk(ast.parse(script.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_ampipe")
    }
    assert len(imports) > len(SCRIPTS)
    # In another process: the host platform replaces functions of torch.
    program = "\n".join(["from megatron_ampipe.launch import host", "host.install()", *sorted(imports)])
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
