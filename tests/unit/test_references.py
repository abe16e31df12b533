"""Docstrings, comments and pages refer only to modules, names and files that exist.

Names are read from the sources, and nothing is imported.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "megatron_ampipe").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FILES = [str(path) for path in ROOT.glob("*.*")]
FILES += [
    str(path) for top in ("megatron_ampipe", "docs", "scripts", "tests") for path in (ROOT / top).rglob("*.*")
]
_ROLE = re.compile(r":(?:mod|func|class|meth|data|attr|exc):`~?\.*([\w.]+)`")
_DOTTED = re.compile(r"``?([a-z_]+(?:\.\w+)+)(?:\(\))?``?")
_FILE = re.compile(r"`([\w./-]+\.(?:py|sh|md))`")
_OF_MEGATRON = ("megatron/", "pretrain_")
# Cluster files have a section of the same name; a stage has the name of the other.
PACKAGES = {path.parent.name for path in SOURCES} - {"host", "attention"}


def names_in(path: Path) -> Iterator[str]:
    """What a module defines, assigns or imports anywhere, and its place in the package."""
    yield from path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.alias(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


KNOWN = {name for path in SOURCES for name in names_in(path)}


def dead_names(text: str) -> list[str]:
    """Those of roles and of dotted names that begin with a package, of which a part is defined nowhere."""
    named = set(_ROLE.findall(text))
    named |= {name for name in _DOTTED.findall(text) if name.partition(".")[0] in PACKAGES}
    ours = [name for name in named if name.partition(".")[0] not in sys.stdlib_module_names]
    return sorted(name for name in ours if not KNOWN.issuperset(name.split(".")))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sources_refer_to_what_exists(path: Path) -> None:
    assert dead_names(path.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_pages_refer_to_what_exists(page: Path) -> None:
    text = page.read_text()
    ours = {name.removeprefix("./") for name in _FILE.findall(text) if not name.startswith(_OF_MEGATRON)}
    assert dead_names(text) == []
    assert [name for name in ours if not any(file.endswith(f"/{name}") for file in FILES)] == []
