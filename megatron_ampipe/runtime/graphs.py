"""CUDA graphs of a tape: runs of computed calls with fixed shapes, each of which the host launches as one.

A graph works on the memory with which it was captured. So every micro-batch in flight has a set of graphs.
What one of them leaves for another stays where it is until the set is used again. What others read is copied
from there, and what a graph takes from others is copied to it. All graphs share the memory of these, and of
what exists only inside of one, because they run one after another on one stream.

A graph repeats operations of the device, and no Python. What else the calls do is noted when they are
captured, and done again at every replay: which slots they fill, the sums of gradients, what stages leave in
the state of their block, hooks that wait for parameters.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_ampipe.errors import BadInput
from megatron_ampipe.runtime.block_functions import BlockFunctions
from megatron_ampipe.runtime.segment import Segment
from megatron_ampipe.runtime.steps import Differentiate, Pass, RunStage, Step
from megatron_ampipe.runtime.tape import Call, Tape, Tapes
from megatron_ampipe.schedule import Direction, StageKind


@dataclass(frozen=True, slots=True)
class Run:
    """Calls of a tape, one after another, that are captured as one graph.

    Their stream waits for another one before the first call at most, and others wait for the last at most.
    """

    calls: tuple[Call, ...]

    @property
    def steps(self) -> Iterator[Step]:
        """Of all calls."""
        for call in self.calls:
            yield from call.steps

    @property
    def reads(self) -> set[int]:
        """Slots that they can read."""
        return {slot for step in self.steps for slot in (*step.taken, *step.given)}

    @property
    def changes(self) -> set[int]:
        """Slots that they can fill or empty."""
        freed = {slot for step in self.steps for slot in (*step.frees, *step.drops)}
        return self.reads | freed


def runs_of(tape: Tape, kinds: Sequence[Collection[StageKind]]) -> dict[int, Run]:
    """The runs of a pass, by the position of their first call.

    Args:
        tape: Of the pass.
        kinds: Of each layer, those that can be captured.
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


def _require_fixed(tapes: Tapes, kinds: Sequence[Collection[StageKind]]) -> None:
    """Raise :class:`BadInput` for a stage whose steps do more than a graph can."""
    for tape in tapes.passes.values():
        for call in tape.calls:
            if call.stage.kind not in kinds[call.stage.layer]:
                continue
            for step in call.steps:
                plain = isinstance(step, RunStage) and not step.recompute and set(step.extras) <= {"sums"}
                if not (plain or isinstance(step, Differentiate)) or call.stage.again:
                    raise BadInput(
                        "--cuda-graph-impl",
                        f"stage {call.stage}",
                        rule="what runs again, or leaves gradients of weights to others, is not captured",
                        remedy="Use --cuda-graph-impl none.",
                    )


@dataclass(slots=True)
class _Captured:
    """A graph, and what Python has to do around its replay."""

    graph: torch.cuda.CUDAGraph
    waiting: list[Module]
    """Modules that are called: their hooks wait for parameters."""
    inputs: list[tuple[int, Tensor]] = field(default_factory=list)
    """Slots, and the static tensors to which what is in them is copied."""
    expected: list[tuple[int, object]] = field(default_factory=list)
    """Slots, and what of this set, or None, has to be in them."""
    results: list[tuple[int, object]] = field(default_factory=list)
    """Slots, and what is in them afterwards."""
    copied: list[tuple[int, Tensor]] = field(default_factory=list)
    """Slots, and of what a copy is in them afterwards: tensors that do not own their memory."""
    sums: list[tuple[int, int, Tensor | None, bool]] = field(default_factory=list)
    """Layer and number of a parameter, its sum afterwards, and whether that can be written to."""
    fused: list[tuple[int, int, Parameter]] = field(default_factory=list)
    """Layer and number of a parameter whose gradient was added to ``main_grad``."""
    left: list[tuple[int, StageKind, int, object]] = field(default_factory=list)
    """Layer, kind and chunk of a stage, and what it has left in the state of the block."""


class TapeGraphs:
    """The graphs of the passes by one tape.

    Args:
        tapes: Of both passes, with a graph.
        functions: Of each block.
        kinds: Of each block, the kinds of stages that are captured.
        warm_up: How many passes run without graphs first.
        generators: Says which generators captured stages may change.
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
        _require_fixed(tapes, kinds)
        self.functions, self.kinds, self._warm_up = functions, kinds, warm_up
        self.generators = generators
        self.runs = {direction: runs_of(tape, kinds) for direction, tape in tapes.passes.items()}
        captured = {
            direction: {call.position for run in runs.values() for call in run.calls}
            for direction, runs in self.runs.items()
        }
        self.inner = {direction: captured[direction] - runs.keys() for direction, runs in self.runs.items()}
        """Positions of calls that run with an earlier one."""
        self.others = {
            slot
            for direction, tape in tapes.passes.items()
            for call in tape.calls
            if call.position not in captured[direction]
            for step in call.steps
            for slot in (*step.taken, *step.given)
        }
        """Slots that calls which are not captured read or write."""
        self._sets: list[GraphSet] = []

    def begin(self, state: Pass) -> GraphSet | None:
        """The graphs for a pass that begins; None while warming up."""
        if self._warm_up:
            self._warm_up -= 1
            return None
        self._sets = [graphs for graphs in self._sets if not graphs.is_stale]
        graphs = next((graphs for graphs in self._sets if graphs.is_free), None)
        if graphs is None:
            graphs = GraphSet(self)
            self._sets.append(graphs)
        graphs.begin(state)
        return graphs


class GraphSet:
    """The graphs for one micro-batch in flight at a time."""

    def __init__(self, of_tape: TapeGraphs) -> None:
        self._of_tape = of_tape
        self._captured: dict[tuple[Direction, int], _Captured] = {}
        self._own: dict[int, object] = {id(None): None}
        """What the graphs leave for one another, by ``id``, and None."""
        self._fused: set[Parameter] = set()
        self._outside: list[tuple[Tensor, Tensor]] = []
        """What the blocks read besides: as it was given last, and the static copy."""
        self._owner: weakref.ref[Pass] | None = None
        # Leaves that captured graphs alone use: the accumulation nodes of the parameters themselves belong to
        # a stream that is not captured.
        self._leaves = [tuple(map(_leaf, functions.parameters.all)) for functions in of_tape.functions]
        self._addresses = [
            (parameter, parameter.data_ptr())
            for functions, kinds in zip(of_tape.functions, of_tape.kinds, strict=True)
            for kind in kinds
            for parameter in functions.stage_parameters.get(kind, ())
        ]

    @property
    def is_free(self) -> bool:
        """Whether no micro-batch uses it: also after a pass that was never differentiated."""
        return self._owner is None or self._owner() is None

    @property
    def is_stale(self) -> bool:
        """Whether parameters were moved to other memory."""
        return any(parameter.data_ptr() != address for parameter, address in self._addresses)

    def begin(self, state: Pass) -> None:
        """A micro-batch uses the graphs from here on."""
        self._owner = weakref.ref(state)
        given = state.blocks[0].outside
        if not self._outside:
            self._outside = [(tensor, tensor.clone()) for tensor in given]
        for number, tensor in enumerate(given):
            last, static = self._outside[number]
            if tensor is not last:
                static.copy_(tensor)
                self._outside[number] = tensor, static
        for block in state.blocks:
            block.outside = tuple([static for _, static in self._outside])

    def end(self) -> None:
        """The backward pass of the micro-batch has ended."""
        self._owner = None

    def run_call(self, direction: Direction, call: Call, state: Pass) -> bool:
        """Run a call with those of its run; False if it is in no run."""
        if call.position in self._of_tape.inner[direction]:
            return True
        run = self._of_tape.runs[direction].get(call.position)
        if run is None:
            return False
        captured = self._captured.get((direction, call.position))
        if captured is None:
            captured = self._captured[direction, call.position] = self._capture(run, state)
        else:
            self._prepare(captured, state)
        captured.graph.replay()
        self._finish(captured, state)
        return True

    def _capture(self, run: Run, state: Pass) -> _Captured:
        """Record what the calls of a run do, without running them."""
        slots, of_layer = state.slots, self._of_tape.functions
        stages = [step.stage for step in run.steps]
        forward = isinstance(next(run.steps), RunStage)
        modules = [of_layer[stage.layer].stage_modules.get(stage.kind, ()) for stage in stages if forward]
        captured = _Captured(torch.cuda.CUDAGraph(), list(dict.fromkeys(itertools.chain(*modules))))
        _wait_for_parameters(captured.waiting)
        before = {slot: slots[slot] for slot in run.changes}
        for slot in run.reads:
            value = slots[slot]
            if id(value) in self._own:
                captured.expected.append((slot, value))
                continue
            assert isinstance(value, Tensor), f"a graph cannot be given {value}"
            if state.crossing is not None:
                state.crossing.note_use([value])
            slots[slot] = static = _inputs.take(value)
            captured.inputs.append((slot, static.copy_(value)))
        self._record(captured, run, state)
        for slot, value in before.items():
            result = slots[slot]
            if result is value:
                continue
            if isinstance(result, Tensor) and slot in self._of_tape.others:
                captured.copied.append((slot, _without_memory(result)))
                # Only the copy remains.
                slots[slot] = None
                continue
            if isinstance(result, Segment):
                result.is_captured = True
            captured.results.append((slot, result))
        kept = [result for _, result in captured.results] + [total for *_, total, _ in captured.sums]
        self._own.update((id(value), value) for value in kept)
        del before, result, value
        _inputs.give_back([static for _, static in captured.inputs if id(static) not in self._own])
        for stage in stages if forward else ():
            left = state.blocks[stage.layer].left_by(stage.kind, stage.chunk)
            if left is not None:
                captured.left.append((stage.layer, stage.kind, stage.chunk, left))
        return captured

    def _record(self, captured: _Captured, run: Run, state: Pass) -> None:
        """Capture the calls of a run, and note what they have done with the sums of gradients."""
        of_number = {
            (step.stage.layer, number): self._of_tape.functions[step.stage.layer].parameters.all[number]
            for step in run.steps
            if isinstance(step, Differentiate)
            for number in step.parameters
        }
        for (layer, number), parameter in of_number.items():
            is_own = parameter in self._fused or id(state.sums[layer].entry(number)[0]) in self._own
            assert is_own, "a sum of gradients that the graphs did not begin"
        # Transformer Engine's attention advances a generator also without dropout.
        for generator in self._of_tape.generators():
            captured.graph.register_generator_state(generator)
        torch.cuda.synchronize()
        with self._on_leaves(state), torch.cuda.stream(_capture_stream()):
            captured.graph.capture_begin(pool=_pool(), capture_error_mode="thread_local")
            try:
                for step in run.steps:
                    step.run(state)
            finally:
                captured.graph.capture_end()
        for (layer, number), parameter in of_number.items():
            if getattr(self._leaves[layer][number], "grad_added_to_main_grad", False):
                captured.fused.append((layer, number, parameter))
                self._fused.add(parameter)
            else:
                captured.sums.append((layer, number, *state.sums[layer].entry(number)))

    def _prepare(self, captured: _Captured, state: Pass) -> None:
        """Before a replay."""
        slots, crossing = state.slots, state.crossing
        _wait_for_parameters(captured.waiting)
        for slot, value in captured.expected:
            assert slots[slot] is value, "a pass differs from the one that was captured"
        for slot, static in captured.inputs:
            value = slots[slot]
            if crossing is not None:
                crossing.note_use([value])
            static.copy_(value)

    def _finish(self, captured: _Captured, state: Pass) -> None:
        """After a replay."""
        slots = state.slots
        for slot, value in captured.results:
            slots[slot] = value
        for slot, static in captured.copied:
            slots[slot] = static.clone()
        for layer, number, total, is_writable in captured.sums:
            state.sums[layer].put(number, total, is_writable)
        for layer, number, parameter in captured.fused:
            parameter.grad_added_to_main_grad = True
            # As Megatron's linear layers: nobody reads it.
            state.sums[layer].put(number, torch.empty_like(parameter), False)
        for layer, kind, chunk, left in captured.left:
            state.blocks[layer].leave(kind, chunk, left)

    @contextlib.contextmanager
    def _on_leaves(self, state: Pass) -> Iterator[None]:
        """Within it, modules have the leaves in place of their parameters, and so have the sums."""
        replaced: list[tuple[Module, str, Parameter]] = []
        for functions, leaves, sums in zip(self._of_tape.functions, self._leaves, state.sums, strict=True):
            of_parameter = dict(zip(functions.parameters.all, leaves, strict=True))
            modules = dict.fromkeys(itertools.chain.from_iterable(functions.stage_modules.values()))
            for module in modules:
                for name, parameter in module._parameters.items():
                    if parameter in of_parameter:
                        replaced.append((module, name, parameter))
                        module._parameters[name] = of_parameter[parameter]
            sums.parameters = leaves
            for leaf in leaves:
                if hasattr(leaf, "grad_added_to_main_grad"):
                    leaf.grad_added_to_main_grad = False
        try:
            yield
        finally:
            for module, name, parameter in replaced:
                module._parameters[name] = parameter
            for functions, sums in zip(self._of_tape.functions, state.sums, strict=True):
                sums.parameters = functions.parameters.all


class _Inputs:
    """Static tensors to which what a graph takes is copied: those that it does not keep are shared by all."""

    def __init__(self) -> None:
        self._free: defaultdict[tuple[object, ...], list[Tensor]] = defaultdict(list)
        self._taken: dict[int, int] = {}

    def take(self, like: Tensor) -> Tensor:
        """A tensor that no other input of the same graph has."""
        free = self._free[like.shape, like.dtype, like.device]
        static = free.pop() if free else torch.empty(like.shape, dtype=like.dtype, device=like.device)
        self._taken[id(static)] = _references(static)
        return static

    def give_back(self, tensors: Sequence[Tensor]) -> None:
        """Those whose memory nobody else has begun to refer to can be used by other graphs."""
        for static in tensors:
            if _references(static) == self._taken[id(static)]:
                self._free[static.shape, static.dtype, static.device].append(static)
        self._taken.clear()


_inputs = _Inputs()


def _references(tensor: Tensor) -> int:
    """How many tensors have the memory of a tensor."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def _without_memory(tensor: Tensor) -> Tensor:
    """The tensor at its address, whoever has that memory later."""
    memory = tensor.untyped_storage()
    borrowed = torch._C._construct_storage_from_data_pointer(
        memory.data_ptr(), memory.device, memory.nbytes()
    )
    with torch.no_grad():
        return tensor.new_empty(0).set_(borrowed, tensor.storage_offset(), tensor.size(), tensor.stride())


def _leaf(parameter: Parameter) -> Parameter:
    """Another leaf with the memory and the attributes of a parameter."""
    leaf = Parameter(parameter.data)
    vars(leaf).update(vars(parameter))
    return leaf


def _wait_for_parameters(modules: Sequence[Module]) -> None:
    """What the modules do before each of their calls (Megatron's ``--overlap-param-gather``)."""
    for module in modules:
        if module._forward_pre_hooks:
            for hook in module._forward_pre_hooks.values():
                hook(module, ())


@functools.cache
def _capture_stream() -> torch.cuda.Stream:
    """Of all captures: torch does not capture on the stream on which Megatron trains."""
    return torch.cuda.Stream()


@functools.cache
def _pool() -> tuple[int, int]:
    """The memory of all graphs."""
    return torch.cuda.graph_pool_handle()
