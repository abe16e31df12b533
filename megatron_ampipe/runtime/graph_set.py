"""A set of CUDA graphs: captures runs of calls, and replays them for one micro-batch in flight at a time.

A run is consecutive computed calls, whose steps are captured one after another; or a whole pass, or a part
of one (:mod:`.cuts`), which an executor runs at capture. Its streams then fork from the capturing one, and
join it in the end: what they wait for becomes edges of the graph.

A graph uses the memory with which it was captured, so every micro-batch in flight has its own set of graphs.
Tensors that one graph of a set writes for another stay in place until the set is used again. Tensors that
other calls write or read are copied into and out of static memory.

A set shares no memory with another. torch gives memory that one capture has freed to later captures of the
same pool, so what one graph saves for its backward pass can be where an earlier graph has temporary tensors.
That is safe only if graphs are replayed in the order of their captures. Graphs of one set are; those of
several sets are not, because their order is that of the micro-batches in flight.

A graph replays device operations, but no Python. All else that the calls do is recorded at capture and done
again at every replay: the slots that they fill, the sums of gradients, the state that stages store in their
block, and hooks that wait for parameters.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_ampipe.runtime.block_functions import BlockFunctions, BlockState
from megatron_ampipe.runtime.capturing import BlockLeaves, capturing, keeping_cached, wait_for_parameters
from megatron_ampipe.runtime.graph_memory import StaticInputs, without_memory
from megatron_ampipe.runtime.segment import Segment
from megatron_ampipe.runtime.steps import Differentiate, MicroBatchState, Step
from megatron_ampipe.runtime.streams import CommMemory
from megatron_ampipe.runtime.tape import Call
from megatron_ampipe.schedule import Direction, StageKind

CaptureCalls = Callable[[Direction, Sequence[Call]], None]
"""Runs calls of a pass with an executor, without what the host does after them."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive calls of a tape that are captured as one graph.

    Their stream waits for other streams only before the first call; others wait only for the last call.
    """

    calls: tuple[Call, ...]
    direction: Direction

    @property
    def steps(self) -> Iterator[Step]:
        """The steps of all calls."""
        for call in self.calls:
            yield from call.steps

    @property
    def reads(self) -> set[int]:
        """Slots that the calls may read."""
        return {slot for step in self.steps for slot in (*step.taken, *step.given)}

    @property
    def changes(self) -> set[int]:
        """Slots that the calls may fill or empty."""
        freed = {slot for step in self.steps for slot in (*step.frees, *step.drops)}
        return self.reads | freed


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """What is captured: the same for all sets of graphs of a tape.

    Attributes:
        functions: The stage functions of each block.
        generators: Returns the random generators that captured stages may advance.
        runs: For each pass, the runs by the position of their first call.
        inner: For each pass, the positions of calls that an earlier call's graph includes.
        others: Slots that calls without a graph read or write.
        is_whole: Whether the runs of a pass are all of its calls, which an executor runs at capture.
        stops: Of whole passes, the calls at which the host acts: it launches a graph, hands over gradients,
            or starts reductions.
    """

    functions: Sequence[BlockFunctions]
    generators: Callable[[], Iterable[torch.Generator]]
    runs: Mapping[Direction, Mapping[int, Run]]
    inner: Mapping[Direction, Collection[int]]
    others: Collection[int]
    is_whole: bool = False
    stops: Mapping[Direction, Sequence[Call]] = field(default_factory=dict)


@dataclass(slots=True)
class _Captured:
    """A graph, and the Python side of its replay."""

    graph: torch.cuda.CUDAGraph
    waiting: list[Module]
    """Modules that the calls use; their hooks wait for parameters."""
    inputs: list[tuple[int, Tensor]] = field(default_factory=list)
    """Slots that are read, and the static tensors to which their contents are copied."""
    expected: list[tuple[int, object]] = field(default_factory=list)
    """Slots that are read, and the objects of this set (or None) that they must hold."""
    results: list[tuple[int, object]] = field(default_factory=list)
    """Slots that are written, and the objects that they hold afterwards."""
    copied: list[tuple[int, Tensor]] = field(default_factory=list)
    """Slots that get a copy of a graph's tensor: that tensor, without ownership of its memory."""
    sums: list[tuple[int, int, Tensor | None, bool]] = field(default_factory=list)
    """Layer and number of a parameter, the sum of its gradients, and whether that is writable."""
    fused: list[tuple[int, int, Parameter]] = field(default_factory=list)
    """Layer and number of a parameter whose gradient was added to ``main_grad``; the parameter."""
    exported: list[tuple[int, StageKind, int | None, object]] = field(default_factory=list)
    """Layer, kind and chunk of a stage, and what it has stored in the state of the block."""
    left: tuple[Sequence[BlockState], CommMemory | None] | None = None
    """Of a whole forward pass: the states of the blocks afterwards, and the memory that several streams use.
    The capture of the backward pass reads both."""


class _Objects:
    """A set of objects by identity: tensors are compared element by element, other objects by contents."""

    def __init__(self) -> None:
        # The objects are kept, so no other object can get the same id.
        self._by_id: dict[int, object] = {}

    def __contains__(self, thing: object) -> bool:
        return id(thing) in self._by_id

    def add(self, thing: object) -> None:
        """Keep an object."""
        self._by_id[id(thing)] = thing


class GraphSet:
    """A set of graphs, which serves one micro-batch in flight at a time.

    Args:
        plan: What is captured.
        made_for: On what its graphs depend, such as where parameters are now.
    """

    def __init__(self, plan: CapturePlan, made_for: Hashable) -> None:
        self._plan, self.made_for = plan, made_for
        self.last_pass = 0
        """The number of the pass that used it last."""
        self._pool = torch.cuda.graph_pool_handle()
        self._inputs = StaticInputs()
        self._captured: dict[tuple[Direction, int], _Captured] = {}
        self._own = _Objects()
        """None, and the objects that graphs of this set write for each other."""
        self._own.add(None)
        self._fused: set[Parameter] = set()
        self._outside: list[tuple[Tensor, Tensor]] = []
        """``BlockState.outside``: the tensors given last, and their static copies."""
        self._owner: weakref.ref[MicroBatchState] | None = None
        self._leaves = [BlockLeaves(functions) for functions in plan.functions]
        self._cached: list[object] = []
        """Outputs of modules that cache them: kept, because graphs read them."""

    @property
    def is_free(self) -> bool:
        """Whether no micro-batch uses the set; true also after a pass that was never differentiated."""
        return self._owner is None or self._owner() is None

    def stops(self, direction: Direction) -> Sequence[Call]:
        """The calls of a whole pass at which the host acts."""
        return self._plan.stops[direction]

    def begin(self, state: MicroBatchState) -> None:
        """Reserve the graphs for a micro-batch."""
        self._owner = weakref.ref(state)
        outside = state.blocks[0].outside
        if not self._outside:
            self._outside = [(tensor, tensor.clone()) for tensor in outside]
        for number, tensor in enumerate(outside):
            last, static = self._outside[number]
            if tensor is not last:
                static.copy_(tensor)
                self._outside[number] = tensor, static
        for block in state.blocks:
            block.outside = tuple([static for _, static in self._outside])

    def end(self) -> None:
        """Free the graphs; the backward pass of the micro-batch has ended."""
        self._owner = None

    def run_call(
        self,
        direction: Direction,
        call: Call,
        state: MicroBatchState,
        capture_calls: CaptureCalls,
    ) -> bool:
        """Run the graph that begins with a call, or nothing if an earlier graph includes it; else False.

        Args:
            direction: Of the pass.
            call: The call.
            state: The state of the micro-batch.
            capture_calls: Runs calls of a pass, if graphs are of whole passes.
        """
        if call.position in self._plan.inner[direction]:
            return True
        run = self._plan.runs[direction].get(call.position)
        if run is None:
            return False
        captured = self._captured.get((direction, call.position))
        if captured is None:
            captured = self._capture(run, state, capture_calls)
            self._captured[direction, call.position] = captured
        else:
            self._prepare(captured, state)
        captured.graph.replay()
        self._finish(captured, state)
        return True

    def _capture(self, run: Run, state: MicroBatchState, capture_calls: CaptureCalls) -> _Captured:
        """Capture a run: record its calls without running them."""
        captured = _Captured(torch.cuda.CUDAGraph(), self._modules_of(run))
        wait_for_parameters(captured.waiting)
        before = {slot: state.slots[slot] for slot in run.changes}
        self._bind_inputs(captured, run, state)
        self._record(captured, run, state, capture_calls)
        self._keep_results(captured, before, state)
        # Inputs that nobody refers to are shared with other graphs.
        del before
        self._inputs.give_back()
        if run.direction is Direction.FORWARD:
            self._keep_block_state(captured, run, state)
        return captured

    def _modules_of(self, run: Run) -> list[Module]:
        """The modules that the calls of a forward pass use, each once."""
        if run.direction is Direction.BACKWARD:
            return []
        modules: dict[Module, None] = {}
        for step in run.steps:
            functions = self._plan.functions[step.stage.layer]
            modules.update(dict.fromkeys(functions.stage_modules.get(step.stage.kind, ())))
        return list(modules)

    def _bind_inputs(self, captured: _Captured, run: Run, state: MicroBatchState) -> None:
        """Replace what the calls read from other calls by static tensors."""
        slots = state.slots
        for slot in run.reads:
            value = slots[slot]
            if value in self._own:
                captured.expected.append((slot, value))
                continue
            assert isinstance(value, Tensor), f"a graph cannot be given {value}"
            if state.comm_memory is not None:
                state.comm_memory.record_use([value])
            static = self._inputs.take(value)
            static.copy_(value)
            captured.inputs.append((slot, static))
            slots[slot] = static.detach()

    def _keep_results(
        self, captured: _Captured, before: Mapping[int, object], state: MicroBatchState
    ) -> None:
        """Keep what the calls have left in slots, and the sums of gradients."""
        slots = state.slots
        for slot, value in before.items():
            result = slots[slot]
            if result is value:
                continue
            if isinstance(result, Tensor) and slot in self._plan.others:
                captured.copied.append((slot, without_memory(result)))
                # Only the tensor without ownership remains, so graphs can reuse the memory.
                slots[slot] = None
                continue
            if isinstance(result, Segment):
                result.is_captured = True
            captured.results.append((slot, result))
            self._own.add(result)
        for _, _, total, _ in captured.sums:
            self._own.add(total)

    def _keep_block_state(self, captured: _Captured, run: Run, state: MicroBatchState) -> None:
        """Keep what the stages of a forward pass have stored in the state of their block."""
        if self._plan.is_whole:
            captured.left = tuple(state.blocks), state.comm_memory
            return
        for step in run.steps:
            stage = step.stage
            exported = state.blocks[stage.layer].export_state(stage.kind, stage.chunk)
            if exported is not None:
                captured.exported.append((stage.layer, stage.kind, stage.chunk, exported))

    def _record(
        self, captured: _Captured, run: Run, state: MicroBatchState, capture_calls: CaptureCalls
    ) -> None:
        """Run the calls under capture, and record what they have done with the sums of gradients."""
        trained = self._trained_in(run)
        for (layer, number), parameter in trained.items():
            total, _ = state.sums[layer].entry(number)
            is_own = parameter in self._fused or total in self._own
            assert is_own, "the sum of a gradient was not created by a graph of this set"
        with (
            self._on_leaves(state),
            keeping_cached(self._plan.functions, self._cached),
            capturing(captured.graph, self._pool, self._plan.generators()),
        ):
            if self._plan.is_whole:
                capture_calls(run.direction, run.calls)
            else:
                for step in run.steps:
                    step.run(state)
        for (layer, number), parameter in trained.items():
            if self._leaves[layer].is_fused(number):
                captured.fused.append((layer, number, parameter))
                self._fused.add(parameter)
            else:
                total, is_writable = state.sums[layer].entry(number)
                captured.sums.append((layer, number, total, is_writable))

    def _trained_in(self, run: Run) -> dict[tuple[int, int], Parameter]:
        """The parameters whose gradients the calls compute, by layer and number."""
        trained: dict[tuple[int, int], Parameter] = {}
        for step in run.steps:
            if isinstance(step, Differentiate):
                layer = step.stage.layer
                parameters = self._plan.functions[layer].parameters.all
                trained.update({(layer, number): parameters[number] for number in step.parameters})
        return trained

    def _prepare(self, captured: _Captured, state: MicroBatchState) -> None:
        """Do what comes before a replay: wait for parameters, check slots, copy inputs."""
        slots, comm_memory = state.slots, state.comm_memory
        wait_for_parameters(captured.waiting)
        for slot, value in captured.expected:
            assert slots[slot] is value, "a pass differs from the one that was captured"
        for slot, static in captured.inputs:
            value = slots[slot]
            if comm_memory is not None:
                comm_memory.record_use([value])
            static.copy_(value)

    def _finish(self, captured: _Captured, state: MicroBatchState) -> None:
        """Do what comes after a replay: fill slots, set sums of gradients and block state."""
        slots = state.slots
        for slot, value in captured.results:
            slots[slot] = value
        for slot, static in captured.copied:
            slots[slot] = static.clone()
        for layer, number, total, is_writable in captured.sums:
            state.sums[layer].put(number, total, is_writable)
        for layer, number, parameter in captured.fused:
            parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]  # an attribute of Megatron's
            # A placeholder that nobody reads, as of Megatron's linear layers.
            state.sums[layer].put(number, torch.empty_like(parameter), False)
        for layer, kind, chunk, left in captured.exported:
            state.blocks[layer].import_state(kind, chunk, left)
        if captured.left is not None:
            blocks, state.comm_memory = captured.left
            state.blocks[:] = blocks

    @contextlib.contextmanager
    def _on_leaves(self, state: MicroBatchState) -> Iterator[None]:
        """Replace the parameters by the leaves; restore them on exit."""
        with contextlib.ExitStack() as stack:
            for leaves, sums in zip(self._leaves, state.sums, strict=True):
                stack.enter_context(leaves.in_place([sums]))
            yield
