"""What ``ampipe bench`` tells each rank: plain data, no torch.

Made by the command, sent by ``measuring.rank_processes``, read by :mod:`.block_worker`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import ClassVar, Literal

from megatron_ampipe.schedule import KEEP, Exchange, of_chunks
from megatron_ampipe.tools.measuring.grid import Case, exchanges_of_case
from megatron_ampipe.tools.measuring.link import parse_link
from megatron_ampipe.tools.measuring.variant import CONTROL, STOCK, STOCK_GLOO, Cut, Variant

PEAK_PASSES = 2
"""Passes of each variant whose memory is watched. The highest counts: with threads, the overlap varies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchJob:
    """Blocks to measure, and how; a ``measuring.rank_job.BlockJob``.

    Attributes:
        cases: The blocks, one after another.
        schedules: Names of schedules.
        cuts: Into which chunks.
        link: As the user wrote it.
        num_ranks: Ranks over which the experts are spread.
        pretended: One process stands for all ranks; see ``measuring.emulation``.
        device: Where it runs.
        repeats: Timed passes of each variant.
        warmup: Passes of each variant before those.
        seed: Of weights and inputs.
        timeout_s: A collective fails after this time.
        rendezvous: File over which the ranks find each other.
        cores: One for each rank; empty when ranks are not pinned.
        planned: For each case, what the planner chose, for each of ``stacks``; empty where ``--planned`` was
            not given.
        layers: How many consecutive layers are one measurement, each with its own weights.
        stacks: How many of them share a schedule; 1 is block by block.
        memories: What the experts keep for their backward, as in ``Pipeline.memory``.
        exchanges: How the all-to-all groups copies of a token.
        wires: What rows become while they travel, as ``--ampipe-wire``; None for nothing else.
        gloo_all_to_all: Also measure Megatron's layers with gloo's own all-to-all.
    """

    worker: ClassVar[str] = "megatron_ampipe.tools.benchmark.block_worker"

    cases: tuple[Case, ...]
    schedules: tuple[str, ...]
    cuts: tuple[Cut, ...]
    link: str
    num_ranks: int
    pretended: bool
    device: Literal["cpu", "cuda"]
    repeats: int
    warmup: int
    seed: int
    timeout_s: float
    rendezvous: str
    cores: tuple[int, ...]
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
            found
            if (
                found := Variant(schedule, cut, stack=stack, memory=memory, exchange=exchange, wire=wire)
            ).pipeline.overlaps
            else Variant(schedule, cut, exchange=exchange)
            for schedule in self.schedules
            for cut in self.cuts
            for stack in self.stacks
            # In one chunk nothing is restored.
            for memory in (self.memories if cut.num_chunks > 1 else (KEEP,))
            if len(of_chunks(memory)) in (1, cut.backward_degree)
            for exchange in self.exchanges
            for wire in self.wires
            if exchange in useful
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
        nodes = parse_link(self.link).nodes
        return None if nodes is None else nodes.ranks_per_node

    def useful_exchanges(self, case: Case) -> tuple[Exchange, ...]:
        """Which exchanges can be measured in a case."""
        return exchanges_of_case(case, num_ranks=self.num_ranks, ranks_per_node=self.ranks_per_node)

    @property
    def num_processes(self) -> int:
        """How many processes there are."""
        return 1 if self.pretended else self.num_ranks

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> BenchJob:
        """Read what :meth:`to_json` wrote."""
        found = json.loads(line)
        found["cases"] = tuple(Case(**case) for case in found["cases"])
        found["cuts"] = tuple(map(Cut.from_fields, found["cuts"]))
        found["planned"] = tuple(tuple(map(Variant.from_fields, of_case)) for of_case in found["planned"])
        found["exchanges"] = tuple(map(Exchange, found["exchanges"]))
        for key in ("schedules", "cores", "stacks", "memories", "wires"):
            found[key] = tuple(found[key])
        return cls(**found)
