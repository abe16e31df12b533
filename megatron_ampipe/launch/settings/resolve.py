"""Turns files and a command line into one list of settings: later files win over earlier ones, and the
command line wins over all files. Called by :mod:`megatron_ampipe.launch.pretrain` and ``ampipe config``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_ampipe.errors import BadInput
from megatron_ampipe.files.shipped import find_config
from megatron_ampipe.launch.settings.entries import Entry, read_entries
from megatron_ampipe.launch.settings.validate import ParserFlags

CONFIG_FLAG = "--ampipe-config"
COMMAND_LINE = "command line"
CONFIG_FOLDERS = ("models", "clusters", "runs")
"""Of ``configs``; no file name is in two of them."""

Value = str | bool | None | tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagValue:
    """One flag and what it is set to.

    Attributes:
        flag: Megatron's name of it, without ``no-`` if it has both.
        value: True or False for a switch, a tuple for a flag of several values, None if a file sets it back
            to Megatron's default.
        words: Its words on a command line; none for a switch that is off.
        source: ``FILE:LINE``, or ``command line``.
        instead_of: The sources of earlier settings that it replaces, the latest first.
    """

    flag: str
    value: Value
    words: tuple[str, ...]
    source: str
    instead_of: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A checked configuration.

    Attributes:
        settings: Those of the files in the order of their first appearance, then those of the command line.
        words: The command line that Megatron will parse.
        unknown: Those of its words that are not flags of the parser; it will refuse them, unless a training
            script adds its own flags.
    """

    settings: tuple[FlagValue, ...]
    words: tuple[str, ...]
    unknown: tuple[str, ...]

    def value(self, flag: str) -> Value:
        """What a flag is set to; None if it is not set."""
        return next((setting.value for setting in self.settings if setting.flag == flag), None)

    def located(self, error: BadInput) -> BadInput:
        """The same error with file and line, if a file sets the flag that it is about."""
        sources = {setting.flag: setting.source for setting in self.settings}
        source = sources.get(error.name, COMMAND_LINE)
        if source == COMMAND_LINE:
            return error
        return BadInput(f"{source}: {error.name}", error.value, rule=error.rule, remedy=error.remedy)


def names_files(words: Sequence[str]) -> bool:
    """Whether a command line has ``--ampipe-config``."""
    return any(word.partition("=")[0] == CONFIG_FLAG for word in words)


def resolve(words: Sequence[str], parser: argparse.ArgumentParser) -> Resolved:
    """Read the files that a command line names, and put their settings before the others.

    Args:
        words: The command line without the program name.
        parser: The one that will parse the result. Files are checked against it here; it checks the command
            line itself, later.

    Raises:
        BadInput: a file is missing, or a key or value in it is wrong.
    """
    flags = ParserFlags(parser, config_flag=CONFIG_FLAG)
    groups = list(_groups(words))
    own = [word for group in groups if _flag(group) != CONFIG_FLAG for word in group]
    found: dict[str, FlagValue] = {}
    for group in groups:
        if _flag(group) == CONFIG_FLAG:
            for name in _file_names(group):
                path = find_config(name, folders=CONFIG_FOLDERS, flag=CONFIG_FLAG, what="configuration")
                for dest, setting in _from_file(path, flags).items():
                    _put(found, dest, setting)
    from_files = list(found.values())
    unknown: list[str] = []
    for group in groups:
        action = flags.setting(_flag(group))
        if action is not None:
            _put(found, action.dest, _from_command_line(group, action))
        elif _flag(group) != CONFIG_FLAG:
            unknown.extend(group)
    settings = tuple(found.values())
    kept = [word for setting in from_files if setting in settings for word in setting.words]
    return Resolved(settings=settings, words=(*kept, *own), unknown=tuple(unknown))


def _put(found: dict[str, FlagValue], dest: str, setting: FlagValue) -> None:
    """Replace an earlier setting of the same flag, under any of its spellings."""
    earlier = found.get(dest)
    if earlier is not None:
        places = (earlier.source, *earlier.instead_of)
        setting = replace(
            setting, instead_of=places if earlier.source != setting.source else earlier.instead_of
        )
    found[dest] = setting


def _from_file(path: Path, flags: ParserFlags) -> dict[str, FlagValue]:
    """The settings of one file, by the names under which the parser stores them."""
    settings: dict[str, FlagValue] = {}
    keys: dict[str, Entry] = {}
    for entry in read_entries(path):
        flag = flags.flag_of(entry)
        dest = flags.by_flag[flag].dest
        if dest in keys:
            raise entry.refuse(
                f"sets the same as {keys[dest].key} at {keys[dest].place}", "Keep one of the two."
            )
        keys[dest] = entry
        value = tuple(entry.value) if isinstance(entry.value, list) else entry.value
        settings[dest] = FlagValue(
            flag=flag, value=value, words=flags.words_of(entry, flag), source=entry.place
        )
    return settings


def _from_command_line(group: Sequence[str], action: argparse.Action) -> FlagValue:
    flag, separator, attached = group[0].partition("=")
    values = (attached, *group[1:]) if separator else tuple(group[1:])
    value: Value
    if isinstance(action, argparse.BooleanOptionalAction):
        flag = next(option for option in action.option_strings if not option.startswith("--no-"))
        value = not group[0].startswith("--no-")
    elif action.nargs == 0 or action.type is bool:
        value = True
    elif action.nargs is None:
        value = values[0] if values else None
    else:
        value = values
    return FlagValue(flag=flag, value=value, words=tuple(group), source=COMMAND_LINE)


def _groups(words: Sequence[str]) -> Iterator[list[str]]:
    """Each flag with its values: the words up to the next flag."""
    group: list[str] = []
    for word in words:
        if word.startswith("--") and group:
            yield group
            group = []
        group.append(word)
    if group:
        yield group


def _flag(group: Sequence[str]) -> str:
    return group[0].partition("=")[0]


def _file_names(group: Sequence[str]) -> list[str]:
    _, separator, attached = group[0].partition("=")
    names = [attached, *group[1:]] if separator else list(group[1:])
    if not names:
        raise BadInput(
            CONFIG_FLAG,
            "(no file)",
            rule="takes at least one file",
            remedy=f"Name one, or one that comes with AMPipe: {CONFIG_FLAG} tiny quickstart.",
        )
    return names
