"""Who went where in a training: the files of ``--ampipe-routing-dir``, and what plans take from them.

A file is one micro-batch of one expert-parallel group in one iteration.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from megatron_ampipe.errors import BadInput
from megatron_ampipe.files import outputs
from megatron_ampipe.files.inputs import parse_file
from megatron_ampipe.plan.block import Block

THRESHOLDS = (0.9, 0.95, 0.97, 0.99, 0.999)
"""Cosines for which every file says how many rows would be left (``--ampipe-condense``)."""
_Count = Annotated[int, Field(strict=True, ge=0)]
_Size = Annotated[int, Field(strict=True, ge=1)]
_NAME = re.compile(r"iteration-(\d{8})\.json")


def divisors(num_experts: int) -> tuple[int, ...]:
    """Numbers of ranks or nodes between which experts can be divided."""
    return tuple(places for places in range(1, num_experts + 1) if num_experts % places == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRouting:
    """The routing of one MoE layer. A part is a sequence, or what one rank has of it.

    Attributes:
        layer: Number of the layer in the model, from 1.
        counts: Tokens for each expert, ``[part][chunk][expert]``.
        arrivals: For a number of places, between which the experts are divided in order, the tokens of each
            part that have experts at each place, each token once: ``[part][place]``.
        rows_compared: Rows that were compared with each other: of some experts, or none.
        rows_left: For a threshold, those of them that would be sent if similar tokens were sent once.
    """

    layer: _Size
    counts: tuple[tuple[tuple[_Count, ...], ...], ...]
    arrivals: Mapping[int, tuple[tuple[_Count, ...], ...]]
    rows_compared: _Count
    rows_left: Mapping[float, _Count]

    def per_expert(self) -> list[int]:
        """Tokens of all parts for each expert."""
        chunks = [chunk for part in self.counts for chunk in part]
        return [sum(column) for column in zip(*chunks, strict=True)]

    def per_place(self, places: int) -> list[int]:
        """Rows for the experts at each of so many places, between which they are divided in order."""
        rows = self.per_expert()
        return [sum(of_place) for of_place in itertools.batched(rows, len(rows) // places)]

    @property
    def rows(self) -> int:
        """Pairs of a token and an expert."""
        return sum(self.per_expert())

    def arriving(self, part: int, places: int) -> tuple[int, ...]:
        """Tokens of a part that have experts at each of so many places, each token once at a place."""
        if places == len(self.counts[0][0]):
            return tuple(sum(column) for column in zip(*self.counts[part], strict=True))
        return self.arrivals[places][part]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRecord:
    """One micro-batch of one expert-parallel group.

    Attributes:
        iteration: Of the training, from 1.
        num_experts: Experts of a layer.
        ranks: Ranks between which they are divided in the training.
        batch: Sequences of a micro-batch: part ``p`` is of rank ``p // batch`` of the group.
        ranks_per_sequence: Consecutive ranks that hold a part of a sequence each.
        hidden_size: Elements of a row.
        tokens: Tokens of a part in each chunk.
        layers: The MoE layers, in order.
    """

    iteration: _Size
    num_experts: _Size
    ranks: _Size
    batch: _Size
    ranks_per_sequence: _Size
    hidden_size: _Size
    tokens: Annotated[tuple[_Size, ...], Field(min_length=1)]
    layers: Annotated[tuple[LayerRouting, ...], Field(min_length=1)]
    format: Literal["ampipe-routing-2"] = "ampipe-routing-2"

    @property
    def num_parts(self) -> int:
        """Sequences, or what ranks hold of them."""
        return len(self.layers[0].counts)

    def write(self, folder: Path) -> None:
        """Write the file of this iteration; it appears under its name only when it is whole."""
        text = json.dumps(dataclasses.asdict(self))
        outputs.write_text(folder / f"iteration-{self.iteration:08}.json", f"{text}\n")


@dataclass(frozen=True, slots=True)
class RecordedRouting:
    """All files of a folder, in the order of the iterations, and what they say of any number of places."""

    records: tuple[RoutingRecord, ...]

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""
        return self.records[0].num_experts

    def imbalance(self, places: int) -> float:
        """Rows of the place with the most over the mean, of a micro-batch; averaged over layers and files."""
        return statistics.fmean(busiest(one.per_place(places)) for one in self._layers)

    def rows_to(self, places: int) -> float:
        """Rows of a token if each place that has experts of it gets one (``Block.rows_to``)."""
        arrived = sum(
            sum(one.arriving(part, places)) for one in self._layers for part in range(len(one.counts))
        )
        return arrived / sum(len(one.layers) * one.num_parts * sum(one.tokens) for one in self.records)

    def condensed(self, threshold: float) -> float:
        """Share of the rows that ``--ampipe-condense`` with this recorded threshold would not send, 0 to 1.

        An estimate from the rows that were compared.
        """
        left = sum(one.rows_left[threshold] for one in self._layers)
        return 1 - left / sum(one.rows_compared for one in self._layers)

    @property
    def thresholds(self) -> list[float]:
        """Those that every layer has, in order; none if no rows were compared."""
        if not any(one.rows_compared for one in self._layers):
            return []
        return sorted(set.intersection(*(set(one.rows_left) for one in self._layers)))

    @property
    def _layers(self) -> list[LayerRouting]:
        return [layer for record in self.records for layer in record.layers]


def busiest(rows: Sequence[int]) -> float:
    """The most over the mean; 1 for nothing at all."""
    return max(rows) * len(rows) / sum(rows) if any(rows) else 1.0


def files_of(folder: Path) -> dict[int, Path]:
    """The files of a folder by iteration, in order."""
    found = {int(match[1]): path for path in folder.glob("*") if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


_REMEDY = "Give the folder that a training got as --ampipe-routing-dir."


def read_routing(folder: Path, *, flag: str) -> RecordedRouting:
    """All files of a folder of ``--ampipe-routing-dir``, which the user named by a flag.

    Raises:
        BadInput: there are none, or one is not such a file, or they are of different models.
    """
    records = tuple(read_record(path, flag=flag) for path in files_of(folder).values())
    models = {
        (record.num_experts, record.hidden_size, tuple(layer.layer for layer in record.layers))
        for record in records
    }
    if len(models) != 1:
        rule = "has files of several models" if models else "has no file of a recorded routing"
        raise BadInput(flag, folder, rule=rule, remedy=_REMEDY)
    return RecordedRouting(records)


def read_record(path: Path, *, flag: str) -> RoutingRecord:
    """One file that :meth:`RoutingRecord.write` wrote; BadInput if it is not."""
    parse, rule = TypeAdapter(RoutingRecord).validate_json, "is not a file of a recorded routing"
    return parse_file(path, parse, what=flag, rule=rule, remedy=_REMEDY)


def with_routing(block: Block, folder: Path) -> tuple[Block, tuple[str, ...]]:
    """A block whose experts are used as in a training, and a sentence for each figure that was taken.

    Args:
        block: The block.
        folder: The value of ``--routing``.

    Raises:
        BadInput: there is no such recording, or it is of another number of experts.
    """
    routing = read_routing(folder, flag="--routing")
    if routing.num_experts != block.experts:
        rule = f"is of {routing.num_experts} experts, and the model has {block.experts}"
        raise BadInput("--routing", folder, rule=rule, remedy="Give the model that was trained.")
    places = divisors(block.experts)[1:]
    rows = tuple((count, routing.rows_to(count)) for count in places)
    block = dataclasses.replace(block, imbalance=routing.imbalance(block.expert), rows_seen=rows)
    said = [
        f"imbalance {block.imbalance:.3f} of {block.expert} ranks: {len(routing.records)} iterations in "
        f"{folder}"
    ]
    if block.expert in places:
        said.append(f"{block.rows_to(block.expert):.3f} ranks get a token, from the same")
    return block, tuple(said)
