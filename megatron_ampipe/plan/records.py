"""Frozen dataclasses from YAML, key by key, and back: what cluster and plan files have in common.

The dataclass is the form of the file. A field's type says what may stand there: text, a number (at least
0, or at least ``metadata["minimum"]``), a choice (``Literal``), a whole number (at least 1), true or false,
another dataclass, a list of one of these, or a mapping from a choice to one of these. A field without a
default must be given.
Called by :mod:`.cluster` and :mod:`.plan_file`; knows no field of either.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

import yaml

from megatron_ampipe import outputs
from megatron_ampipe.errors import BadInput
from megatron_ampipe.yaml_lines import LinedMapping

Lines = dict[str, int]
"""Where each key stood: the line by the names of the keys that lead there, joined by dots."""


def read_record[Record](path: Path, kind: type[Record], top: LinedMapping) -> tuple[Record, Lines]:
    """Check a mapping against a dataclass.

    Args:
        path: The file, for the errors.
        kind: The dataclass.
        top: What :func:`megatron_ampipe.yaml_lines.load` read.

    Returns:
        The record, and the line of every key in it.

    Raises:
        BadInput: naming file and line, the key, and the nearest one that there is.
    """
    reader = _Reader(path)
    return reader.record(kind, top, ""), reader.lines


def write_record(path: Path, record: object, *, head: str) -> None:
    """Write a record so that :func:`read_record` reads the same one.

    The file appears under its name only when it is whole. Fields that are None are left out.

    Args:
        path: Of the file; its folder is made.
        record: A dataclass whose form :func:`read_record` knows.
        head: What the file is, a line of text that becomes a comment.

    Raises:
        RunFailed: it cannot be written.
    """
    text = yaml.dump(_plain(record), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    outputs.write_text(path, f"# {head}\n{text}")


def refuse(path: Path | str, line: int, key: str, rule: str, remedy: str) -> NoReturn:
    """Raise the error of one place of a file."""
    raise BadInput(f"{path}:{line}:", key, rule=rule, remedy=remedy)


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that is most like ``word``, as a sentence; what is known, if none is."""
    choices = sorted(known)
    if close := difflib.get_close_matches(word, choices, n=1, cutoff=0.5):
        return f"Did you mean {close[0]}?"
    return f"There are {', '.join(choices)}."


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


class _Reader:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: Lines = {}

    def record(self, kind: type[Any], found: object, where: str, line: int = 1) -> Any:
        if not isinstance(found, LinedMapping):
            self._refuse(line, where, "must hold keys with values", "Write one 'key: value' on each line.")
        hints = typing.get_type_hints(kind)
        fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
        readable = {name: field for name, field in fields.items() if not field.metadata.get("derived")}
        for key in found:
            if key not in readable:
                self._unknown(found.lines[key], _join(where, key), key, readable)
        values = {}
        for name, field in readable.items():
            if name in found:
                here = _join(where, name)
                self.lines[here] = found.lines[name]
                minimum = field.metadata.get("minimum")
                values[name] = self._value(hints[name], found[name], here, found.lines[name], minimum)
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                where_text = where or "the file"
                self._refuse(found.line, _join(where, name), f"is missing in {where_text}", "Add it.")
        return kind(**values)

    def _value(self, hint: Any, found: object, where: str, line: int, minimum: float | None) -> Any:
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin is types.UnionType:
            (hint,) = (part for part in arguments if part is not type(None))
            return self._value(hint, found, where, line, minimum)
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            return self.record(hint, found, where, line)
        if origin is Literal:
            if found not in arguments:
                self._refuse(
                    line, f"{where} {found!r}", f"must be one of {', '.join(arguments)}", _use(arguments)
                )
            return found
        if origin is tuple:
            if not isinstance(found, list) or not found:
                self._refuse(line, where, "must be a list that is not empty", "Write for example [1, 2].")
            return tuple(self._value(arguments[0], item, where, line, minimum) for item in found)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return self._mapping(arguments, found, where, line)
        return self._plain(hint, found, where, line, minimum)

    def _mapping(self, arguments: tuple[Any, ...], found: object, where: str, line: int) -> dict[str, Any]:
        names, kind = typing.get_args(arguments[0]), arguments[1]
        if not isinstance(found, LinedMapping) or not found:
            self._refuse(line, where, f"must hold some of {', '.join(names)}", _use(names))
        for key in found:
            here = _join(where, key)
            if key not in names:
                self._unknown(found.lines[key], here, key, names)
            self.lines[here] = found.lines[key]
        return {
            key: self._value(kind, value, _join(where, key), found.lines[key], None)
            for key, value in found.items()
        }

    def _plain(self, hint: Any, found: object, where: str, line: int, minimum: float | None) -> Any:
        shown = f"{where} {found!r}"
        if hint is str:
            if not isinstance(found, str) or not found.strip():
                self._refuse(line, shown, "must be text", "Write some words.")
            return found
        if hint is bool:
            if not isinstance(found, bool):
                self._refuse(line, shown, "must be true or false", "Write true or false.")
            return found
        if hint is int:
            if type(found) is not int or found < 1:
                self._refuse(line, shown, "must be a whole number of at least 1", "Write for example 8.")
            return found
        assert hint is float, hint
        least = 0.0 if minimum is None else minimum
        # YAML reads 1e-3, without a point, as text.
        if isinstance(found, str) and _is_number(found):
            found = float(found)
        if type(found) not in (int, float) or not math.isfinite(typing.cast(float, found)):
            rule = f"must be a number of at least {least:g}; its unit stands in the key"
            self._refuse(line, shown, rule, "Write for example 1.5.")
        if typing.cast(float, found) > _LARGEST:
            self._refuse(line, shown, f"must be at most {_LARGEST:g}", "Look at the unit in the key.")
        if typing.cast(float, found) < least:
            self._refuse(line, shown, f"must be at least {least:g}", f"Write {least:g} or more.")
        return float(typing.cast(float, found))

    def _unknown(self, line: int, where: str, key: str, known: Iterable[str]) -> NoReturn:
        choices = list(known)
        stem = key.split("_")[0]
        other = [name for name in choices if "_us" in name and name.split("_")[0] == stem]
        if other and any(unit in key for unit in _UNITS):
            rule = f"is in another unit than the file's, which is that of {other[0]}"
            self._refuse(line, where, rule, f"Convert the figure and call it {other[0]}.")
        self._refuse(line, where, "is not a key that can stand here", nearest(key, choices))

    def _refuse(self, line: int, key: str, rule: str, remedy: str) -> NoReturn:
        refuse(self.path, line, key, rule, remedy)


_LARGEST = 1e15
"""Of any figure. Sums and products of larger ones could be infinite."""
_UNITS = ("_s", "_ms", "_us", "_ns", "_per_", "_gb")


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _plain(content)
            # What a base class asks for, such as the source of a figure, reads better behind the figure.
            for field in sorted(dataclasses.fields(value), key=lambda field: bool(field.metadata.get("last")))
            if not field.metadata.get("derived") and (content := getattr(value, field.name)) is not None
        }
    if isinstance(value, Mapping):
        return {key: _plain(content) for key, content in value.items()}
    if isinstance(value, tuple):
        return [_plain(content) for content in value]
    return value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _use(choices: Iterable[Any]) -> str:
    return f"Use {next(iter(choices))}."
