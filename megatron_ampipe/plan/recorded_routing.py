"""The routing recorded by a training: the files of ``--ampipe-routing-dir``, and the figures that plans use.

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
"""Cosines for which every file has the number of rows that would be sent (``--ampipe-condense``)."""
_Count = Annotated[int, Field(strict=True, ge=0)]
_Size = Annotated[int, Field(strict=True, ge=1)]
_NAME = re.compile(r"iteration-(\d{8})\.json")


def divisors(num_experts: int) -> tuple[int, ...]:
    """Numbers of places (ranks or nodes) over which experts can be divided equally."""
    return tuple(places for places in range(1, num_experts + 1) if num_experts % places == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRouting:
    """The routing of one MoE layer. A part is a sequence, or the part of it on one rank.

    Attributes:
        layer: Number of the layer in the model, from 1.
        counts: Tokens for each expert, ``[part][chunk][expert]``.
        arrivals: For each number of places, over which the experts are divided in order: how many tokens of
            each part have experts at each place, ``[part][place]``.
        rows_compared: Number of rows that were compared with each other: of some experts, or none.
        rows_left: For each threshold, how many of them would be sent if similar tokens were sent once.
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
        """Rows for the experts at each of ``places`` places, over which experts are divided in order."""
        rows = self.per_expert()
        return [sum(expert_rows) for expert_rows in itertools.batched(rows, len(rows) // places)]

    @property
    def rows(self) -> int:
        """Number of pairs of a token and an expert."""
        return sum(self.per_expert())

    def arriving(self, part: int, places: int) -> tuple[int, ...]:
        """For each of ``places`` places, the number of tokens of a part with experts there."""
        if places == len(self.counts[0][0]):
            return tuple(sum(column) for column in zip(*self.counts[part], strict=True))
        return self.arrivals[places][part]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRecord:
    """One micro-batch of one expert-parallel group.

    Attributes:
        iteration: Iteration of the training, from 1.
        num_experts: Number of experts of a layer.
        ranks: Number of expert-parallel ranks of the training.
        batch: Sequences of a micro-batch: part ``p`` is on rank ``p // batch`` of the group.
        ranks_per_sequence: Number of consecutive ranks that share a sequence.
        hidden_size: Number of elements of a row.
        tokens: Number of tokens of a part in each chunk.
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
        """Number of parts, see :class:`LayerRouting`."""
        return len(self.layers[0].counts)

    def write(self, folder: Path) -> None:
        """Write the file of this iteration, atomically."""
        text = json.dumps(dataclasses.asdict(self))
        outputs.write_text(folder / f"iteration-{self.iteration:08}.json", f"{text}\n")


@dataclass(frozen=True, slots=True)
class RecordedRouting:
    """All files of a folder, in the order of iterations, with figures for any number of places."""

    records: tuple[RoutingRecord, ...]

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""
        return self.records[0].num_experts

    def imbalance(self, places: int) -> float:
        """Rows of the busiest place over the mean, per micro-batch, averaged over layers and files."""
        return statistics.fmean(busiest(layer.per_place(places)) for layer in self._layers)

    def rows_to(self, places: int) -> float:
        """Number of rows of a token if each place with experts of it gets one (``Block.rows_to``)."""
        arrived = sum(
            sum(layer.arriving(part, places)) for layer in self._layers for part in range(len(layer.counts))
        )
        return arrived / sum(len(file.layers) * file.num_parts * sum(file.tokens) for file in self.records)

    def condensed(self, threshold: float) -> float:
        """Share of the rows that ``--ampipe-condense`` with this recorded threshold would not send, 0 to 1.

        An estimate from the rows that were compared.
        """
        left = sum(layer.rows_left[threshold] for layer in self._layers)
        return 1 - left / sum(layer.rows_compared for layer in self._layers)

    @property
    def thresholds(self) -> list[float]:
        """The thresholds that all layers have, in order; none if no rows were compared."""
        if not any(layer.rows_compared for layer in self._layers):
            return []
        return sorted(set.intersection(*(set(layer.rows_left) for layer in self._layers)))

    @property
    def _layers(self) -> list[LayerRouting]:
        return [layer for record in self.records for layer in record.layers]


def busiest(rows: Sequence[int]) -> float:
    """The maximum over the mean; 1 if all are 0."""
    return max(rows) * len(rows) / sum(rows) if any(rows) else 1.0


def files_of(folder: Path) -> dict[int, Path]:
    """The files of a folder by iteration, in order."""
    files = {int(match[1]): path for path in folder.glob("*") if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(files.items()))


_REMEDY = "Give the folder that a training got as --ampipe-routing-dir."


def read_routing(folder: Path, *, flag: str) -> RecordedRouting:
    """Read all files of a folder of ``--ampipe-routing-dir``; ``flag`` is the flag that names the folder.

    Raises:
        BadInput: there are no files, one is of another format, or they are of different models.
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
    """Read a file of :meth:`RoutingRecord.write`; raises BadInput for another file."""
    parse, rule = TypeAdapter(RoutingRecord).validate_json, "is not a file of a recorded routing"
    return parse_file(path, parse, what=flag, rule=rule, remedy=_REMEDY)


def with_routing(block: Block, folder: Path) -> tuple[Block, tuple[str, ...]]:
    """The block with the recorded use of experts, and a sentence for each figure that was used.

    Args:
        block: The block.
        folder: The value of ``--routing``.

    Raises:
        BadInput: there is no such recording, or it has another number of experts.
    """
    routing = read_routing(folder, flag="--routing")
    if routing.num_experts != block.experts:
        rule = f"is of {routing.num_experts} experts, and the model has {block.experts}"
        raise BadInput("--routing", folder, rule=rule, remedy="Give the model that was trained.")
    places = divisors(block.experts)[1:]
    rows = tuple((count, routing.rows_to(count)) for count in places)
    block = dataclasses.replace(block, imbalance=routing.imbalance(block.expert), rows_seen=rows)
    sentences = [
        f"imbalance {block.imbalance:.3f} of {block.expert} ranks: {len(routing.records)} iterations in "
        f"{folder}"
    ]
    if block.expert in places:
        sentences.append(f"{block.rows_to(block.expert):.3f} ranks get a token, from the same")
    return block, tuple(sentences)
