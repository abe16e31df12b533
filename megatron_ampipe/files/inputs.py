"""Reads what a user gives: whole numbers, text, built-in files, and YAML with the line of each key.

Only regular files are read: opening a pipe without a writer would block forever, and reading a device such as
``/dev/zero`` would fill the memory. Values are checked by :mod:`.records` in AMPipe's formats, and by
``launch/config_files.py`` in Megatron's flags.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from megatron_ampipe.errors import BadInput, did_you_mean

_PACKAGE = Path(__file__).resolve().parents[1]
_CONSTRUCTOR = YAML(typ="safe", pure=True).constructor
_KNOWN_TAGS = "tag:yaml.org,2002:", "tag:yaml.org,2002:python"
"""Prefixes of tags: of the tags that YAML gives to plain values, and of tags that would build objects."""


class LinedMapping(dict[str, Any]):
    """A mapping that knows its place in the file: ``line``, and in ``lines`` the line of each key, from 1."""

    def __init__(self, line: int) -> None:
        super().__init__()
        self.line = line
        self.lines: dict[str, int] = {}


def at_least(minimum: int, *, at_most: int | None = None) -> Callable[[str], int]:
    """A type for ``argparse``: whole numbers from ``minimum`` to ``at_most`` (None for no limit)."""

    def whole_number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {minimum}")
        if at_most is not None and value > at_most:
            raise argparse.ArgumentTypeError(f"{text!r} is more than {at_most}")
        return value

    return whole_number


def matching(pattern: str, example: str) -> Callable[[str], str]:
    """A type for ``argparse``: text that matches; the error shows an example."""

    def text(given: str) -> str:
        if not re.fullmatch(pattern, given):
            raise argparse.ArgumentTypeError(f"{given!r} is not valid; write for example {example}")
        return given

    return text


def several[Item](item: Callable[[str], Item]) -> Callable[[str], list[Item]]:
    """A type for ``argparse``: values of the type ``item``, separated by commas."""
    return lambda text: [item(word) for word in text.split(",")]


def adder(parser: argparse._ActionsContainer) -> Callable[..., None]:
    """A function ``add(flag, metavar, text, **options)`` that declares an argument (help: with default).

    ``metavar`` is None for a flag without a value.
    """

    def add(flag: str, metavar: str | None, text: str, **options: Any) -> None:
        text += " (default: %(default)s)" * (options.get("default") not in (None, []))
        if metavar is not None:
            options["metavar"] = metavar
        parser.add_argument(flag, help=text, **options)

    return add


def parse_file[Content](
    path: Path, parse: Callable[[str], Content], *, what: str, rule: str, remedy: str
) -> Content:
    """Read a file and return ``parse(text)``.

    Raises :class:`BadInput` if it cannot be read, or, with ``rule``, if ``parse`` fails. ``what`` names the
    expected content, such as ``trace``; ``remedy`` is a sentence.
    """
    try:
        if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return parse(path.read_text(encoding="utf-8"))
    except BadInput:
        raise
    except OSError as error:
        raise BadInput(what, path, rule=f"cannot be read ({error.strerror})", remedy=remedy) from error
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, YAMLError) as error:
        raise BadInput(what, path, rule=rule, remedy=remedy) from error


def refuse(path: Path | str, line: int, key: str, rule: str, remedy: str) -> NoReturn:
    """Raise :class:`BadInput` with the place in the file."""
    raise BadInput(f"{path}:{line}:", key, rule=rule, remedy=remedy)


def load(path: Path, *, what: str, remedy: str, scalars_as_text: bool = False) -> LinedMapping:
    """Read a YAML 1.2 file whose top is a mapping; ``what`` and ``remedy`` are as in :func:`parse_file`.

    With ``scalars_as_text`` numbers stay text; true, false and null are always converted. Raises
    :class:`BadInput` if it cannot be read, is not YAML, has a tag that would build an object, or is not a
    mapping.
    """

    def parse(text: str) -> Any:
        try:
            return _parse(text, as_text=scalars_as_text)
        except MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            refuse(path, line, "YAML", str(error.problem), remedy)

    top = parse_file(path, parse, what=what, rule="cannot be read as YAML", remedy=remedy)
    if not isinstance(top, LinedMapping):
        refuse(path, 1, "top", "does not hold keys with values", remedy)
    return top


def value_of(text: str) -> Any:
    """A word as the value of a YAML key; ``ValueError`` if it is not YAML, or a number that is too long."""
    try:
        return _parse(text, as_text=False)
    except (YAMLError, RecursionError) as error:
        raise ValueError(text) from error


def _parse(text: str, *, as_text: bool) -> Any:
    node = YAML(typ="safe", pure=True).compose(text)
    return None if node is None else _value(node, as_text, set())


def _value(node: Node, as_text: bool, collections: set[int]) -> Any:
    """The value of a node; ``collections`` are the lists and mappings that were already read."""
    (known, objects), tag = _KNOWN_TAGS, str(node.tag)
    if not tag.startswith(known) or tag.startswith(objects):
        _fail(node, f"the tag {tag.replace(known, '!!')} is not supported; write the value without it")
    if isinstance(node, ScalarNode):
        return _scalar(node, as_text)
    if id(node) in collections:
        # A few lines of such aliases can expand to 10**9 words.
        _fail(node, f"the alias *{node.anchor} repeats a list or a section; write it out")
    collections.add(id(node))
    if not isinstance(node, MappingNode):
        return [_value(item, as_text, collections) for item in node.value]
    mapping = LinedMapping(node.start_mark.line + 1)
    for key_node, value_node in node.value:
        key = _scalar(key_node, as_text) if isinstance(key_node, ScalarNode) else None
        if not isinstance(key, str):
            _fail(key_node, f"the key {key!r} is not text")
        if key in mapping:
            _fail(key_node, f"the key {key!r} comes twice")
        mapping.lines[key] = key_node.start_mark.line + 1
        mapping[key] = _value(value_node, as_text, collections)
    return mapping


def _scalar(node: ScalarNode, as_text: bool) -> str | bool | int | float | None:
    kind, text = str(node.tag).rpartition(":")[2], node.value
    if kind == "null":
        return None
    if kind == "bool":
        return bool(text.lower() == "true")
    if as_text or kind not in ("int", "float"):
        return str(text)
    number: int | float = _CONSTRUCTOR.construct_object(node)
    return number


def _fail(node: Node, problem: str) -> NoReturn:
    raise MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def configs_folder() -> Path:
    """The folder ``configs``: setup.py copies it into the wheel; in a checkout it is next to the package."""
    installed = _PACKAGE / "configs"
    return installed if installed.is_dir() else _PACKAGE.parent / "configs"


def shown(path: Path) -> str:
    """A path as shown in messages: for a built-in file the part from ``configs`` on."""
    folder = configs_folder()
    return f"configs/{path.relative_to(folder).as_posix()}" if path.is_relative_to(folder) else str(path)


def config_names(*folders: str) -> dict[str, Path]:
    """The files in these folders of ``configs``, by name without suffix."""
    files = [path for folder in folders for path in (configs_folder() / folder).glob("*.yaml")]
    return {path.stem: path for path in sorted(files)}


def find_config(text: str, *, folders: Sequence[str], flag: str, what: str) -> Path:
    """Find the file that a user names: a path, or the name of a file in these folders of ``configs``.

    Raises :class:`BadInput` if there is none; ``flag`` is the flag with the name, ``what`` the kind of file.
    """
    if Path(text).is_file():
        return Path(text)
    known = config_names(*folders)
    if text in known:
        return known[text]
    guess = did_you_mean(Path(text).stem, known)
    raise BadInput(
        flag,
        text or "(empty)",
        rule=f"is neither a file nor a built-in {what}",
        remedy=f"{guess} Give a YAML file, or one of {', '.join(sorted(known))}.".lstrip(),
    )
