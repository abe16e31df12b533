"""Configuration files as lists of entries: which key, which value, which line. Nothing is checked here
against the parser; that is :mod:`.validate`. Called by :mod:`.resolve` and ``ampipe sbatch``.

A file holds flags at its top and a section ``ampipe:``. A cluster file, which is the planner's, may have a
section ``flags:`` of the same form; a launch reads that section only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ampipe.errors import BadInput
from megatron_ampipe.files.records import keys_of
from megatron_ampipe.files.shipped import shown
from megatron_ampipe.files.yaml_lines import LinedMapping, load
from megatron_ampipe.plan.cluster import Cluster

OWN_SECTION = "ampipe"
FLAGS_SECTION = "flags"
_CLUSTER_KEY = "ranks_per_node"
"""A key that is in each cluster file, and in no other file."""


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
        """The error for this entry.

        Args:
            rule: Why it is refused.
            remedy: What to write instead.
            value: The value, if it is to be shown.
        """
        shown = ".".join(filter(None, [self.section, self.key]))
        return BadInput(
            f"{self.place}:", shown if value is None else f"{shown}: {value}", rule=rule, remedy=remedy
        )


def read_entries(path: Path) -> list[Entry]:
    """The entries of a file, in its order.

    Raises:
        BadInput: it cannot be read, is not YAML, or its sections are not mappings.
    """
    top = load(
        path,
        what="configuration",
        remedy="Write 'key: value' on each line, indent with spaces, and see configs/models/tiny.yaml.",
        scalars_as_text=True,
    )
    if FLAGS_SECTION in top:
        top = _flags_of_cluster(path, top)
    elif _CLUSTER_KEY in top:
        raise _entry(path, top, _CLUSTER_KEY).refuse(
            f"a cluster file without a section '{FLAGS_SECTION}:' has no setting of a launch",
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
            raise entry.refuse("is a section for settings of AMPipe", "Write 'degree: 4' below it, indented.")
        for own in entry.value:
            yield _entry(path, entry.value, own, section=OWN_SECTION)


def _flags_of_cluster(path: Path, top: LinedMapping) -> LinedMapping:
    """The section ``flags:`` of a cluster file; the other keys must be the planner's."""
    found = top[FLAGS_SECTION]
    if not isinstance(found, LinedMapping):
        raise _entry(path, top, FLAGS_SECTION).refuse(
            "is a section for flags", "Write one 'flag: value' on each line below it."
        )
    outside = next((key for key in top if key not in keys_of(Cluster)), None)
    if outside is not None:
        raise _entry(path, top, outside).refuse(
            f"stands outside the section '{FLAGS_SECTION}:', and would not be read",
            f"Move it into '{FLAGS_SECTION}:', or remove the line '{FLAGS_SECTION}:'.",
        )
    return found


def _entry(path: Path, mapping: LinedMapping, key: str, *, section: str = "") -> Entry:
    place = f"{shown(path)}:{mapping.lines[key]}"
    return Entry(place=place, key=key, section=section, value=mapping[key])
