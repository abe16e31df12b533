"""Reads YAML safely, with the line of each key, so that an error can name it.

Each YAML file of a user is loaded here: grids, models, clusters, runs, plans, sites. What its values must be,
:mod:`.records` checks for AMPipe's formats, and ``launch/settings`` for Megatron's flags.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from megatron_ampipe.errors import BadInput
from megatron_ampipe.files import inputs

_MOST_DIGITS = 30


class LinedMapping(dict[str, Any]):
    """A mapping that knows its place in the file: ``line``, and in ``lines`` the line of each key.

    Args:
        line: Of its first key, from 1.
    """

    def __init__(self, line: int) -> None:
        super().__init__()
        self.line = line
        self.lines: dict[str, int] = {}


class _Loader(yaml.SafeLoader):
    """Builds :class:`LinedMapping`; refuses keys that are not text or come twice, and repeated lists."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """A node. An alias must be of a single value: a few lines of others can expand to 10**9 words."""
        # PyYAML declares no types for its parser.
        parser: Any = self
        alias = parser.peek_event() if parser.check_event(yaml.AliasEvent) else None
        node: yaml.Node | None = super().compose_node(parent, index)
        if alias is not None and not isinstance(node, yaml.ScalarNode):
            problem = f"the alias *{alias.anchor} repeats a list or a section; write it out"
            raise yaml.composer.ComposerError(None, None, problem, alias.start_mark)
        return node


class _TextLoader(_Loader):
    """Leaves numbers and dates as the text that the user wrote; only true, false and null are converted.

    The caller decides what the text means. YAML 1.1 would take ``1e-4`` for text, ``010`` for 8, ``12:30``
    for 750 and ``no`` for false.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


_TextLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_TextLoader.add_implicit_resolver(
    "tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL)$"), list("~nN")
)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> LinedMapping:
    result = LinedMapping(node.start_mark.line + 1)
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        mark = key_node.start_mark
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is not text", mark)
        if key in result:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} comes twice", mark)
        result.lines[key] = mark.line + 1
        result[key] = loader.construct_object(value_node, deep=True)
    return result


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _whole_number(loader: _Loader, node: yaml.ScalarNode) -> int:
    """A whole number as YAML reads it. No size has more digits, and a longer one could not become a float."""
    if len(node.value) > _MOST_DIGITS:
        problem = f"a number of {len(node.value)} digits is too long, the limit is {_MOST_DIGITS}"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
    return int(loader.construct_yaml_int(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)


def number_of(value: object) -> float | None:
    """A number as a float, None for anything else. YAML 1.1 takes ``1e-3``, without a point, for text."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def value_of(text: str) -> Any:
    """What a word means as the value of a key.

    Raises:
        ValueError: it is not YAML, or a number that is too long.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(text) from error


def load(path: Path, *, what: str, remedy: str, scalars_as_text: bool = False) -> LinedMapping:
    """Read a file whose top is a mapping.

    Args:
        path: The file.
        what: What it should hold, in a word, for the errors: ``grid``, ``cluster``.
        remedy: What to do about a file that cannot be read, as a sentence.
        scalars_as_text: Whether numbers and dates stay text, as they are in the file.

    Raises:
        BadInput: it cannot be read, is not YAML, has a tag that would build an object, or is not a mapping.
    """
    try:
        # Both loaders inherit from the safe one, which refuses tags that build objects.
        loader = _TextLoader if scalars_as_text else _Loader
        found = yaml.load(inputs.read_text(path), Loader=loader)
    except OSError as error:
        raise BadInput(what, path, rule=f"cannot be read ({error.strerror})", remedy=remedy) from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise BadInput(f"{path}:{line}:", "YAML", rule=f"{error.problem}", remedy=remedy) from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise BadInput(what, path, rule="cannot be read as YAML", remedy=remedy) from error
    if not isinstance(found, LinedMapping):
        raise BadInput(f"{path}:1:", "top", rule="does not hold keys with values", remedy=remedy)
    return found
