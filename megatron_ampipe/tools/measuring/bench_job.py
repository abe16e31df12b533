"""The variants of a layer that ``ampipe bench`` compares, and the job of the ranks. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_ampipe.schedule import Pipeline
from megatron_ampipe.tools.measuring.grid import Case
from megatron_ampipe.tools.measuring.ranks import RankJob

STOCK, CONTROL = "stock", "control"
"""Names of variants: Megatron's layer, and the same layer measured a second time."""
PEAK_PASSES = 2
"""Passes of each variant whose memory is measured. The maximum counts: with threads, the overlap varies."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the layers that are compared.

    Attributes:
        schedule: Name of a schedule, or one of the names above.
        pipeline: The settings of its blocks.
        wire: The format of rows in transfers, as ``--ampipe-wire``; None to send them unchanged.
    """

    schedule: str
    pipeline: Pipeline = Pipeline.of(1)  # noqa: RUF009 - it is immutable
    wire: str | None = None

    @classmethod
    def of(cls, schedule: str, degree: int, **others: Any) -> Variant:
        """A named schedule; ``others`` are as in :meth:`Pipeline.of`."""
        return cls(schedule, Pipeline.of(degree, schedule=schedule, **others))

    @property
    def pipelined(self) -> bool:
        """Whether it is AMPipe's layer rather than Megatron's own."""
        return not self.pipeline.is_stock

    def __str__(self) -> str:
        if self.schedule in (STOCK, CONTROL):
            return self.schedule
        return f"{self.pipeline}" + (f", wire {self.wire}" if self.wire else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchJob(RankJob):
    """Blocks to measure, and how.

    Attributes:
        variants: The variants to compare in each case, stock first.
        repeats: Timed passes of each variant, or iterations of a training, after ``warmup`` untimed ones.
        layers: Number of consecutive layers in one measurement, each with separate weights.
        micro_batches: Micro-batches of each rank in an iteration of a training.
    """

    cases: tuple[Case, ...]
    variants: tuple[tuple[Variant, ...], ...] = ()
    repeats: int
    warmup: int
    layers: int = 1
    micro_batches: int = 2
