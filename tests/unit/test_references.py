"""Docstrings, comments and pages refer only to modules, names and files that exist.

Names are read from the sources, and nothing is imported.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "megatron_ampipe"
SOURCES = sorted((ROOT / PACKAGE).rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_MODULE = re.compile(r":mod:`~?\.*([\w.]+)`")
_OBJECT = re.compile(r":(?:func|class|meth|data|attr|exc):`~?\.*([\w.]+)`")
_DOTTED = re.compile(r"``?([a-z_]+(?:\.\w+)+)(?:\(\))?``?")
_FILE = re.compile(r"`([\w./-]+\.(?:py|sh|md))`")


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def names_in(body: list[ast.stmt]) -> Iterator[str]:
    """What a module or class defines or imports, with what its classes define."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{name}" for name in names_in(node.body))
            for inner in ast.walk(node):
                if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    yield f"{node.name}.{inner.attr}"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign | ast.TypeAlias):
            target = node.target if isinstance(node, ast.AnnAssign) else node.name
            if isinstance(target, ast.Name):
                yield target.id
        elif isinstance(node, ast.If):
            yield from names_in([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from names_in([*node.body, *(one for handler in node.handlers for one in handler.body)])


def known_names() -> set[str]:
    found = set()
    for path in SOURCES:
        module = module_of(path)
        found.add(module)
        found |= {f"{module}.{name}" for name in names_in(ast.parse(path.read_text()).body)}
    return found


KNOWN = known_names()
FILES = [str(path) for top in (PACKAGE, "docs", "scripts", "tests") for path in (ROOT / top).rglob("*.*")]
ENDINGS = {name.split(".", at)[-1] for name in KNOWN for at in range(1, name.count(".") + 1)}
# Cluster files have a section of the same name; a stage has the name of the other.
PACKAGES = {path.parent.name for path in SOURCES} - {"host", "attention"}
_OF_MEGATRON = ("megatron/", "pretrain_")


def is_below(name: str, place: str) -> bool:
    """Whether a name is absolute, or is in a module or in one of the packages that the module is in."""
    parts = place.split(".")
    places = [".".join(parts[: end + 1]) for end in range(len(parts))]
    return name in KNOWN or any(f"{above}.{name}" in KNOWN for above in places)


def is_object(name: str, place: str) -> bool:
    """Likewise of a function, class, attribute: also of any class, since names of classes are unique."""
    first = name.partition(".")[0]
    of_class = "." not in name or first[0].isupper()
    return is_below(name, place) or first in sys.stdlib_module_names or (of_class and name in ENDINGS)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sources_refer_to_what_exists(path: Path) -> None:
    text, module = path.read_text(), module_of(path)
    dotted = {name for name in _DOTTED.findall(text) if name.split(".")[0] in {*PACKAGES, PACKAGE}}
    dead = [name for name in {*_MODULE.findall(text), *dotted} if not is_below(name, module)]
    dead += [name for name in set(_OBJECT.findall(text)) if not is_object(name, module)]
    assert not dead, sorted(dead)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_pages_refer_to_what_exists(page: Path) -> None:
    text = page.read_text()
    dotted = {name for name in _DOTTED.findall(text) if name.split(".")[0] in PACKAGES}
    dead = [name for name in dotted if not is_below(name, PACKAGE)]
    ours = {name.removeprefix("./") for name in _FILE.findall(text) if not name.startswith(_OF_MEGATRON)}
    dead += [name for name in ours if not any(file.endswith(f"/{name}") for file in FILES)]
    assert not dead, sorted(dead)
