"""Frozen dataclasses from YAML and back: the one reader of AMPipe's own file formats.

A dataclass states the form of a file, or of a section in it: ``str`` is text that is not empty, ``int`` a
whole number of at least 1, ``float`` a number of at least 0, ``Mapping[Literal, X]`` a section with some of
these keys, ``LinedMapping`` one that the caller checks, and ``tuple`` a list that is not empty.

A field without a default must be given. Metadata of a field: ``minimum`` (its least value), ``above`` (what
it must exceed), ``derived`` (it does not stand in the file), ``last`` (it is written after the others).
"""

from __future__ import annotations

import dataclasses
import io
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import LiteralScalarString

from megatron_ampipe.errors import nearest
from megatron_ampipe.files import outputs
from megatron_ampipe.files.inputs import LinedMapping, refuse

Lines = dict[str, int]
"""The line of each key; a nested key is ``outer.inner``."""
_LARGEST = 1e15
"""Largest number that a file may hold. Sums and products of larger ones could be infinite."""


def read_record[Record](
    path: Path, kind: type[Record], top: LinedMapping, *, add: str = "Add '{key}: ...'."
) -> tuple[Record, Lines]:
    """Check what :func:`.inputs.load` read from ``path`` against the dataclass ``kind``.

    Returns the record, and the line of every key in it. Raises :class:`BadInput`, which names file and line,
    the key, and the nearest known one; ``add``, with ``{key}`` in it, says what to do about a missing key.
    """
    reader = _Reader(path, add)
    return reader.value(kind, top, "", top.line, {}), reader.lines


def write_record(path: Path, record: object, *, head: str) -> None:
    """Write a dataclass, as :func:`.outputs.write_text`, so that :func:`read_record` reads the same one.

    Fields that are None are left out. ``head`` says what the file is, and becomes a comment.
    """
    yaml, text = YAML(), io.StringIO()
    yaml.width = 10**6
    yaml.dump(_plain(record), text)
    outputs.write_text(path, f"# {outputs.comment(head)}\n{text.getvalue()}")


def keys_of(kind: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """The fields of a dataclass that a file can hold, by name."""
    fields = dataclasses.fields(kind)
    return {field.name: field for field in fields if field.init and not field.metadata.get("derived")}


class _Reader:
    """Reads one file; ``where`` is the full name of a key (``outer.inner``), ``line`` its line."""

    def __init__(self, path: Path, add: str) -> None:
        self.path = path
        self.lines: Lines = {}
        self._add = add

    def value(self, hint: Any, content: object, where: str, line: int, limits: Mapping[str, Any]) -> Any:
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin is types.UnionType:
            (hint,) = (part for part in arguments if part is not type(None))
            return None if content is None else self.value(hint, content, where, line, limits)
        if origin is tuple:
            if not isinstance(content, list) or not content:
                remedy = "Write for example [1, 2], or '- ' before each entry."
                refuse(self.path, line, where, "must be a list that is not empty", remedy)
            return tuple(
                self.value(arguments[0], item, f"{where}[{index}]", line, limits)
                for index, item in enumerate(content)
            )
        if hint is LinedMapping or dataclasses.is_dataclass(hint) or origin not in (Literal, None):
            return self._section(hint, content, where, line)
        if (rule := _broken_rule(hint, content, limits)) is not None:
            refuse(self.path, line, f"{where} {content!r}", rule, "Write another value.")
        return float(content) if hint is float else content  # type: ignore[arg-type]

    def _section(self, hint: Any, content: object, where: str, line: int) -> Any:
        """Read a mapping: a dataclass, a mapping with known keys, or a mapping that the caller checks."""
        if not isinstance(content, LinedMapping):
            remedy = "Write one 'key: value' on each line."
            refuse(self.path, line, where, "must hold keys with values", remedy)
        places = {key: f"{where}.{key}".removeprefix(".") for key in content}
        self.lines |= {places[key]: at for key, at in content.lines.items()}
        if hint is LinedMapping:
            return content
        is_record = dataclasses.is_dataclass(hint)
        fields = keys_of(hint) if is_record else {}
        words, kind = ((), None) if fields else typing.get_args(hint)
        hints = typing.get_type_hints(hint) if fields else dict.fromkeys(typing.get_args(words), kind)
        for key, at in content.lines.items():
            if key not in (fields or hints):
                refuse(self.path, at, places[key], "is not a known key", nearest(key, fields or hints))
        for name, field in fields.items():
            if name not in content and field.default is field.default_factory is dataclasses.MISSING:
                key = f"{where}.{name}".removeprefix(".")
                refuse(self.path, content.line, key, "is missing", self._add.format(key=name))
        values = {}
        for key, value in content.items():
            limits = fields[key].metadata if fields else {}
            values[key] = self.value(hints[key], value, places[key], content.lines[key], limits)
        return hint(**values) if fields else values


def _broken_rule(hint: Any, content: Any, limits: Mapping[str, Any]) -> str | None:
    """The rule that a scalar of type ``hint`` breaks; None if it breaks none."""
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        return None if content in choices else f"must be one of {', '.join(choices)}"
    if hint is str:
        return None if isinstance(content, str) and content.strip() else "must be text"
    if hint is bool:
        return None if isinstance(content, bool) else "must be true or false"
    least, above = limits.get("minimum", 1 if hint is int else 0), limits.get("above")
    is_number = isinstance(content, int if hint is int else int | float) and not isinstance(content, bool)
    # The limit also excludes infinity and NaN.
    if is_number and content <= _LARGEST and (content >= least if above is None else content > above):
        return None
    limit = f"at least {least:g}" if above is None else f"above {above:g}"
    return f"must be a {'whole ' * (hint is int)}number, {limit}, without a unit"


def _plain(value: object) -> object:
    """Convert to types that YAML can hold; text of several lines becomes a block."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Fields of a base class, such as the source of a figure, are written after the figure.
        fields = sorted(keys_of(type(value)).values(), key=lambda field: bool(field.metadata.get("last")))
        contents = {field.name: getattr(value, field.name) for field in fields}
        return {name: _plain(content) for name, content in contents.items() if content is not None}
    if isinstance(value, Mapping):
        return {key: _plain(content) for key, content in value.items()}
    if isinstance(value, str):
        return LiteralScalarString(value) if "\n" in value else str(value)
    return [_plain(content) for content in value] if isinstance(value, tuple) else value
