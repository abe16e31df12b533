"""What ``ampipe bench`` compares: the variants of a layer, and the job of the ranks. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_ampipe.schedule import (
    KEEP,
    Exchange,
    Pipeline,
    from_text,
    of_chunks,
    useful_exchanges,
)
from megatron_ampipe.tools.measuring.grid import Case
from megatron_ampipe.tools.measuring.ranks import RankJob

STOCK, CONTROL, STOCK_GLOO, PLANNED = "stock", "control", "stock-gloo", "planned"
"""Names among the variants: Megatron's own layer, the same measured a second time, the same with gloo's own
all-to-all (``launch.host.all_to_all``), and what the planner chooses for a case."""
MEGATRONS = (STOCK, CONTROL, STOCK_GLOO)
PEAK_PASSES = 2
"""Passes of each variant whose memory is watched. The highest counts: with threads, the overlap varies."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Where the sequence is cut.

    Attributes:
        degree: Number of chunks of the forward pass.
        backward_degree: Of the backward pass.
        shares: Of the sequence, of each chunk; equal if None.
    """

    degree: int
    backward_degree: int
    shares: tuple[float, ...] | None = None

    @classmethod
    def of(
        cls, degree: int, backward_degree: int | None = None, shares: tuple[float, ...] | None = None
    ) -> Cut:
        """A cut whose backward degree is the forward one's unless it is given."""
        return cls(degree, degree if backward_degree is None else backward_degree, shares)

    @property
    def num_chunks(self) -> int:
        """Into how many chunks the sequence is cut."""
        return max(self.degree, self.backward_degree)

    def __str__(self) -> str:
        """As it stands after ``--degrees`` or ``--chunks``."""
        if self.shares is not None:
            return ",".join(f"{share:.4g}" for share in self.shares)
        return str(self.degree) + (f":{self.backward_degree}" if self.backward_degree != self.degree else "")


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the layers that are compared.

    Attributes:
        schedule: Name of a schedule, or one of the names above.
        cut: Into which chunks. In one chunk, both ways, a schedule is Megatron's own layer again, unless it
            overlaps gradients of weights or has another exchange.
        order: Of a plan, the order of the stages (``schedule.to_text``).
        stack: How many consecutive layers share the schedule; 1 is block by block.
        memory: What the experts keep for their backward, as in ``Pipeline.memory``.
        exchange: How the all-to-all groups copies of a token.
        wire: What rows become while they travel, as ``--ampipe-wire``; None to send them as they are.
    """

    schedule: str
    cut: Cut
    order: str | None = None
    stack: int = 1
    memory: str = KEEP
    exchange: Exchange = Exchange.ROWS
    wire: str | None = None

    @property
    def pipelined(self) -> bool:
        """Whether it is AMPipe's layer rather than Megatron's own."""
        return not self.pipeline.is_stock

    @property
    def pipeline(self) -> Pipeline:
        """What its blocks run."""
        if self.order is None and self.schedule in (*MEGATRONS, PLANNED):
            return Pipeline.of(1)
        pipeline = Pipeline.of(
            self.cut.degree,
            backward_degree=self.cut.backward_degree,
            shares=self.cut.shares,
            stack=self.stack,
            memory=self.memory,
            exchange=self.exchange,
        )
        if self.order is not None:
            return replace(pipeline, order=from_text(self.order))
        return replace(pipeline, schedule=self.schedule)

    def __str__(self) -> str:
        if self.schedule in MEGATRONS:
            return self.schedule
        return ", ".join(
            [
                f"{self.schedule} {'degree' if self.cut.shares is None else 'chunks'} {self.cut}",
                *[f"stack {self.stack}"] * (self.stack > 1),
                *[f"memory {self.memory}"] * (self.memory != KEEP),
                *[f"exchange {self.exchange}"] * (self.exchange is not Exchange.ROWS),
                *[f"wire {self.wire}"] * (self.wire is not None),
            ]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchJob(RankJob):
    """Blocks to measure, and how.

    Attributes:
        cases: The blocks, one after another.
        schedules: Names of schedules.
        cuts: Into which chunks.
        repeats: Timed passes of each variant, or iterations of a training.
        warmup: Those before them, which do not count.
        planned: For each case, what the planner chose, for each of ``stacks``; empty without ``--planned``.
        layers: How many consecutive layers are one measurement, each with its own weights.
        stacks: How many of them share a schedule; 1 is block by block.
        memories: What the experts keep for their backward, as in ``Pipeline.memory``.
        exchanges: How the all-to-all groups copies of a token.
        wires: What rows become while they travel, as ``--ampipe-wire``; None to send them as they are.
        gloo_all_to_all: Also measure Megatron's layers with gloo's own all-to-all.
    """

    cases: tuple[Case, ...]
    schedules: tuple[str, ...] = ()
    cuts: tuple[Cut, ...] = ()
    repeats: int
    warmup: int
    planned: tuple[tuple[Variant, ...], ...] = ()
    layers: int = 1
    stacks: tuple[int, ...] = (1,)
    memories: tuple[str, ...] = (KEEP,)
    exchanges: tuple[Exchange, ...] = (Exchange.ROWS,)
    wires: tuple[str | None, ...] = (None,)
    gloo_all_to_all: bool = False

    def variants_of(self, case_index: int) -> tuple[Variant, ...]:
        """What is compared: stock and its control, then every schedule in every way, then what was planned.

        A way is a cut, a stack, a memory, an exchange and a wire. An exchange that saves no copies in this
        case is left out, and so are strategies of the chunks of another degree.
        """
        useful = self.useful_exchanges(self.cases[case_index])
        rows = (
            # Layers that overlap nothing share no schedule, and keep and send everything as it is.
            variant if variant.pipeline.overlaps else Variant(schedule, cut, exchange=exchange)
            for schedule in self.schedules
            for cut in self.cuts
            for stack in self.stacks
            # In one chunk nothing is restored.
            for memory in (self.memories if cut.num_chunks > 1 else (KEEP,))
            if len(of_chunks(memory)) in (1, cut.backward_degree)
            for exchange in self.exchanges
            for wire in self.wires
            if exchange in useful
            for variant in [Variant(schedule, cut, stack=stack, memory=memory, exchange=exchange, wire=wire)]
        )
        planned = self.planned[case_index] if self.planned else ()
        megatrons = (STOCK, CONTROL, *[STOCK_GLOO] * self.gloo_all_to_all)
        return (*(Variant(name, Cut.of(1)) for name in megatrons), *dict.fromkeys(rows), *planned)

    def num_passes(self, case_index: int) -> int:
        """Passes of a rank in a case: compared, watched for their memory, warm-up and timed.

        A pipelined variant has twice as many of the last two: as a whole, and with its stages one by one.
        """
        variants = self.variants_of(case_index)
        in_turns = len(variants) + sum(variant.pipelined for variant in variants)
        return (1 + PEAK_PASSES) * len(variants) + (self.warmup + self.repeats) * in_turns

    @property
    def ranks_per_node(self) -> int | None:
        """Ranks of a node; None where all have one network."""
        return None if self.link.nodes is None else self.link.nodes.ranks_per_node

    def useful_exchanges(self, case: Case) -> tuple[Exchange, ...]:
        """Which exchanges can be measured in a case (``schedule.useful_exchanges``)."""
        return useful_exchanges(
            experts=case.experts,
            expert=self.num_ranks,
            expert_tensor=1,
            topk=case.topk,
            dispatcher="alltoall",
            ranks_per_node=self.ranks_per_node,
        )
