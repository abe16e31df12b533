"""CUDA graphs of a tape. Consecutive computed calls with fixed shapes are captured as one graph.

Says which calls those are, and keeps sets of graphs (:mod:`.graph_set`), one for each micro-batch in flight.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

import torch
from torch.nn import Module, Parameter

from megatron_ampipe.runtime.block_functions import BlockFunctions
from megatron_ampipe.runtime.graph_set import CapturePlan, GraphSet, Run
from megatron_ampipe.runtime.steps import Differentiate, MicroBatchState, RunStage
from megatron_ampipe.runtime.tape import Call, Tape, Tapes
from megatron_ampipe.schedule import Direction, StageKind
from megatron_ampipe.schedule.kinds import NEEDED_IN_GRAPHS


def runs_of(tape: Tape, kinds: Sequence[Collection[StageKind]]) -> dict[int, Run]:
    """The runs of a pass, by the position of their first call.

    Args:
        tape: The tape of the pass.
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
    return {calls[0].position: Run(tuple(calls)) for calls in runs}


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


class TapeGraphs:
    """The CUDA graphs of the passes that run by the same tapes.

    Args:
        tapes: The tapes of both passes, compiled with ``keep_graph``.
        functions: The stage functions of each block.
        kinds: For each block, the kinds of stages that are captured, as far as a graph can repeat them.
        warm_up: How many passes run without graphs first.
        generators: Returns the random generators that captured stages may advance.
    """

    def __init__(
        self,
        tapes: Tapes,
        functions: Sequence[BlockFunctions],
        kinds: Sequence[Collection[StageKind]],
        *,
        warm_up: int,
        generators: Callable[[], Iterable[torch.Generator]],
    ) -> None:
        kinds = _repeatable(tapes, kinds)
        self._warm_up = warm_up
        runs = {direction: runs_of(tape, kinds) for direction, tape in tapes.passes.items()}
        captured = {
            direction: {call.position for run in runs_of_pass.values() for call in run.calls}
            for direction, runs_of_pass in runs.items()
        }
        self._plan = CapturePlan(
            functions,
            generators,
            runs=runs,
            inner={direction: captured[direction] - runs[direction].keys() for direction in runs},
            others=_slots_without_graph(tapes, captured),
        )
        self._parameters: list[Parameter] = []
        """The parameters that graphs read."""
        self._buffer_modules: list[Module] = []
        for block_functions, block_kinds in zip(functions, kinds, strict=True):
            for kind in block_kinds:
                self._parameters += block_functions.stage_parameters.get(kind, ())
                self._buffer_modules += block_functions.buffer_modules.get(kind, ())
        self._sets: list[GraphSet] = []
        self._num_passes = 0

    def begin(self, state: MicroBatchState) -> GraphSet | None:
        """Get the graphs for a pass that begins; None while warming up."""
        self._num_passes += 1
        if self._warm_up:
            self._warm_up -= 1
            return None
        addresses, oldest = self._addresses(), self._num_passes - MAX_IDLE_PASSES
        self._sets = [
            graphs for graphs in self._sets if graphs.addresses == addresses and graphs.last_pass >= oldest
        ]
        graphs = next((graphs for graphs in self._sets if graphs.is_free), None)
        if graphs is None:
            graphs = GraphSet(self._plan, addresses)
            self._sets.append(graphs)
        graphs.begin(state)
        graphs.last_pass = self._num_passes
        return graphs

    def free(self) -> None:
        """Free the graphs: those that no micro-batch uses at once, others when their backward pass has ended.

        Their memory does not wait for the garbage collector, which Megatron's ``--manual-gc`` runs rarely.
        """
        self._sets.clear()

    def _addresses(self) -> list[int]:
        """Where everything is that graphs use and that other code can move to other memory."""
        gradients = [getattr(parameter, "main_grad", None) for parameter in self._parameters]
        buffers = [buffer for module in self._buffer_modules for buffer in module._buffers.values()]
        tensors = [*self._parameters, *gradients, *buffers]
        return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


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
