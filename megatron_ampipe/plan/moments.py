"""The moments at which the memory of a layer can peak, and the rows that are between stages at each of them.

A moment is a computing stage in the issue order of a schedule: which stages have ended by then, and how many
chunks of rows are between two stages. A communication lane starts a transfer before the one before it has
ended, so two of a lane are in flight, and hold what they send as well as what they receive.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_ampipe.schedule import (
    BlockFeatures,
    Direction,
    Pipeline,
    data_flow,
    issue_order,
    kinds,
    needs_of,
)
from megatron_ampipe.schedule.program import Program
from megatron_ampipe.schedule.saved import Saved
from megatron_ampipe.schedule.stage_kind import COMPUTE, StageKind

type Name = tuple[str, int | None]
"""A stage of the layer: the name of its kind, and its chunk."""

IN_FLIGHT = 2
"""Transfers of a lane that are in flight at most (``_MAX_IN_FLIGHT`` of ``runtime.executors``)."""

_PATH = (
    kinds.ROUTE,
    kinds.CONDENSE,
    kinds.DISPATCH,
    kinds.SPREAD,
    kinds.GATHER,
    kinds.EXPERT,
    kinds.SCATTER,
    kinds.COLLECT,
    kinds.COMBINE,
    kinds.EXPAND,
    kinds.MERGE,
)
"""The kinds that pass on rows of tokens, each to the next one of these that a block has."""
_RESTORING = (
    kinds.REPERMUTE,
    kinds.REDISPATCH,
    kinds.RESPREAD,
    kinds.LOAD_TOKENS,
    kinds.REGATHER,
    kinds.REBUILD,
    kinds.RESORT,
)
"""Those that bring rows back for the experts' backward; the last two take them."""
_GATHERING = frozenset(kind.name for kind in (kinds.GATHER, kinds.REGATHER))
_SORTING = frozenset(kind.name for kind in (kinds.SPREAD, kinds.COLLECT, kinds.RESPREAD))
"""Transfers that have their rows twice, in order of nodes and in order of ranks (``exchange.hops``)."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A computing stage while it runs.

    Attributes:
        kind: The name of its kind.
        chunk: Its chunk; None if it is of the whole sequence.
        ended: The stages that were issued before it.
        rows: Number of chunks whose rows are between two other stages, counted once for each copy.
        gathered: The same for rows of all ranks that share an expert.
    """

    kind: str
    chunk: int | None
    ended: frozenset[Name]
    rows: int
    gathered: int

    def has_ended(self, kind: StageKind, chunk: int | None) -> bool:
        """Whether a stage of this kind has ended: of the chunk, or of the whole sequence."""
        return (kind.name, chunk) in self.ended or (kind.name, None) in self.ended

    def number_ended(self, kind: StageKind) -> int:
        """Number of stages of this kind that have ended."""
        return sum(name == kind.name for name, _ in self.ended)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a chunk between two stages: what gives them, and where in the order they begin and end."""

    giver: str
    first: int
    end: int

    def exist_at(self, position: int) -> bool:
        return self.first < position < self.end


@functools.lru_cache(maxsize=512)
def moments(pipeline: Pipeline, features: BlockFeatures, direction: Direction) -> tuple[Moment, ...]:
    """The moments of one pass through a layer that runs alone, in issue order."""
    # What a partner adds, and a recompute, are other stages of the same kinds.
    trained = pipeline.trained(features)
    trained = replace(trained, saved=trained.saved._replace(block=Saved.KEEP))
    schedule = replace(pipeline, partnered=()).schedule_of((trained,))
    program = schedule.program(direction)
    order = issue_order(program, needs_of(schedule, (trained,), direction), host_waits=False)
    names = [(stage.kind.name, stage.chunk) for _, stage in order]
    twice = _SORTING
    if direction is Direction.BACKWARD and not pipeline.exchange.sends_every_copy:
        # Its gradients are received, and then copied next to zeros for rows that were not sent.
        twice |= {kinds.DISPATCH.name}
    between = _between_stages(program, trained, direction, names, twice)
    all_moments = []
    for position, (_, stage) in enumerate(order):
        if not stage.kind.lane.computes:
            continue
        here = [rows for rows in between if rows.exist_at(position)]
        gathered = sum(rows.giver in _GATHERING for rows in here)
        ended = frozenset(names[:position])
        all_moments.append(Moment(stage.kind.name, stage.chunk, ended, len(here) - gathered, gathered))
    return tuple(all_moments)


def _between_stages(
    program: Program,
    features: BlockFeatures,
    direction: Direction,
    names: Sequence[Name],
    twice: frozenset[str],
) -> list[_Rows]:
    """All rows that one stage gives to the next one, with the part of the order in which they exist.

    ``twice`` are the kinds of transfers that have another copy of them until they have ended.
    """
    positions = {name: position for position, name in enumerate(names)}
    ends = _ends_of_transfers(program, positions)
    degree = 1 + max((chunk for _, chunk in names if chunk is not None), default=0)
    rows = []
    for chunk in range(degree):
        for path in _paths(features.of_chunk(chunk, degree), direction):
            kinds_here = [kind for kind in path if (kind, chunk) in positions]
            places = [positions[kind, chunk] for kind in kinds_here]
            # After the last one nothing is given.
            for step, giver in enumerate(kinds_here[:-1]):
                taker = places[step + 1]
                after = places[step + 2] if step + 2 < len(places) else len(names)
                # A transfer has ended at the latest when the stage after it takes what it has received.
                end = min(ends[taker], after) if taker in ends else taker
                rows.append(_Rows(giver, places[step], end))
                if kinds_here[step + 1] in twice:
                    rows.append(_Rows(giver, taker, end))
    return rows


def _paths(features: BlockFeatures, direction: Direction) -> list[list[str]]:
    """The kinds that rows of a chunk go through in a pass, by name: values forward, gradients backward."""
    present = {kind.name for kind in data_flow(features).kinds}
    path = [kind.name for kind in _PATH if kind.name in present]
    if direction is Direction.FORWARD:
        return [path]
    restoring = [kind.name for kind in _RESTORING if kind.name in present]
    return [path[::-1], restoring]


def _ends_of_transfers(program: Program, positions: Mapping[Name, int]) -> dict[int, int]:
    """For the position of each transfer the one by which it has ended: a later transfer starts there."""
    ends = {}
    lanes: dict[str, list[int]] = defaultdict(list)
    for lane, stages in program.lanes:
        for stage in stages:
            if stage.kind.lane.computes or stage.kind.host_reads:
                continue
            position = positions[stage.kind.name, stage.chunk]
            if lane == COMPUTE:
                # It ends before the next stage of the lane begins.
                ends[position] = position + 1
            else:
                lanes[lane].append(position)
    for starts in lanes.values():
        for number, position in enumerate(starts):
            later = starts[number + IN_FLIGHT :]
            ends[position] = later[0] if later else len(positions)
    return ends
