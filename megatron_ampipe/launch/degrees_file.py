"""The file in which ``--ampipe-degree auto`` remembers its trials: :data:`NAME` in the checkpoints' folder.

Written next to the checkpoints by the first rank with every choice, and read from there by a restart, so that
no size of input is tried twice. A file of another model, precision, layout or other flags of AMPipe is not
used. Called by :mod:`.attach`; :mod:`.auto` hands what the first rank read to the others.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megatron_ampipe.errors import BadInput, RunFailed
from megatron_ampipe.files.inputs import load
from megatron_ampipe.files.records import read_record, write_record
from megatron_ampipe.launch.auto import print_on_first_rank
from megatron_ampipe.launch.planned import made_for_of_args
from megatron_ampipe.launch.size_ranges import ChosenSize, Shape
from megatron_ampipe.launch.trials import Choice
from megatron_ampipe.plan.plan_file import MadeFor, differences
from megatron_ampipe.schedule import Exchange, Pipeline

NAME = "ampipe-degrees.yaml"
FORMAT: Literal["ampipe-degrees-1"] = "ampipe-degrees-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class _DegreesFile:
    """The format of the file.

    Attributes:
        flags: What the flags of AMPipe leave to the trials, as text, to compare.
        made_for: The block and its layout.
        sizes: What was chosen.
    """

    format: Literal["ampipe-degrees-1"]
    flags: str
    made_for: MadeFor = field(metadata={"last": True})
    sizes: tuple[ChosenSize, ...] = field(metadata={"last": True})


class DegreesFile:
    """Choices that a restart finds again.

    Args:
        args: Megatron's validated arguments.
        given: The pipeline of the flags, whose degree the trials replace.
        exchanges: Those that the trials compare.
    """

    def __init__(self, args: argparse.Namespace, given: Pipeline, exchanges: Sequence[Exchange]) -> None:
        self._args, self._given = args, given
        self._flags = f"{given}; exchange {' or '.join(exchanges)}"
        self._save = _file_in(args.save)
        self._load = self._save if args.load is None else _file_in(args.load)
        self._sizes: dict[Shape, ChosenSize] = {}

    def read(self) -> tuple[ChosenSize, ...]:
        """What an earlier run chose; nothing if there is no such file, or it is for another run."""
        if self._load is None or not self._load.is_file():
            return ()
        try:
            top = load(self._load, what="degrees", remedy="Remove it: degrees are tried again.")
            found, _ = read_record(self._load, _DegreesFile, top)
            other = list(map(str, differences(found.made_for, made_for_of_args(self._args))))
            if found.flags != self._flags:
                other.append(f"{found.flags} (this run: {self._flags})")
            for one in found.sizes:
                one.pipeline(self._given)
        except BadInput as error:
            print_on_first_rank(f"degrees are tried again: {error}")
            return ()
        if other:
            print_on_first_rank(f"degrees are tried again: {self._load} is for {', '.join(other)}")
            return ()
        self._sizes = {one.shape: one for one in found.sizes}
        return found.sizes

    def keep(self, shape: Shape, choice: Choice) -> None:
        """Write a new choice, on the first rank."""
        if self._save is None or int(os.environ.get("RANK", "0")) != 0:
            return
        self._sizes[shape] = ChosenSize.of(shape, choice.pipeline)
        record = _DegreesFile(
            format=FORMAT,
            flags=self._flags,
            made_for=made_for_of_args(self._args),
            sizes=tuple(self._sizes.values()),
        )
        try:
            write_record(self._save, record, head="chosen by --ampipe-degree auto, for restarts of this run")
        except RunFailed as error:
            # Training continues: the choice is made, and was logged.
            print_on_first_rank(f"a restart tries degrees again: {error}")


def _file_in(folder: str | None) -> Path | None:
    """The file next to checkpoints; None without any, or where they are in an object store."""
    return None if folder is None or "://" in folder else Path(folder) / NAME
