"""YAML, read safely, with the line of every key, so that an error can say where.

Every YAML file that a user hands over is read here: grids, models, clusters, runs, plans.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from megatron_ampipe.errors import BadInput


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
    """Builds :class:`LinedMapping`; refuses keys that are no text or come twice."""


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
        found = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
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
