"""The variants of a layer that ``ampipe bench`` compares, and the job of the ranks. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_ampipe.schedule import Pipeline
from megatron_ampipe.tools.measuring.grid import Case
from megatron_ampipe.tools.measuring.ranks import RankJob

STOCK, CONTROL, STOCK_GRAPHS = "stock", "control", "stock-graphs"
"""Names of variants: Megatron's layer, the same measured a second time, and with Megatron's CUDA graphs."""
GRAPH_MODULES = frozenset({"attn", "moe_router", "moe_preprocess"})
"""The values of ``--cuda-graph-modules`` of which stages are captured where rows are exact."""
EXACT, FIXED = "exact", "fixed"
"""Values of ``--ampipe-rows``."""
PEAK_PASSES = 2
"""Passes of each variant whose memory is measured. The maximum counts: with threads, the overlap varies."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the layers that are compared.

    Attributes:
        schedule: Name of a schedule, or one of the names above.
        pipeline: The settings of its blocks.
        wire: The format of rows in transfers, as ``--ampipe-wire``; None to send them unchanged.
        rows: How many rows a chunk sends, as ``--ampipe-rows``.
        graphs: Whether passes are replayed as CUDA graphs, as with ``--cuda-graph-impl local``: whole passes
            with fixed rows, otherwise the stages of :data:`GRAPH_MODULES`.
    """

    schedule: str
    pipeline: Pipeline = Pipeline.of(1)  # noqa: RUF009 - it is immutable
    wire: str | None = None
    rows: str = EXACT
    graphs: bool = False

    @classmethod
    def of(
        cls, schedule: str, degree: int, *, rows: str = EXACT, graphs: bool = False, **others: Any
    ) -> Variant:
        """A named schedule; ``others`` are as in :meth:`Pipeline.of`."""
        pipeline = Pipeline.of(degree, schedule=schedule, **others)
        return cls(schedule, pipeline, rows=rows, graphs=graphs)

    @property
    def prepares(self) -> bool:
        """Whether its passes use budgets or graphs, which earlier passes make."""
        return self.graphs or self.rows != EXACT

    @property
    def pipelined(self) -> bool:
        """Whether it is AMPipe's layer rather than Megatron's own."""
        return not self.pipeline.is_stock

    def __str__(self) -> str:
        if self.schedule in (STOCK, CONTROL, STOCK_GRAPHS):
            return self.schedule
        parts = [f"{self.pipeline}"]
        if self.wire:
            parts.append(f"wire {self.wire}")
        if self.rows != EXACT:
            parts.append(f"rows {self.rows}")
        if self.graphs:
            parts.append("CUDA graphs")
        return ", ".join(parts)


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
