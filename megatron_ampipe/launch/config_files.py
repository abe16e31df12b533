"""Settings from YAML files and the command line: read, checked against a parser, resolved, written.

``--ampipe-config FILE ...`` is replaced by words of a command line that mean the same as the files, before
Megatron parses it: later files win over earlier ones, and the command line wins over all. A file holds flags
at its top and AMPipe's in a section ``ampipe:``. A cluster file, which is the planner's, may have a section
``flags:`` of the same form; a launch reads that section only.

The parser is Megatron's with AMPipe's flags added, and no flag of Megatron is known here by name. Where
Megatron is not installed, ``ampipe sbatch`` passes a parser of AMPipe's flags only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ampipe import __version__, compat
from megatron_ampipe.errors import BadInput, did_you_mean
from megatron_ampipe.files import outputs
from megatron_ampipe.files.inputs import LinedMapping, load
from megatron_ampipe.files.records import keys_of
from megatron_ampipe.files.shipped import find_config, shown
from megatron_ampipe.launch.failures import NO_VALUE, raise_parser_errors
from megatron_ampipe.plan.cluster import Cluster

CONFIG_FLAG = "--ampipe-config"
CONFIG_FOLDERS = ("models", "clusters", "runs")
"""Of ``configs``; no file name is in two of them."""
OWN_SECTION = "ampipe"
_FLAGS_SECTION = "flags"
_COMMAND_LINE = "command line"
_LOG_FLAGS = ("--tensorboard-dir", "--save", "--ampipe-trace-dir")
"""The first of these that is set names the folder for the record of a run."""
_PLAIN = re.compile(r"(?!(?i:true|false|null)$)[\w./+][\w./+@%=-]*|-?[0-9.]+(e-?[0-9]+)?")
"""Text that YAML needs no quotes for. Numbers are read as text, so they need none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One key of a file.

    Attributes:
        place: ``FILE:LINE``.
        key: As it is written there.
        section: ``ampipe`` for a key in that section, else empty.
        value: Text, True, False, None, or a list or mapping of these. Numbers are text.
    """

    place: str
    key: str
    section: str
    value: Any

    def refuse(self, rule: str, remedy: str, *, value: object = None) -> BadInput:
        """The error for this entry; ``value`` is shown if it is given."""
        name = ".".join(filter(None, [self.section, self.key]))
        return BadInput(
            f"{self.place}:", name if value is None else f"{name}: {value}", rule=rule, remedy=remedy
        )


def read_entries(path: Path) -> list[Entry]:
    """The entries of a file, in its order. Nothing is checked against a parser.

    Raises:
        BadInput: it cannot be read, is not YAML, or its sections are not mappings.
    """
    remedy = "Write 'key: value' on each line, indent with spaces, and see configs/models/tiny.yaml."
    top = load(path, what="configuration", remedy=remedy, scalars_as_text=True)

    def entries(mapping: LinedMapping, section: str = "") -> Iterator[Entry]:
        for key, value in mapping.items():
            place = f"{shown(path)}:{mapping.lines[key]}"
            yield Entry(place=place, key=key, section=section, value=value)

    if _FLAGS_SECTION in top:
        for entry in entries(top):
            if entry.key not in keys_of(Cluster):
                rule = f"stands outside the section '{_FLAGS_SECTION}:', and would not be read"
                raise entry.refuse(rule, f"Move it into '{_FLAGS_SECTION}:'.")
            if entry.key == _FLAGS_SECTION and not isinstance(entry.value, LinedMapping):
                raise entry.refuse("is a section for flags", "Write one 'flag: value' on each line below it.")
        top = top[_FLAGS_SECTION]
    found: list[Entry] = []
    for entry in entries(top):
        if entry.key != OWN_SECTION:
            found.append(entry)
        elif isinstance(entry.value, LinedMapping):
            found += entries(entry.value, OWN_SECTION)
        else:
            raise entry.refuse("is a section for settings of AMPipe", "Write 'degree: 4' below it, indented.")
    return found


class ParserFlags:
    """The flags of a parser, for entries of files."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.by_flag = {flag: action for action in parser._actions for flag in action.option_strings}
        names = [flag.removeprefix("--") for flag in self.by_flag if flag.startswith("--")]
        own = f"{OWN_SECTION}-"
        self._own = [name.removeprefix(own) for name in names if name.startswith(own)]
        self._others = [name for name in names if not name.startswith(own)]

    def setting(self, flag: str) -> argparse.Action | None:
        """The action of a flag that sets something; None for other flags, and for an unknown word."""
        action = self.by_flag.get(flag)
        other = isinstance(action, argparse._HelpAction | argparse._VersionAction)
        return None if other or flag == CONFIG_FLAG else action

    def flag_of(self, entry: Entry) -> str:
        """The flag that a key means.

        Raises:
            BadInput: there is none, or a file cannot hold it.
        """
        known, others = (self._own, self._others) if entry.section else (self._others, self._own)
        if entry.key not in known:
            plain = entry.key.strip("-").replace("_", "-").removeprefix(f"{OWN_SECTION}-")
            if plain in others and plain not in known:
                place = f"outside '{OWN_SECTION}:', not" if entry.section else f"below '{OWN_SECTION}:',"
                owner = "flag of Megatron" if entry.section else "setting of AMPipe"
                raise entry.refuse(f"is a {owner}", f"Write '{plain}: ...' {place} indented.")
            longer = [name for name in known if plain in name][:1]
            near = did_you_mean(plain, [*longer, *known], most=3, cutoff=0.5)
            rule = f"there is no such {'setting of AMPipe' if entry.section else 'flag'}"
            raise entry.refuse(rule, near or "Run with --help for the list.")
        flag = f"--{OWN_SECTION}-{entry.key}" if entry.section else f"--{entry.key}"
        action = self.setting(flag)
        if action is None:
            raise entry.refuse("cannot be set in a file", f"Give {flag} on the command line.")
        if isinstance(action, argparse.BooleanOptionalAction) and entry.key.startswith("no-"):
            raise entry.refuse("takes false in place of 'no-'", f"Write '{entry.key[3:]}: false'.")
        return flag

    def words_of(self, entry: Entry, flag: str) -> tuple[str, ...]:
        """The words of a command line that mean the same; none for null and for a switch that is off.

        Raises:
            BadInput: the flag does not take the value.
        """
        action, value = self.by_flag[flag], entry.value
        if value is None:
            return ()
        # argparse turns any text into True where the type is bool, "false" as well.
        is_pair = isinstance(action, argparse.BooleanOptionalAction)
        if is_pair or action.nargs == 0 or action.type is bool:
            if not isinstance(value, bool):
                rule = "is a switch, and takes true or false without quotes"
                raise entry.refuse(rule, f"Write '{entry.key}: true'.", value=repr(value))
            on = (flag, "true") if action.type is bool else (flag,)
            return on if value else (f"--no-{flag[2:]}",) if is_pair else ()
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(word, str) and word for word in values):
            rule = "takes only numbers and text, and words such as true in quotes"
            raise entry.refuse(rule, "Give one, or leave the key out.", value=value or "(empty)")
        if isinstance(value, list) and action.nargs is None:
            text = f"[{','.join(values)}]"
            remedy = f"Write one value; a pattern of layers as '{entry.key}: \"{text}\"'."
            raise entry.refuse("takes one value, and this is a list", remedy, value=text)
        # A word that begins with a dash would be taken for a flag.
        is_attached = len(values) == 1 and values[0].startswith("-")
        words = (f"{flag}={values[0]}",) if is_attached else (flag, *values)
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser._add_action(action)
        raise_parser_errors(parser)
        try:
            parser.parse_args(words)
        except BadInput as error:
            given = None if error.value == NO_VALUE else error.value
            raise entry.refuse(error.rule, error.remedy, value=given) from error
        return words


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagValue:
    """One flag and what it is set to.

    Attributes:
        flag: Megatron's name of it, without ``no-`` if it has both.
        value: True or False for a switch, a list for a flag of several values, None if a file sets it back to
            Megatron's default.
        words: Its words on a command line; none for a switch that is off.
        source: ``FILE:LINE``, or ``command line``.
        instead_of: The sources of earlier settings that it replaces, the latest first.
    """

    flag: str
    value: Any
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

    def located(self, error: BadInput) -> BadInput:
        """The same error with file and line, if a file sets the flag that it is about."""
        source = {setting.flag: setting.source for setting in self.settings}.get(error.name, _COMMAND_LINE)
        if source == _COMMAND_LINE:
            return error
        return BadInput(f"{source}: {error.name}", error.value, rule=error.rule, remedy=error.remedy)


def names_files(words: Sequence[str]) -> bool:
    """Whether a command line has ``--ampipe-config``."""
    return any(word.partition("=")[0] == CONFIG_FLAG for word in words)


def refuse_unread(args: argparse.Namespace) -> None:
    """Refuse parsed arguments that name files which were not read, or were read by Megatron alone.

    Raises:
        BadInput: ``--ampipe-config`` or ``--yaml-cfg`` is among them.
    """
    # Megatron puts what such a file holds in place of what was parsed, before or after this is called.
    if not hasattr(args, "ampipe_degree") or getattr(args, "yaml_cfg", None) is not None:
        rule = "replaces every flag, those of AMPipe included"
        remedy = f"Give the settings as flags, or in a file of {CONFIG_FLAG}."
        raise BadInput("--yaml-cfg", getattr(args, "yaml_cfg", ""), rule=rule, remedy=remedy)
    if args.ampipe_config is not None:
        rule = "this launch parses flags without reading files first"
        remedy = f"Give the flags that 'ampipe config --format command {CONFIG_FLAG} ...' prints."
        raise BadInput(CONFIG_FLAG, " ".join(args.ampipe_config), rule=rule, remedy=remedy)


def resolve(words: Sequence[str], parser: argparse.ArgumentParser) -> Resolved:
    """Read the files that a command line names, and put their settings before the others.

    Args:
        words: The command line without the program name.
        parser: The one that will parse the result. Files are checked against it here; it checks the command
            line itself, later.

    Raises:
        BadInput: a file is missing, or a key or value in it is wrong.
    """
    flags = ParserFlags(parser)
    settings: dict[str, FlagValue] = {}

    def put(dest: str, setting: FlagValue) -> None:
        """Replace an earlier setting of the same flag, under any of its spellings."""
        if dest in settings:
            earlier = settings[dest]
            same = earlier.source == setting.source
            places = earlier.instead_of if same else (earlier.source, *earlier.instead_of)
            setting = replace(setting, instead_of=places)
        settings[dest] = setting

    groups = [(group[0].partition("=")[0], group) for group in _groups(words)]
    for flag, group in groups:
        for name in _values(group) if flag == CONFIG_FLAG else ():
            path = find_config(name, folders=CONFIG_FOLDERS, flag=CONFIG_FLAG, what="configuration")
            for dest, setting in _from_file(path, flags).items():
                put(dest, setting)
    own = [group for flag, group in groups if flag != CONFIG_FLAG]
    unknown: list[str] = []
    for flag, group in groups:
        action = flags.setting(flag)
        if action is not None:
            put(action.dest, _from_command_line(group, action))
        elif flag != CONFIG_FLAG:
            unknown.extend(group)
    kept = [setting.words for setting in settings.values() if setting.source != _COMMAND_LINE]
    line = tuple(word for group in (*kept, *own) for word in group)
    return Resolved(settings=tuple(settings.values()), words=line, unknown=tuple(unknown))


def _from_file(path: Path, flags: ParserFlags) -> dict[str, FlagValue]:
    """The settings of one file, by the names under which the parser stores them."""
    settings: dict[str, FlagValue] = {}
    for entry in read_entries(path):
        flag = flags.flag_of(entry)
        dest = flags.by_flag[flag].dest
        if dest in settings:
            first = settings[dest]
            raise entry.refuse(f"sets the same as {first.flag} at {first.source}", "Keep one of the two.")
        words = flags.words_of(entry, flag)
        settings[dest] = FlagValue(flag=flag, value=entry.value, words=words, source=entry.place)
    return settings


def _from_command_line(group: Sequence[str], action: argparse.Action) -> FlagValue:
    flag, values = group[0].partition("=")[0], _values(group)
    value: Any = values
    if isinstance(action, argparse.BooleanOptionalAction):
        flag = next(option for option in action.option_strings if not option.startswith("--no-"))
        value = not group[0].startswith("--no-")
    elif action.nargs == 0 or action.type is bool:
        value = True
    elif action.nargs is None:
        value = values[0] if values else None
    return FlagValue(flag=flag, value=value, words=tuple(group), source=_COMMAND_LINE)


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


def _values(group: Sequence[str]) -> list[str]:
    flag, separator, attached = group[0].partition("=")
    values = [attached, *group[1:]] if separator else list(group[1:])
    if flag == CONFIG_FLAG and not values:
        remedy = f"Name one, or one that comes with AMPipe: {CONFIG_FLAG} tiny quickstart."
        raise BadInput(CONFIG_FLAG, "(no file)", rule="takes at least one file", remedy=remedy)
    return values


def as_yaml(resolved: Resolved, *, notes: Sequence[str] = ()) -> str:
    """YAML with one setting on each line, its source as a comment, and ``notes`` as comments at the top.

    ``--ampipe-config`` turns it back into the same command line.
    """
    lines = [f"# {note}".rstrip() for note in notes]
    if resolved.unknown:
        words = shlex.join(resolved.unknown).replace("\n", " ")
        lines.append(f"# Not below, because neither Megatron nor AMPipe has such flags: {words}")
    own = []
    for setting in resolved.settings:
        before = f", not {', '.join(setting.instead_of)}" if setting.instead_of else ""
        line = f"{_in_yaml(setting.value)}  # {setting.source}{before}"
        key = setting.flag.removeprefix("--")
        if key.startswith(f"{OWN_SECTION}-"):
            own.append(f"  {key.removeprefix(f'{OWN_SECTION}-')}: {line}")
        else:
            lines.append(f"{key}: {line}")
    return "\n".join([*lines, *([f"{OWN_SECTION}:", *own] if own else [])]) + "\n"


def _in_yaml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_in_yaml, value))}]"
    if isinstance(value, str):
        # A text of JSON is one of YAML.
        return value if _PLAIN.fullmatch(value) else json.dumps(value, ensure_ascii=False)
    return {None: "null", True: "true", False: "false"}[value]


def as_command(resolved: Resolved) -> str:
    """A command line for a shell, with one flag on each line."""
    return " \\\n".join(map(shlex.join, _groups(resolved.words))) + "\n"


def write_beside_logs(resolved: Resolved, *, adjustments: Sequence[str], script: str | None) -> Path | None:
    """Write ``resolved.yaml`` into the folder where the run writes: a file that repeats this run.

    Flags that a script adds to Megatron's are no settings of a file; they stand there as a comment.

    Args:
        resolved: The command line as the user gave it.
        adjustments: What was added to it, as text. It stands there as comments, so that the file also fits a
            machine that needs no adjustment.
        script: What was run, where that is not AMPipe's entry.

    Returns:
        The file; None if the run has no such folder.

    Raises:
        BadInput: the folder cannot be made or written to.
        RunFailed: writing failed.
    """
    folders = {setting.flag: str(setting.value or "") for setting in resolved.settings}
    # An object store is not a folder.
    flag = next((flag for flag in _LOG_FLAGS if folders.get(flag) and "://" not in folders[flag]), None)
    if flag is None:
        return None
    versions = ", ".join(f"{name} {compat.found_version(name)}" for name in compat.MINIMUM_VERSIONS)
    run = "A run" if script is None else f"A run of {script}"
    notes = [
        f"{run} on {os.environ.get('WORLD_SIZE', '1')} ranks with megatron-ampipe {__version__}, {versions}. "
        f"Given to {CONFIG_FLAG}, this file repeats it.",
        *(f"Added: {adjustment}" for adjustment in adjustments),
    ]
    path = Path(folders[flag]) / "resolved.yaml"
    outputs.check_folder(path.parent.absolute(), flag=flag, value=path.parent)
    outputs.write_text(path, as_yaml(resolved, notes=notes))
    return path
