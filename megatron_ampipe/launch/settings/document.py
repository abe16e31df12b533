"""A resolved configuration as YAML with the source of every value, and as a command line.

``--ampipe-config`` turns the YAML back into the same command line. Called by ``ampipe config``, and by
:mod:`megatron_ampipe.launch.pretrain` for the ``resolved.yaml`` of a run.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_ampipe.files import outputs
from megatron_ampipe.launch.settings.entries import OWN_SECTION
from megatron_ampipe.launch.settings.resolve import FlagValue, Resolved

RESOLVED_NAME = "resolved.yaml"
LOG_FLAGS = ("--tensorboard-dir", "--save", f"--{OWN_SECTION}-trace-dir")
"""The first of these that is set names the folder for the record of a run."""


class _TextDumper(yaml.SafeDumper):
    """The counterpart of reading numbers as text: ``12`` and ``1e-4`` need no quotes, ``"true"`` does."""


_TextDumper.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":bool", ":null"))]
    for first, resolvers in yaml.SafeDumper.yaml_implicit_resolvers.items()
}


def as_yaml(resolved: Resolved, *, notes: Sequence[str] = ()) -> str:
    """YAML with one setting on each line, and its source as a comment.

    Args:
        resolved: The configuration.
        notes: Comment lines for the top.
    """
    prefix = f"--{OWN_SECTION}-"
    others = [setting for setting in resolved.settings if not setting.flag.startswith(prefix)]
    own = [setting for setting in resolved.settings if setting.flag.startswith(prefix)]
    lines = [f"# {note}".rstrip() for note in notes]
    if resolved.unknown:
        words = shlex.join(resolved.unknown).replace("\n", " ")
        lines.append(f"# Not below, because neither Megatron nor AMPipe has such flags: {words}")
    lines += [_line(setting.flag.removeprefix("--"), setting) for setting in others]
    if own:
        lines.append(f"{OWN_SECTION}:")
        lines += [f"  {_line(setting.flag.removeprefix(prefix), setting)}" for setting in own]
    return "\n".join(lines) + "\n"


def as_command(resolved: Resolved) -> str:
    """A command line for a shell, with one flag on each line."""
    groups: list[list[str]] = []
    for word in resolved.words:
        if word.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(word)
    return " \\\n".join(shlex.join(group) for group in groups) + "\n"


def write_beside_logs(resolved: Resolved, *, notes: Sequence[str]) -> Path | None:
    """Write ``resolved.yaml`` into the folder where the run writes; on rank 0 only.

    Returns:
        The file; None if the run has no such folder, or this is another rank.

    Raises:
        BadInput: the folder cannot be made or written to.
        RunFailed: writing failed.
    """
    # An object store is not a folder.
    folders = {flag: str(resolved.value(flag) or "") for flag in LOG_FLAGS}
    flag = next((flag for flag, folder in folders.items() if folder and "://" not in folder), None)
    if flag is None or int(os.environ.get("RANK", "0")) != 0:
        return None
    path = Path(folders[flag]) / RESOLVED_NAME
    outputs.check_folder(path.parent.absolute(), flag=flag, value=path.parent, makes_folder=True)
    outputs.write_text(path, as_yaml(resolved, notes=notes))
    return path


def _represent_text(dumper: _TextDumper, text: str) -> yaml.ScalarNode:
    """Text with line breaks is quoted, so that it stays on one line."""
    style = '"' if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_TextDumper.add_representer(str, _represent_text)


def _line(key: str, setting: FlagValue) -> str:
    value: Any = list(setting.value) if isinstance(setting.value, tuple) else setting.value
    text = yaml.dump(value, Dumper=_TextDumper, default_flow_style=True, width=10**9, allow_unicode=True)
    before = f", not {', '.join(setting.instead_of)}" if setting.instead_of else ""
    # PyYAML ends a document that is one plain word with three dots.
    return f"{key}: {text.strip().removesuffix('...').strip()}  # {setting.source}{before}"
