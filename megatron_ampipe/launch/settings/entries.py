"""Configuration files as lists of entries: which key, which value, which line. Nothing is checked here
against the parser; that is :mod:`.validate`. Called by :mod:`.resolve`.

A file holds flags at its top and a section ``ampipe:``. A cluster file, which belongs to the planner, may
have a section ``flags:`` of the same form; only that section concerns a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ampipe.errors import BadInput
from megatron_ampipe.shipped import shown
from megatron_ampipe.yaml_lines import LinedMapping, load

OWN_SECTION = "ampipe"
FLAGS_SECTION = "flags"
_CLUSTER_KEY = "ranks_per_node"
"""Every cluster file has it, and no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One key of a file.

    Attributes:
        place: ``FILE:LINE``.
        key: As it is written there.
        section: ``ampipe`` within that section, else empty.
        value: Text, True, False, None, or a list or mapping of these; numbers are text.
    """

    place: str
    key: str
    section: str
    value: Any

    def refuse(self, rule: str, remedy: str, *, value: object = None) -> BadInput:
        """The error for this entry.

        Args:
            rule: Why it is refused.
            remedy: What to write instead.
            value: The value, where showing it helps.
        """
        shown = ".".join(filter(None, [self.section, self.key]))
        return BadInput(
            f"{self.place}:", shown if value is None else f"{shown}: {value}", rule=rule, remedy=remedy
        )


def read_entries(path: Path, *, is_flag: Callable[[str], bool]) -> list[Entry]:
    """The entries of a file, in its order.

    Args:
        path: The file.
        is_flag: Whether a key is a flag; no such key may stand outside a cluster file's section.

    Raises:
        BadInput: it cannot be read, is no YAML, or its sections are not mappings.
    """
    top = load(
        path,
        what="configuration",
        remedy="Write 'key: value' on each line, indent with spaces, and see configs/models/tiny.yaml.",
        scalars_as_text=True,
    )
    if FLAGS_SECTION in top:
        top = _flags_of_cluster(path, top, is_flag)
    elif _CLUSTER_KEY in top:
        raise _entry(path, top, _CLUSTER_KEY).refuse(
            f"a cluster file without a section '{FLAGS_SECTION}:' says nothing to a launch",
            "Leave the file out.",
        )
    return list(_entries(path, top))


def _entries(path: Path, mapping: LinedMapping) -> Iterator[Entry]:
    for key in mapping:
        entry = _entry(path, mapping, key)
        if key != OWN_SECTION:
            yield entry
            continue
        if not isinstance(entry.value, LinedMapping):
            raise entry.refuse(
                "is a section, and holds settings of AMPipe", "Write 'degree: 4' below it, indented."
            )
        for own in entry.value:
            yield _entry(path, entry.value, own, section=OWN_SECTION)


def _flags_of_cluster(path: Path, top: LinedMapping, is_flag: Callable[[str], bool]) -> LinedMapping:
    """The section ``flags:`` of a cluster file; what stands beside it are the planner's figures."""
    found = top[FLAGS_SECTION]
    if not isinstance(found, LinedMapping):
        raise _entry(path, top, FLAGS_SECTION).refuse(
            "is a section, and holds flags", "Write one 'flag: value' on each line below it."
        )
    beside = next((key for key in top if key == OWN_SECTION or is_flag(key)), None)
    if beside is not None:
        raise _entry(path, top, beside).refuse(
            f"stands beside the section '{FLAGS_SECTION}:', and would not be read",
            f"Move it into '{FLAGS_SECTION}:', or take that line away.",
        )
    return found


def _entry(path: Path, mapping: LinedMapping, key: str, *, section: str = "") -> Entry:
    place = f"{shown(path)}:{mapping.lines[key]}"
    return Entry(place=place, key=key, section=section, value=mapping[key])
