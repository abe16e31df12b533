"""YAML, read safely, with the line of every key, so that an error can say where.

Every YAML file that a user hands over is read here: grids, models, clusters, runs, plans.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from megatron_ampipe import inputs
from megatron_ampipe.errors import BadInput

_MOST_DIGITS = 30


class LinedMapping(dict[str, Any]):
    """A mapping that knows where it stood.

    Args:
        line: Of its first key, from 1.
    """

    def __init__(self, line: int) -> None:
        super().__init__()
        self.line = line
        self.lines: dict[str, int] = {}


class _Loader(yaml.SafeLoader):
    """Builds :class:`LinedMapping`; refuses keys that are no text or come twice, and repeated lists."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """A node; of aliases only those of single values: a few lines of others stand for 10**9 words."""
        # What pyyaml parses events with has no types.
        parser: Any = self
        alias = parser.peek_event() if parser.check_event(yaml.AliasEvent) else None
        node: yaml.Node | None = super().compose_node(parent, index)
        if alias is not None and not isinstance(node, yaml.ScalarNode):
            problem = f"the alias *{alias.anchor} repeats a list or a section; write it out"
            raise yaml.composer.ComposerError(None, None, problem, alias.start_mark)
        return node


class _TextLoader(_Loader):
    """Leaves numbers and dates as the text that the user wrote; only true, false and null are values.

    What reads the text then decides what it is. YAML 1.1 would take ``1e-4`` for text, ``010`` for 8,
    ``12:30`` for 750 and ``no`` for false.
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
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is no text", mark)
        if key in result:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} comes twice", mark)
        result.lines[key] = mark.line + 1
        result[key] = loader.construct_object(value_node, deep=True)
    return result


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _whole_number(loader: _Loader, node: yaml.ScalarNode) -> int:
    """As YAML reads it. A longer one is no size of anything, and can become no other type of number."""
    if len(node.value) > _MOST_DIGITS:
        problem = f"a number of {len(node.value)} digits is no size of anything"
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
        ValueError: it is no YAML, or a number that is too long.
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
        scalars_as_text: Numbers and dates stay the text that stands in the file.

    Raises:
        BadInput: it cannot be read, is no YAML, asks for a type that plain data does not need, or is
            something other than a mapping.
    """
    try:
        # A loader of ours over the safe one: tags that build objects are refused.
        loader = _TextLoader if scalars_as_text else _Loader
        found = yaml.load(inputs.read_text(path), Loader=loader)
    except OSError as error:
        raise BadInput(what, path, rule=f"cannot be read ({error.strerror})", remedy=remedy) from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise BadInput(f"{path}:{line}:", "YAML", rule=f"{error.problem}", remedy=remedy) from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise BadInput(what, path, rule="is not YAML of ours", remedy=remedy) from error
    if not isinstance(found, LinedMapping):
        raise BadInput(f"{path}:1:", "top", rule="does not hold keys with values", remedy=remedy)
    return found
