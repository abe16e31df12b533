"""Reads, merges and writes settings from YAML files and the command line.

Before Megatron parses the command line, ``--ampipe-config FILE ...`` is replaced by the flags that the files
set. Later files override earlier ones, and the command line overrides all. A file has Megatron's flags at the
top level and AMPipe's in a section ``ampipe:``. In a cluster file of the planner, a launch reads the same
form in a section ``flags:``. No flag of Megatron is known here by name.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from megatron_ampipe import __version__, compat
from megatron_ampipe.block.settings import SETTING
from megatron_ampipe.errors import BadInput, did_you_mean
from megatron_ampipe.files import outputs
from megatron_ampipe.files.flag_files import FlagFile, GivenFlag
from megatron_ampipe.files.inputs import LinedMapping, find_config, load, refuse, shown
from megatron_ampipe.files.records import keys_of
from megatron_ampipe.plan.cluster import Cluster

CONFIG_FLAG = "--ampipe-config"
CONFIG_FOLDERS = ("models", "clusters", "runs")
"""Folders in ``configs``. A file name is unique over all of them."""
OWN_SECTION = "ampipe"
_FLAGS_SECTION = "flags"
_COMMAND_LINE = "command line"
_LOG_FLAGS = ("--tensorboard-dir", "--save", "--ampipe-trace-dir")
"""The first of these flags that is set names the folder for ``resolved.yaml``."""
_PLAIN = re.compile(r"(?!(?i:true|false|null)$)[\w./+][\w./+@%=-]*|-?[0-9.]+(e-?[0-9]+)?")
"""Text that needs no quotes in YAML. Numbers are read as text, so they need none."""


class FlagValue(NamedTuple):
    """A flag that is set, and where."""

    words: tuple[str, ...]
    """The flag and its values, as on a command line."""
    value: bool | str | list[str]
    """True for a switch, a list for a flag with several values; numbers are text."""
    source: str
    """``FILE:LINE``, or ``command line``."""

    @property
    def flag(self) -> str:
        """The name on the command line."""
        return self.words[0].partition("=")[0]


class Resolved(NamedTuple):
    """The merged settings of files and a command line."""

    settings: tuple[FlagValue, ...]
    """Settings of files that the command line does not set, then settings of the command line."""
    words: tuple[str, ...]
    """The command line that Megatron will parse."""
    unknown: tuple[str, ...]
    """Words of it that are not flags of the parser: flags of a training script, or errors."""

    @contextlib.contextmanager
    def locating_errors(self) -> Iterator[None]:
        """Add file and line to an error that is raised within, if a file sets the flag that it names."""
        try:
            yield
        except BadInput as error:
            sources = {setting.flag: setting.source for setting in self.settings}
            source = sources.get(error.name, _COMMAND_LINE)
            if source == _COMMAND_LINE:
                raise
            name = f"{source}: {error.name}"
            raise BadInput(name, error.value, rule=error.rule, remedy=error.remedy) from error


def refuse_unread(args: argparse.Namespace) -> None:
    """Refuse parsed arguments with ``--yaml-cfg``, or with ``--ampipe-config`` if its files were not read."""
    # Megatron replaces all parsed arguments by the contents of that file, before or after this is called.
    if not hasattr(args, "ampipe_degree") or getattr(args, "yaml_cfg", None) is not None:
        rule = "replaces every flag, those of AMPipe included"
        remedy = f"Give the settings as flags, or in a file of {CONFIG_FLAG}."
        raise BadInput("--yaml-cfg", getattr(args, "yaml_cfg", ""), rule=rule, remedy=remedy)
    if args.ampipe_config is not None:
        rule = "this launch parses flags without reading files first"
        remedy = f"Give the flags that 'ampipe config --format command {CONFIG_FLAG} ...' prints."
        raise BadInput(CONFIG_FLAG, " ".join(args.ampipe_config), rule=rule, remedy=remedy)


def resolve(
    words: Sequence[str], parser: argparse.ArgumentParser, *, recipe: FlagFile | None = None
) -> Resolved:
    """Read the files that a command line names, and put their settings before its own.

    ``parser`` is the parser that will parse the result, and check the values. The flags of a ``recipe``
    count as those of a file before the others. Raises :class:`BadInput` for a missing file, an unknown key,
    or a value that no flag can have.
    """
    actions = actions_of(parser)
    # By the parser's destination, so that two spellings are the same flag.
    files: dict[str, FlagValue] = {} if recipe is None else _of_recipe(recipe, actions)
    line: dict[str, FlagValue] = {}
    own: list[str] = []
    unknown: list[str] = []
    for group in groups_of(words):
        flag = group[0].partition("=")[0]
        if flag == CONFIG_FLAG:
            for name in values_of(group):
                path = find_config(name, folders=CONFIG_FOLDERS, flag=CONFIG_FLAG, what="configuration")
                for place, key, value in _entries(path):
                    action = _action_of_key(place, key, actions)
                    files.pop(action.dest, None)
                    if given := _words_of(place, f"--{key}", value, action):
                        files[action.dest] = _flag_value(given, action, place)
            continue
        own += group
        if _sets(actions.get(flag)):
            line[actions[flag].dest] = _flag_value(group, actions[flag], _COMMAND_LINE)
        else:
            unknown += group
    if "ampipe_plan" in line:
        # The command line wins: files for several runs name a degree, which would conflict with the plan.
        planned = {f"ampipe_{setting.name}" for setting in SETTING.values() if setting.in_plan}
        files = {dest: setting for dest, setting in files.items() if dest not in planned}
    kept = [setting for dest, setting in files.items() if dest not in line]
    return Resolved(
        settings=(*kept, *line.values()),
        words=(*(word for setting in kept for word in setting.words), *own),
        unknown=tuple(unknown),
    )


def actions_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The flags of a parser, by name."""
    return {flag: action for action in parser._actions for flag in action.option_strings}


def split_recipe(recipe: FlagFile, parser: argparse.ArgumentParser) -> tuple[FlagFile, tuple[GivenFlag, ...]]:
    """The recipe without the flags that the parser does not have, and these flags."""
    actions = actions_of(parser)
    unknown = tuple(given for given in recipe.flags if not _sets(actions.get(given.flag)))
    known = tuple(given for given in recipe.flags if given not in unknown)
    return replace(recipe, flags=known), unknown


def _of_recipe(recipe: FlagFile, actions: dict[str, argparse.Action]) -> dict[str, FlagValue]:
    """The settings of a recipe by the parser's destination; raises BadInput if there are unknown flags."""
    unknown = [given for given in recipe.flags if not _sets(actions.get(given.flag))]
    if unknown:
        names = " ".join(given.flag for given in unknown)
        without = ",".join(given.flag.removeprefix("--") for given in unknown)
        version = compat.found_version("megatron-core")
        rule = f"there are no such flags in Megatron {version}"
        remedy = f"Install the Megatron that the recipe is for, or leave them out: --without {without}"
        raise BadInput(f"{unknown[0].place}:", names, rule=rule, remedy=remedy)
    settings: dict[str, FlagValue] = {}
    for given in recipe.flags:
        action, words = actions[given.flag], given.words
        if action.nargs is None and len(words) > 2:
            # Text with blanks, which a section ARGS has without quotes.
            words = (words[0], " ".join(words[1:]))
        settings[action.dest] = _flag_value(words, action, given.place)
    return settings


def _sets(action: argparse.Action | None) -> bool:
    """Whether an action belongs to a flag that sets a value, unlike ``--help``."""
    return action is not None and not isinstance(action, argparse._HelpAction | argparse._VersionAction)


def _action_of_key(place: str, key: str, actions: dict[str, argparse.Action]) -> argparse.Action:
    flag = f"--{key}"
    if flag not in actions:
        names = [OWN_SECTION, *(name[2:] for name in actions if name.startswith("--"))]
        near = did_you_mean(key, names, cutoff=0.5) or "Leave it out."
        remedy = "Write it below 'ampipe:', indented." if f"{OWN_SECTION}-{key}" in names else near
        raise BadInput(f"{place}:", key, rule="there is no such flag", remedy=remedy)
    if not _sets(actions[flag]) or flag == CONFIG_FLAG:
        remedy = f"Give {flag} on the command line."
        raise BadInput(f"{place}:", key, rule="cannot be set in a file", remedy=remedy)
    return actions[flag]


def _entries(path: Path) -> Iterator[tuple[str, str, object]]:
    """For each entry of a file: ``FILE:LINE``, the name of the flag without dashes, and the value."""
    remedy = "Write 'key: value' on each line, indent with spaces, and see configs/models/tiny.yaml."
    top, file = load(path, what="configuration", remedy=remedy, scalars_as_text=True), shown(path)

    def section(name: str) -> LinedMapping:
        if not isinstance(top[name], LinedMapping):
            remedy = "Write one 'flag: value' on each line below it, indented."
            refuse(file, top.lines[name], name, "is a section", remedy)
        mapping: LinedMapping = top[name]
        return mapping

    if _FLAGS_SECTION in top:
        for key in top.keys() - keys_of(Cluster):
            rule = f"stands outside the section '{_FLAGS_SECTION}:', and would not be read"
            refuse(file, top.lines[key], key, rule, f"Move it into '{_FLAGS_SECTION}:'.")
        top = section(_FLAGS_SECTION)
    for key, value in top.items():
        if key != OWN_SECTION:
            yield f"{file}:{top.lines[key]}", key, value
            continue
        own = section(OWN_SECTION)
        for name, setting in own.items():
            yield f"{file}:{own.lines[name]}", f"{OWN_SECTION}-{name}", setting


def _words_of(place: str, flag: str, value: object, action: argparse.Action) -> tuple[str, ...]:
    """The equivalent words of a command line; none for null and for a switch that is off."""
    if value is None:
        return ()
    # For the type bool, argparse turns any text into True, even "false".
    is_pair = isinstance(action, argparse.BooleanOptionalAction)
    if is_pair or action.nargs == 0 or action.type is bool:
        if not isinstance(value, bool):
            rule = "is a switch, and takes true or false without quotes"
            raise BadInput(f"{place}:", f"{flag[2:]}: {value!r}", rule=rule, remedy="Write true or false.")
        on = (flag, "true") if action.type is bool and not is_pair else (flag,)
        return on if value else (f"--no-{flag[2:]}",) if is_pair else ()
    given: list[object] = value if isinstance(value, list) else [value]
    values = [word for word in given if isinstance(word, str) and word]
    is_several = isinstance(value, list) and action.nargs is None
    if is_several or len(values) < len(given):
        rule = "takes numbers and text; words such as true, and patterns such as [0, 1], in quotes"
        shown_value = f"{flag[2:]}: {value or '(empty)'}"
        raise BadInput(f"{place}:", shown_value, rule=rule, remedy="Give one, or leave the key out.")
    # A word that begins with a dash would be taken for a flag.
    is_attached = len(values) == 1 and values[0].startswith("-")
    return (f"{flag}={values[0]}",) if is_attached else (flag, *values)


def _flag_value(words: Sequence[str], action: argparse.Action, source: str) -> FlagValue:
    values = values_of(words)
    value: bool | str | list[str] = values
    if action.nargs == 0 or action.type is bool:
        value = True
    elif action.nargs is None:
        value = next(iter(values), "")
    return FlagValue(tuple(words), value, source)


def groups_of(words: Sequence[str]) -> Iterator[list[str]]:
    """Group each flag with its values: the words up to the next flag."""
    group: list[str] = []
    for word in words:
        if word.startswith("--") and group:
            yield group
            group = []
        group.append(word)
    if group:
        yield group


def values_of(group: Sequence[str]) -> list[str]:
    """The values of a flag."""
    flag, separator, attached = group[0].partition("=")
    values = [attached, *group[1:]] if separator else list(group[1:])
    if flag == CONFIG_FLAG and not values:
        remedy = f"Name one, or one that comes with AMPipe: {CONFIG_FLAG} tiny quickstart."
        raise BadInput(CONFIG_FLAG, "(no file)", rule="takes at least one file", remedy=remedy)
    return values


def as_yaml(resolved: Resolved, *, notes: Sequence[str] = ()) -> str:
    """YAML with a setting per line, its source as a comment, and ``notes`` as comments at the top.

    ``--ampipe-config`` converts it back to the same command line.
    """
    lines = [f"# {outputs.comment(note)}".rstrip() for note in notes]
    if resolved.unknown:
        words = outputs.shell_line(resolved.unknown)
        lines.append(f"# Not below, because neither Megatron nor AMPipe has such flags: {words}")
    own = []
    for setting in resolved.settings:
        line = f"{_in_yaml(setting.value)}  # {outputs.comment(setting.source)}"
        key = setting.flag.removeprefix("--")
        if key.startswith(f"{OWN_SECTION}-"):
            own.append(f"  {key.removeprefix(f'{OWN_SECTION}-')}: {line}")
        else:
            lines.append(f"{key}: {line}")
    return "\n".join([*lines, *([f"{OWN_SECTION}:", *own] if own else [])]) + "\n"


def _in_yaml(value: bool | str | list[str]) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_in_yaml, value))}]"
    # JSON is valid YAML.
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        return value
    return json.dumps(value, ensure_ascii=False)


def as_command(resolved: Resolved) -> str:
    """A command line for a shell, with one flag per line."""
    return " \\\n".join(map(shlex.join, groups_of(resolved.words))) + "\n"


def write_record(resolved: Resolved, *, adjustments: Sequence[str], script: str | None) -> Path | None:
    """Write ``resolved.yaml``, with which this run can be repeated, into the folder of the run's output.

    Its comments list ``adjustments`` (flags that were added) and unknown flags. ``script`` is the script that
    runs; None for AMPipe's entry. Returns the path of the file; None if the run has no such folder. Raises
    :class:`BadInput` if the folder cannot be created or written to.
    """
    folders = {setting.flag: str(setting.value) for setting in resolved.settings}
    # URLs of object stores are not folders.
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
