"""Who went where in a training: the files of ``--ampipe-routing-dir``, and what plans take from them.

A file is one micro-batch of one expert-parallel group in one iteration.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from megatron_ampipe.errors import BadInput
from megatron_ampipe.files import inputs, outputs

FORMAT = "ampipe-routing-2"
THRESHOLDS = (0.9, 0.95, 0.97, 0.99, 0.999)
"""Cosines for which every file says how many rows would be left (``--ampipe-condense``)."""
_Count = Annotated[int, Field(strict=True, ge=0)]
_Size = Annotated[int, Field(strict=True, ge=1)]
_NAME = re.compile(r"iteration-(\d{8})\.json")


def places_of(num_experts: int) -> tuple[int, ...]:
    """Numbers of ranks or nodes between which experts can be divided, without one and without all apart."""
    return tuple(places for places in range(2, num_experts) if num_experts % places == 0)


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

    def per_expert(self, chunk: int | None = None) -> list[int]:
        """Tokens of all parts for each expert; of one chunk, or of all."""
        chunks = [one for part in self.counts for one in (part if chunk is None else part[chunk : chunk + 1])]
        return [sum(column) for column in zip(*chunks, strict=True)]

    def per_place(self, places: int, chunk: int | None = None) -> list[int]:
        """Rows for the experts at each of so many places, between which they are divided in order."""
        rows = self.per_expert(chunk)
        size = len(rows) // places
        return [sum(rows[first : first + size]) for first in range(0, len(rows), size)]

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
    layers: tuple[LayerRouting, ...]

    @property
    def num_parts(self) -> int:
        """Sequences, or what ranks hold of them."""
        return len(self.layers[0].counts)

    @property
    def is_consistent(self) -> bool:
        """Whether tables have the sizes that the numbers say, and layers have tokens."""
        if not self.layers or self.num_experts % self.ranks or self.num_parts % self.batch:
            return False
        chunked = (len(self.tokens), self.num_experts)
        return all(
            len(layer.counts) == self.num_parts
            and all(_sizes(part) == chunked for part in layer.counts)
            and set(layer.arrivals) == set(places_of(self.num_experts))
            and all(_sizes(rows) == (self.num_parts, places) for places, rows in layer.arrivals.items())
            and all(rows <= layer.rows_compared for rows in layer.rows_left.values())
            and layer.rows
            for layer in self.layers
        )

    def write(self, folder: Path) -> None:
        """Write the file of this iteration; it appears under its name only when it is whole."""
        content = {"format": FORMAT, **dataclasses.asdict(self)}
        outputs.write_text(folder / f"iteration-{self.iteration:08}.json", json.dumps(content) + "\n")


@dataclass(frozen=True, slots=True)
class RecordedRouting:
    """All files of a folder, and what they say of any number of places.

    Attributes:
        records: In the order of the iterations; the experts of all are as many.
    """

    records: tuple[RoutingRecord, ...]

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""
        return self.records[0].num_experts

    def imbalance(self, places: int) -> float:
        """Rows of the place with the most over the mean, of a micro-batch; averaged over layers and files."""
        return statistics.fmean(busiest(one.per_place(places)) for one in self._layers)

    def chunk_imbalance(self, places: int) -> float:
        """The same of one chunk, as the training cut its sequences."""
        return statistics.fmean(
            busiest(layer.per_place(places, chunk))
            for record in self.records
            for layer in record.layers
            for chunk in range(len(record.tokens))
        )

    def rows_to(self, places: int) -> float:
        """Rows of a token if each place that has experts of it gets one (``Block.rows_to``)."""
        if places == 1:
            return 1.0
        arrived = sum(
            sum(layer.arriving(part, places))
            for record in self.records
            for layer in record.layers
            for part in range(record.num_parts)
        )
        tokens = sum(len(one.layers) * one.num_parts * sum(one.tokens) for one in self.records)
        return arrived / tokens

    def condensed(self, threshold: float) -> float:
        """Share of the rows that ``--ampipe-condense`` with this threshold would not send, 0 to 1.

        An estimate from the rows that were compared.

        Raises:
            BadInput: it was not recorded.
        """
        if threshold not in self.thresholds:
            known = ", ".join(f"{one:g}" for one in self.thresholds)
            raise BadInput(
                "--condense",
                f"{threshold:g}",
                rule="is no threshold that was recorded",
                remedy=f"Use one of {known}, or record a training with --ampipe-condense."
                if known
                else "Record a training in which every layer has tokens.",
            )
        share = share_condensed(self._layers, threshold)
        assert share is not None
        return share

    def condensed_of(self, layer: int, threshold: float) -> float | None:
        """The same of the layer with this number; None if no rows of it were compared."""
        return share_condensed([one for one in self._layers if one.layer == layer], threshold)

    @property
    def thresholds(self) -> list[float]:
        """Those that every layer has, in order; none if no rows were compared."""
        if not any(one.rows_compared for one in self._layers):
            return []
        return sorted(set.intersection(*(set(one.rows_left) for one in self._layers)))

    @property
    def _layers(self) -> list[LayerRouting]:
        return [layer for record in self.records for layer in record.layers]


def _sizes(table: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Rows of a table, and columns; nothing further if rows differ."""
    columns = {len(row) for row in table}
    return (len(table), *columns) if len(columns) == 1 else (len(table),)


def busiest(rows: Sequence[int]) -> float:
    """The most over the mean; 1 for nothing at all."""
    return max(rows) * len(rows) / sum(rows) if any(rows) else 1.0


def share_condensed(layers: Iterable[LayerRouting], threshold: float) -> float | None:
    """Share of the compared rows that would not be sent, 0 to 1; None if there are none."""
    found = [(one.rows_left[threshold], one.rows_compared) for one in layers]
    left, compared = (sum(column) for column in zip(*found, strict=True))
    return 1 - left / compared if compared else None


def files_of(folder: Path) -> dict[int, Path]:
    """The files of a folder by iteration, in order."""
    found = {int(match[1]): folder / name for name in os.listdir(folder) if (match := _NAME.fullmatch(name))}
    return dict(sorted(found.items()))


_REMEDY = "Give the folder that a training got as --ampipe-routing-dir."


def read_routing(folder: Path, *, flag: str) -> RecordedRouting:
    """All files of a folder of ``--ampipe-routing-dir``, which the user named by a flag.

    Raises:
        BadInput: there are none, or one is not such a file, or they are of different models.
    """
    try:
        paths = files_of(folder)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(flag, folder, rule=f"cannot be read ({reason})", remedy=_REMEDY) from error
    records = tuple(read_record(path, flag=flag) for path in paths.values())
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
    try:
        content = json.loads(inputs.read_text(path))
        record = TypeAdapter(RoutingRecord).validate_python(content)
        if content["format"] != FORMAT or not record.is_consistent:
            raise ValueError
    except OSError as error:
        raise BadInput(flag, path, rule=f"cannot be read ({error.strerror})", remedy=_REMEDY) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadInput(flag, path, rule="is not a file of a recorded routing", remedy=_REMEDY) from error
    return record
