"""Finds definitions in the sources of a Megatron. An import would find what the host platform replaces."""

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Definition:
    """A statement that gives a name its value, and the module it stands in, without ``megatron.``."""

    node: ast.AST
    module: str


@functools.cache
def definition(root: Path, name: str) -> Definition | None:
    """The definition of a name such as ``core.utils.ensure_divisibility`` in a ``megatron`` folder, or None.

    Follows imports from Megatron, and looks for a method in base classes too.
    """
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:length])
        if file_of(root, module) is not None:
            found = _in_module(root, module, parts[length])
            for attribute in parts[length + 1 :]:
                found = None if found is None else _in_value(root, found, attribute)
            return found
    return None


def file_of(root: Path, module: str) -> Path | None:
    """The file of a module; None if there is no such module."""
    path = root.joinpath(*module.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def _in_module(root: Path, module: str, name: str) -> Definition | None:
    file = file_of(root, module)
    assert file is not None
    found = None
    for node in _statements(_tree(file).body):
        match node:
            case ast.FunctionDef() | ast.ClassDef() if node.name == name:
                found = Definition(node, module)
            case ast.ImportFrom(names=names):
                for one in names:
                    if (one.asname or one.name) == name:
                        found = _imported(root, module, node, one.name) or found or Definition(node, module)
            case ast.Import(names=names) if any((one.asname or one.name) == name for one in names):
                found = found or Definition(node, module)
            case ast.Assign() | ast.AnnAssign() if _assigns(node, name):
                found = found or Definition(node, module)
    return found


def _imported(root: Path, module: str, node: ast.ImportFrom, name: str) -> Definition | None:
    """What an import of Megatron's own brings; None for other packages."""
    if node.level:
        file = file_of(root, module)
        folder = (
            module.split(".") if file is not None and file.name == "__init__.py" else module.split(".")[:-1]
        )
        above = folder[: len(folder) - node.level + 1]
        return definition(root, ".".join([*above, *filter(None, [node.module]), name]))
    source = node.module or ""
    if source.startswith("megatron."):
        return definition(root, f"{source.removeprefix('megatron.')}.{name}")
    return None


def _in_value(root: Path, found: Definition, attribute: str) -> Definition | None:
    """A method of a class or of its bases; an attribute of a value is where the value is."""
    if not isinstance(found.node, ast.ClassDef):
        return found
    for owner in classes(root, found):
        for node in _statements(owner.node.body):  # type: ignore[attr-defined]
            is_method = isinstance(node, ast.FunctionDef) and node.name == attribute
            if is_method or (isinstance(node, ast.Assign | ast.AnnAssign) and _assigns(node, attribute)):
                return Definition(node, owner.module)
    return None


def classes(root: Path, found: Definition) -> Iterator[Definition]:
    """A class and its bases in Megatron."""
    yield found
    assert isinstance(found.node, ast.ClassDef)
    for base in found.node.bases:
        of_base = _in_module(root, found.module, ast.unparse(base)) if isinstance(base, ast.Name) else None
        if of_base is not None and isinstance(of_base.node, ast.ClassDef):
            yield from classes(root, of_base)


@functools.cache
def attributes(root: Path, name: str) -> frozenset[str]:
    """The methods and attributes of a class and of its bases in Megatron."""
    found = definition(root, name)
    if found is None or not isinstance(found.node, ast.ClassDef):
        return frozenset()
    text = "\n".join(ast.unparse(each.node) for each in classes(root, found))
    named = re.findall(r"^ +def (\w+)|\bself\.(\w+)|^    (\w+)\b *[:=]", text, re.M)
    return frozenset(word for words in named for word in words if word)


@functools.cache
def functions(root: Path) -> frozenset[str]:
    """The names of all functions and methods."""
    files = [*(root / "core").rglob("*.py"), *(root / "training").rglob("*.py")]
    return frozenset(name for file in files for name in re.findall(r"^ *def (\w+)\(", file.read_text(), re.M))


@functools.cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, also those in an ``if`` or a ``try``."""
    for node in body:
        yield node
        for parts in ("body", "handlers", "orelse", "finalbody"):
            inner = getattr(node, parts, []) if isinstance(node, ast.If | ast.Try | ast.With) else []
            for each in inner:
                yield from _statements(each.body if isinstance(each, ast.ExceptHandler) else [each])


def _assigns(node: ast.Assign | ast.AnnAssign, name: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(
        isinstance(each, ast.Name) and each.id == name for target in targets for each in ast.walk(target)
    )
