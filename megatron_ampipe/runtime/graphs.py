"""CUDA graphs of a tape. Consecutive computed calls with fixed shapes are captured as one graph.

Says which calls those are, and keeps sets of graphs (:mod:`.graph_set`), one for each micro-batch in flight.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ampipe.runtime.block_functions import BlockFunctions
from megatron_ampipe.runtime.capturing import UsedAddresses
from megatron_ampipe.runtime.cuts import is_reduction, parts_of, starts_of_reductions
from megatron_ampipe.runtime.graph_set import CapturePlan, GraphSet, Run
from megatron_ampipe.runtime.steps import Differentiate, MicroBatchState, RunStage
from megatron_ampipe.runtime.tape import Call, Tape, Tapes
from megatron_ampipe.schedule import Direction, StageKind
from megatron_ampipe.schedule.kinds import NEEDED_IN_GRAPHS


def runs_of(tape: Tape, direction: Direction, kinds: Sequence[Collection[StageKind]]) -> dict[int, Run]:
    """The runs of a pass, by the position of their first call.

    Args:
        tape: The tape of the pass.
        direction: Of the pass.
        kinds: For each layer, the kinds that can be captured.
    """
    runs: list[list[Call]] = []
    plan, is_open = tape.stream_plan, False
    for call, waits in zip(tape.calls, plan.waits, strict=True):
        if not (call.steps and call.stage.kind in kinds[call.stage.layer]):
            is_open = False
            continue
        if not is_open or waits:
            runs.append([])
        runs[-1].append(call)
        is_open = call.position not in plan.records
    return {calls[0].position: Run(tuple(calls), direction) for calls in runs}


def runs_of_whole_pass(tape: Tape, direction: Direction, *, overlaps: bool) -> dict[int, Run]:
    """The runs of a pass that is captured as a whole, by the position of their first call.

    Args:
        tape: The tape of the pass.
        direction: Of the pass.
        overlaps: See :class:`CaptureOptions`.
    """
    wanted = starts_of_reductions(tape, overlaps=overlaps) if direction is Direction.BACKWARD else []
    return {calls[0].position: Run(calls, direction) for calls in parts_of(tape, wanted)}


def _stops(tape: Tape, runs: Collection[int]) -> list[Call]:
    """The calls of a whole pass at which the host acts (``CapturePlan.stops``)."""
    return [
        call
        for call in tape.calls
        if call.position in runs or call.ends or call.ends_half or is_reduction(call)
    ]


def _repeatable(tapes: Tapes, kinds: Sequence[Collection[StageKind]]) -> list[set[StageKind]]:
    """For each layer, those of the kinds whose steps a graph can repeat.

    Others are recomputed, save less than they compute, or compute gradients of weights apart; or they need
    another kind in a graph.
    """
    repeated = [set(layer_kinds) for layer_kinds in kinds]
    for tape in tapes.passes.values():
        for call in tape.calls:
            if not _is_repeatable(call):
                repeated[call.stage.layer].discard(call.stage.kind)
    for layer_kinds in repeated:
        for kind, needed in NEEDED_IN_GRAPHS.items():
            if needed not in layer_kinds:
                layer_kinds.discard(kind)
    return repeated


def _is_repeatable(call: Call) -> bool:
    if call.stage.is_recompute:
        return False
    for step in call.steps:
        if isinstance(step, RunStage):
            if step.recompute or not set(step.extras) <= {"sums"}:
                return False
        elif not isinstance(step, Differentiate):
            return False
    return True


def _slots_without_graph(tapes: Tapes, captured: Mapping[Direction, Collection[int]]) -> set[int]:
    """Slots that calls read or write which are not at these positions, of captured calls."""
    slots: set[int] = set()
    for direction, tape in tapes.passes.items():
        for call in tape.calls:
            if call.position not in captured[direction]:
                for step in call.steps:
                    slots.update(step.taken)
                    slots.update(step.given)
    return slots


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions:
    """What is captured of a pass, and what graphs of it depend on.

    Attributes:
        kinds: For each block, the kinds of stages that are captured; None to capture whole passes.
        warm_up: How many passes run without graphs first.
        generators: Returns the random generators that captured stages may advance.
        outside: Returns the tensors that captured stages use, other than their arguments, parameters, buffers
            and ``BlockState.outside``.
        version: Returns what else graphs depend on, which can change between two passes.
        overlaps: Whether reductions start while a backward pass runs, which is then cut (:mod:`.cuts`).
    """

    kinds: Sequence[Collection[StageKind]] | None
    warm_up: int
    generators: Callable[[], Iterable[torch.Generator]]
    outside: Callable[[], Iterable[Tensor]]
    version: Callable[[], Hashable]
    overlaps: bool = False


class TapeGraphs:
    """The CUDA graphs of the passes that run by the same tapes.

    Args:
        tapes: The tapes of both passes, compiled with ``keep_graph``.
        functions: The stage functions of each block.
        options: See :class:`CaptureOptions`.
    """

    def __init__(self, tapes: Tapes, functions: Sequence[BlockFunctions], options: CaptureOptions) -> None:
        self._options, self._warm_up = options, options.warm_up
        self.is_whole = options.kinds is None
        """Whether whole passes are captured."""
        if options.kinds is None:
            runs = {
                direction: runs_of_whole_pass(tape, direction, overlaps=options.overlaps)
                for direction, tape in tapes.passes.items()
            }
        else:
            repeated = _repeatable(tapes, options.kinds)
            runs = {direction: runs_of(tape, direction, repeated) for direction, tape in tapes.passes.items()}
        captured = {
            direction: {call.position for run in runs_of_pass.values() for call in run.calls}
            for direction, runs_of_pass in runs.items()
        }
        self._plan = CapturePlan(
            functions,
            options.generators,
            runs=runs,
            inner={direction: captured[direction] - runs[direction].keys() for direction in runs},
            others=_slots_without_graph(tapes, captured),
            is_whole=self.is_whole,
            stops={direction: _stops(tape, runs[direction]) for direction, tape in tapes.passes.items()},
        )
        kinds = options.kinds or [block_functions.stage_modules.keys() for block_functions in functions]
        self._addresses = UsedAddresses(functions, kinds, options.outside)
        self._sets: list[GraphSet] = []
        self._num_passes = 0

    def begin(self, state: MicroBatchState) -> GraphSet | None:
        """Get the graphs for a pass that begins; None while warming up."""
        self._num_passes += 1
        if self._warm_up:
            self._warm_up -= 1
            return None
        made_for = self._options.version(), self._addresses.now()
        oldest = self._num_passes - MAX_IDLE_PASSES
        self._sets = [
            graphs for graphs in self._sets if graphs.made_for == made_for and graphs.last_pass >= oldest
        ]
        graphs = next((graphs for graphs in self._sets if graphs.is_free), None)
        if graphs is None:
            graphs = GraphSet(self._plan, made_for)
            self._sets.append(graphs)
        graphs.begin(state)
        graphs.last_pass = self._num_passes
        return graphs

    def free(self) -> None:
        """Free the graphs: those that no micro-batch uses at once, others when their backward pass has ended.

        Their memory does not wait for the garbage collector, which Megatron's ``--manual-gc`` runs rarely.
        """
        self._sets.clear()


MAX_SHAPES = 2
"""For how many shapes of micro-batches a stack keeps graphs."""
MAX_IDLE_PASSES = 1024
"""After how many passes that did not use them graphs are freed. An iteration has fewer micro-batches: some
sets are needed only while a pipeline fills."""


class GraphCache:
    """The graphs of a stack, by all on which its tapes and the memory of its graphs depend.

    For every micro-batch that was in flight, graphs keep what its backward pass needs. So there are only
    those of the last shapes. A shape that returns later warms up again: if more shapes alternate than are
    kept, passes run without graphs, and none is captured in vain.

    Args:
        make: Makes the graphs for a key.
    """

    def __init__(self, make: Callable[..., TapeGraphs]) -> None:
        self._make = make
        self._kept: OrderedDict[tuple[Hashable, ...], TapeGraphs] = OrderedDict()
        """With the key that was used last at the end."""
        self._last_passes: dict[tuple[Hashable, ...], int] = {}
        self._num_passes = 0

    def get(self, *key: Hashable) -> TapeGraphs:
        """The graphs for the key of a pass that begins; those of other keys may be freed."""
        self._num_passes += 1
        graphs = self._kept.get(key)
        if graphs is None:
            graphs = self._kept[key] = self._make(*key)
        self._kept.move_to_end(key)
        self._last_passes[key] = self._num_passes
        oldest = next(iter(self._kept))
        is_idle = self._last_passes[oldest] + MAX_IDLE_PASSES < self._num_passes
        if is_idle or len(self._kept) > MAX_SHAPES:
            del self._last_passes[oldest]
            self._kept.pop(oldest).free()
        return graphs
