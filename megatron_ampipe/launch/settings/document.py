"""A resolved configuration as YAML with the source of every value, and as a command line.

The YAML is one that ``--ampipe-config`` reads back to the same command line. Called by ``ampipe config``, and
by :mod:`megatron_ampipe.launch.pretrain` for the ``resolved.yaml`` of a run.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.settings.entries import OWN_SECTION
from megatron_ampipe.launch.settings.resolve import Resolved, Setting

RESOLVED_NAME = "resolved.yaml"
LOG_FLAGS = ("--tensorboard-dir", "--save", f"--{OWN_SECTION}-trace-dir")
"""Whose folder holds the record of a run; the first that is set."""


class _TextDumper(yaml.SafeDumper):
    """The counterpart of reading numbers as text: ``12`` and ``1e-4`` need no quotes, ``"true"`` does."""


_TextDumper.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":bool", ":null"))]
    for first, resolvers in yaml.SafeDumper.yaml_implicit_resolvers.items()
}


def as_yaml(resolved: Resolved, *, notes: Sequence[str] = ()) -> str:
    """YAML, one setting on a line, each with its source as a comment.

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
    """Words for a shell, a flag on each line."""
    groups: list[list[str]] = []
    for word in resolved.words:
        if word.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(word)
    return " \\\n".join(shlex.join(group) for group in groups) + "\n"


def write_beside_logs(resolved: Resolved, *, notes: Sequence[str]) -> Path | None:
    """Write ``resolved.yaml`` into the folder where the run writes; on rank 0 alone.

    Returns:
        The file; None if the run has no such folder, or this is another rank.

    Raises:
        BadInput: nothing can be written there.
    """
    # An object store is no folder.
    folders = {flag: str(resolved.value(flag) or "") for flag in LOG_FLAGS}
    flag = next((flag for flag, folder in folders.items() if folder and "://" not in folder), None)
    if flag is None or int(os.environ.get("RANK", "0")) != 0:
        return None
    path = Path(folders[flag]) / RESOLVED_NAME
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(as_yaml(resolved, notes=notes), encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise BadInput(
            flag,
            path.parent,
            rule=f"cannot be written to ({error.strerror})",
            remedy=f"Name a folder of yours, for example {flag} runs/first.",
        ) from error
    return path


def _represent_text(dumper: _TextDumper, text: str) -> yaml.ScalarNode:
    """Text with line breaks in quotes, so that it stays on one line."""
    style = '"' if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_TextDumper.add_representer(str, _represent_text)


def _line(key: str, setting: Setting) -> str:
    value: Any = list(setting.value) if isinstance(setting.value, tuple) else setting.value
    text = yaml.dump(value, Dumper=_TextDumper, default_flow_style=True, width=10**9, allow_unicode=True)
    before = f", not {', '.join(setting.instead_of)}" if setting.instead_of else ""
    # PyYAML ends a document that is one plain word with three dots.
    return f"{key}: {text.strip().removesuffix('...').strip()}  # {setting.source}{before}"
