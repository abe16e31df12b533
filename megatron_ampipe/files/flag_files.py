"""Files that have Megatron's flags in NVIDIA's forms: recipes in YAML, and job scripts.

A recipe has a section ``ARGS`` (``MODEL_ARGS`` in Megatron's tests) with flags as keys, dashes or underscores
between words, and a section ``ENV_VARS``. A value is put on the command line as it would be by a shell. All
other files are read as scripts (:mod:`.job_script`). What is not read is said with its line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from megatron_ampipe.errors import BadInput, did_you_mean
from megatron_ampipe.files.inputs import LinedMapping, load, parse_file, refuse
from megatron_ampipe.files.job_script import read_script

SECTIONS = ("ARGS", "MODEL_ARGS")
_VARIABLES = "ENV_VARS"
_YAML_SUFFIXES = (".yaml", ".yml")
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)")
_GPUS_IN_NAME = re.compile(r"(?<![A-Za-z0-9])(\d+)GPU")
_REMEDY = "Give a recipe with a section ARGS, or a script that starts pretrain_gpt.py with its flags."


class GivenFlag(NamedTuple):
    """A flag of the file with its values, as words of a command line."""

    words: tuple[str, ...]
    place: str
    """``FILE:LINE``."""

    @property
    def flag(self) -> str:
        """The name of the flag."""
        return self.words[0].partition("=")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagFile:
    """The contents of a recipe or a job script.

    Attributes:
        path: The file.
        flags: All flags, in order.
        environment: Variables that the file sets for the training.
        ranks: GPUs of the whole run; None if the file does not say it.
        gpus_per_node: Likewise.
        notes: Sentences that begin with ``FILE:LINE``, about what was not read or is left out.
    """

    path: Path
    flags: tuple[GivenFlag, ...]
    environment: Mapping[str, str]
    ranks: int | None = None
    gpus_per_node: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """A command line of all flags."""
        return tuple(word for flag in self.flags for word in flag.words)

    def without(self, names: Sequence[str], *, flag: str) -> FlagFile:
        """The same file without these flags; raises BadInput for a name that it does not have.

        ``flag`` is the flag of the command with the names.
        """
        known = {given.flag for given in self.flags}
        left_out = {f"--{name.lstrip('-').replace('_', '-')}" for name in names}
        for name in sorted(left_out - known):
            near = did_you_mean(name, known) or f"Look at {self.path}."
            raise BadInput(flag, name, rule="is not among the flags of this file", remedy=near)
        flags = tuple(given for given in self.flags if given.flag not in left_out)
        return replace(self, flags=flags)


def read_flag_file(path: Path) -> FlagFile:
    """Read a recipe or a job script.

    Variables have the values that the file gives them, else those of this process; a flag with another one
    is left out, with a note.

    Raises:
        BadInput: the file cannot be read, or has no flags.
    """
    if path.suffix in _YAML_SUFFIXES:
        file = _read_recipe(path)
    else:
        file = parse_file(
            path, lambda text: _read_script(path, text), what="--recipe", rule="is no text", remedy=_REMEDY
        )
    if not file.flags:
        raise BadInput("--recipe", path, rule="has no flags of Megatron", remedy=_REMEDY)
    return file


def _read_recipe(path: Path) -> FlagFile:
    top = load(path, what="recipe", remedy=_REMEDY, scalars_as_text=True)
    section = next((name for name in SECTIONS if name in top), None)
    if section is None:
        refuse(path, 1, "ARGS", "is missing: a recipe has its flags there", _REMEDY)
    arguments, variables = top[section], top.get(_VARIABLES) or LinedMapping(1)
    for name, part in ((section, arguments), (_VARIABLES, variables)):
        if not isinstance(part, LinedMapping):
            refuse(path, top.lines[name], name, "is a section", "Write one 'key: value' on each line below.")
    environment = {name: _as_text(value) for name, value in variables.items()}
    flags: list[GivenFlag] = []
    notes: list[str] = []
    known = {**os.environ, **environment}
    for key, value in arguments.items():
        place = f"{path}:{arguments.lines[key]}"
        flag = f"--{key.lstrip('-').replace('_', '-')}"
        if isinstance(value, LinedMapping):
            refuse(path, arguments.lines[key], key, "is a section", "Write one value, or a list of values.")
        words = tuple(_words_of(flag, value))
        missing = [name for word in words for name in _unset(word, known)]
        if missing:
            notes.append(f"{place}: {flag} is left out: the variable {missing[0]} is not set")
        elif words:
            expanded = tuple(_VARIABLE.sub(lambda match: _replaced(match, known), word) for word in words)
            flags.append(GivenFlag(expanded, place))
    named = _GPUS_IN_NAME.search(path.name)
    ranks = int(named[1]) if named else None
    return FlagFile(path=path, flags=tuple(flags), environment=environment, ranks=ranks, notes=tuple(notes))


def _as_text(value: object) -> str:
    if value is None:
        return ""
    text = str(value)
    return text.lower() if isinstance(value, bool) else text


def _words_of(flag: str, value: object) -> Iterator[str]:
    """The words of a command line; none for a switch that is off, and for a value that is left open."""
    if value is None or value is False:
        return
    yield flag
    if value is True:
        return
    for item in value if isinstance(value, list) else [value]:
        text = _as_text(item)
        # As in a shell, but expressions such as ([0]*3 + [1]*58) are one word.
        yield from [text] if text.startswith(("(", "[")) else text.split()


def _unset(word: str, known: Mapping[str, str]) -> Iterator[str]:
    """The variables of a word that have no value."""
    for match in _VARIABLE.finditer(word):
        if (match[1] or match[3]) not in known and match[2] is None:
            yield match[1] or match[3]


def _replaced(match: re.Match[str], known: Mapping[str, str]) -> str:
    return known.get(match[1] or match[3], match[2] or "")


def _read_script(path: Path, text: str) -> FlagFile:
    script = read_script(path, text, inherited=os.environ)
    notes = [f"{path}:{line}: {sentence}" for line, sentence in script.notes]
    flags: list[GivenFlag] = []
    for group in _groups(script.words):
        first = group[0]
        place = f"{path}:{first.line}"
        unknown = next((word.unknown for word in group if word.unknown is not None), None)
        if not first.text.startswith("--"):
            notes.append(f"{place}: {first.text} is not read: unexpected argument")
        elif unknown is not None:
            notes.append(f"{place}: {first.text} is left out: the value of {unknown} is not known")
        else:
            flags.append(GivenFlag(tuple(word.text for word in group), place))
    ranks = None
    if script.gpus_per_node is not None:
        ranks = script.gpus_per_node * (script.nodes or 1)
    return FlagFile(
        path=path,
        flags=tuple(flags),
        environment=script.exported,
        ranks=ranks,
        gpus_per_node=script.gpus_per_node,
        notes=tuple(notes),
    )


def _groups[Item](words: Iterable[Item]) -> Iterator[list[Item]]:
    """Each flag with its values."""
    group: list[Item] = []
    for word in words:
        if getattr(word, "text", "").startswith("--") and group:
            yield group
            group = []
        group.append(word)
    if group:
        yield group
