"""CUDA graphs of the passes of a step with partners: a chain, replayed in the order of its captures.

The backward pass of a micro-batch and the forward pass of the next one are one graph, which reads what the
graph before it has saved, and saves what the graph after it reads. No two sets of graphs can take turns
(:mod:`.graph_set`): the forward half of the second graph would have to save its tensors where the first graph
reads them, and a capture does not choose addresses.

So there is one graph for every pass of a step, in the order in which the step runs them, and all have one
memory pool. torch then gives memory that one pass has freed to the next captures, as within one long capture,
so a chain needs the memory of a step without graphs. That is safe because every step replays the graphs in
that order: at each launch, the pass is compared with the one that was captured. Nothing but the pool owns the
memory, so what a graph writes is copied before the next launch.

A step is first run without graphs and its passes are recorded, so that a step is captured or replayed only if
the whole of it can be. Graphs are freed and captured again if something that they use has changed, which is
looked up at the first pass of a step.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_ampipe.errors import BadInput
from megatron_ampipe.runtime.block_functions import BlockFunctions
from megatron_ampipe.runtime.capturing import (
    BlockLeaves,
    UsedAddresses,
    capturing,
    keeping_cached,
    quantizing_weights,
    wait_for_parameters,
)
from megatron_ampipe.runtime.graph_memory import without_memory
from megatron_ampipe.runtime.segment import GradientSums
from megatron_ampipe.runtime.steps import ZERO, MicroBatchState
from megatron_ampipe.runtime.tape import Tapes
from megatron_ampipe.schedule import Direction

MAX_CHAINS = 2
"""Graphs of how many kinds of steps are kept; steps can differ in their number of micro-batches."""
MAX_IDLE_STEPS = 256
"""After how many steps of other kinds graphs are freed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainOptions:
    """What graphs of the passes of a stack depend on.

    Attributes:
        warm_up: How many forward passes run without graphs first.
        generators: Returns the random generators that stages may advance.
        outside: Returns the tensors that stages use, other than their arguments, parameters, buffers and
            ``BlockState.outside``.
        version: Returns what else graphs depend on, which can change between two steps.
        is_current: Returns whether the tapes are still those of the stack.
    """

    warm_up: int
    generators: Callable[[], Iterable[torch.Generator]]
    outside: Callable[[], Iterable[Tensor]]
    version: Callable[[], Hashable]
    is_current: Callable[[], bool]


class StackPasses:
    """The passes of a stack by the same tapes; two are equal only if they are one object.

    Args:
        chains: The chains of the process.
        tapes: The tapes of both passes.
        functions: The stage functions of each block.
        options: See :class:`ChainOptions`.
    """

    def __init__(
        self,
        chains: GraphChains,
        tapes: Tapes,
        functions: Sequence[BlockFunctions],
        options: ChainOptions,
    ) -> None:
        self._chains = chains
        self.tapes, self.functions, self.options = tapes, functions, options
        kinds = [block_functions.stage_modules.keys() for block_functions in functions]
        self._addresses = UsedAddresses(functions, kinds, options.outside)

    def begin(self, state: MicroBatchState) -> ChainedPass | None:
        """Begin the passes of a micro-batch; None if no step is run that a chain could be of."""
        return self._chains.begin_pass(self, state)

    def made_for(self) -> Hashable:
        """On what graphs that are captured now depend."""
        return self.options.version(), self._addresses.now()

    @functools.cached_property
    def modules(self) -> tuple[Module, ...]:
        """The modules that the stages use, each once."""
        by_kind = [block_functions.stage_modules.values() for block_functions in self.functions]
        return tuple(dict.fromkeys(itertools.chain.from_iterable(itertools.chain.from_iterable(by_kind))))

    @functools.cached_property
    def results(self) -> dict[Direction, tuple[int, ...]]:
        """The slots that are read after a pass."""
        tapes = self.tapes
        finishing = [slot for op in tapes.finish for slot in op.slots]
        return {
            Direction.FORWARD: (tapes.output,),
            Direction.BACKWARD: tuple(dict.fromkeys([*finishing, tapes.gradient])),
        }


@dataclass(slots=True)
class ChainedPass:
    """The forward pass of a micro-batch through a stack, and its backward pass, in a step with a chain."""

    chains: GraphChains
    passes: StackPasses
    state: MicroBatchState
    step: int
    """Number of the step."""
    is_captured: bool
    """Whether both passes are graphs; else they are only recorded."""
    forward_position: int = -1
    """Place of the forward pass among the launches of the step; -1 before it."""


class Half(NamedTuple):
    """A pass that is launched, alone or with another one."""

    direction: Direction
    chained: ChainedPass

    @property
    def input_slot(self) -> int:
        """The slot of the tensor that it is given."""
        tapes = self.chained.passes.tapes
        return tapes.hidden if self.direction is Direction.FORWARD else tapes.above


class _Kind(NamedTuple):
    """What a launch is of, to compare steps."""

    halves: tuple[tuple[Direction, StackPasses, int], ...]
    """For each half also the place of the forward pass that a backward pass belongs to, else -1."""
    order: Hashable
    """How two halves are merged."""


class _Mode(Enum):
    """What is done with the passes of a step."""

    OFF = 0
    """They run without graphs, and are not recorded."""
    FIRST = 1
    """The first pass has not begun, which decides."""
    RECORD = 2
    CAPTURE = 3
    REPLAY = 4


@dataclass(slots=True)
class _Outside:
    """A static copy of a tensor of ``BlockState.outside``."""

    given: Tensor
    """The tensor that was copied last."""
    static: Tensor
    step: int
    """The last step in which it was used."""


@dataclass(slots=True)
class _Link:
    """A graph, and the Python side of its replay. Halves are by number."""

    graph: torch.cuda.CUDAGraph
    waiting: list[Module] = field(default_factory=list)
    """Modules of a forward half; their hooks wait for parameters."""
    inputs: list[Tensor] = field(default_factory=list)
    """For each half, the static tensor to which its input is copied."""
    outside: list[_Outside] = field(default_factory=list)
    """The static copies that a forward half reads."""
    results: list[tuple[int, int, Tensor | None]] = field(default_factory=list)
    """A half, a slot that is read afterwards, and what is in it: tensors that own no memory."""
    sums: list[tuple[int, int, Tensor, bool]] = field(default_factory=list)
    """Layer and number of a parameter of the backward half, the sum of its gradients, without ownership of
    its memory, and whether it is writable."""
    fused: list[tuple[int, int, Parameter]] = field(default_factory=list)
    """Layer and number of a parameter whose gradient was added to ``main_grad``; the parameter."""


class _Chain:
    """What is known of the steps of one kind, and their graphs."""

    def __init__(self) -> None:
        self.sequence: list[_Kind] = []
        """The launches of a step; empty until a step was recorded."""
        self.num_recorded = 0
        """Forward passes in the steps that were recorded."""
        self.last_step = 0
        self.made_for: dict[StackPasses, Hashable] = {}
        self.forget_graphs()

    def forget_graphs(self) -> None:
        """Free all graphs with their memory."""
        self.links: list[_Link] = []
        self.pool: object = None
        self._inputs: dict[tuple[object, ...], Tensor] = {}
        self._zero: Tensor | None = None
        self._leaves: dict[int, BlockLeaves] = {}
        self._outside: list[_Outside] = []
        self._cached: list[object] = []

    @property
    def stacks(self) -> list[StackPasses]:
        """All that is launched in a step, each once."""
        halves = itertools.chain.from_iterable(kind.halves for kind in self.sequence)
        return list(dict.fromkeys(passes for _, passes, _ in halves))

    @property
    def warms_up(self) -> bool:
        """Whether more steps are to be recorded before one is captured."""
        return not self.sequence or self.num_recorded < max(one.options.warm_up for one in self.stacks)

    def capture(self, halves: Sequence[Half], run: Callable[[], None], step: int) -> _Link:
        """Capture a launch: record its calls without running them."""
        if not self.links:
            self.pool = torch.cuda.graph_pool_handle()
        link = _Link(torch.cuda.CUDAGraph())
        for half in halves:
            self._bind(link, half, step)
        self._prepare(link, halves)
        with (
            self._on_leaves(halves),
            keeping_cached(self._functions_of(halves), self._cached),
            quantizing_weights(self._functions_of(halves)),
            capturing(link.graph, self.pool, halves[0].chained.passes.options.generators()),
        ):
            for half, static in zip(halves, link.inputs, strict=True):
                is_saved = half.direction is Direction.FORWARD
                # What the backward pass reads has to stay, while the next launch is given another input.
                half.chained.state.slots[half.input_slot] = static.clone() if is_saved else static
            run()
        self._keep_results(link, halves)
        self.links.append(link)
        return link

    def launch(self, link: _Link, halves: Sequence[Half], step: int) -> None:
        """Replay a graph with other inputs."""
        for half in halves:
            if half.direction is Direction.FORWARD:
                _copy_outside(link, half, step)
        self._prepare(link, halves)
        self.replay(link, halves)

    def replay(self, link: _Link, halves: Sequence[Half]) -> None:
        """Replay a graph that has its inputs, and fill the slots and sums that are read afterwards."""
        link.graph.replay()
        for place, slot, value in link.results:
            halves[place].chained.state.slots[slot] = value
        for half in halves:
            if half.direction is Direction.BACKWARD:
                sums = half.chained.state.sums
                for layer, number, total, is_writable in link.sums:
                    sums[layer].put(number, total, is_writable)
                for layer, number, parameter in link.fused:
                    parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]  # Megatron's
                    # A placeholder that nobody reads, as of Megatron's linear layers.
                    sums[layer].put(number, torch.empty_like(parameter), False)

    def _bind(self, link: _Link, half: Half, step: int) -> None:
        """Choose static tensors for all that a half reads of others."""
        state, passes = half.chained.state, half.chained.passes
        value: Tensor = state.slots[half.input_slot]
        key = half.direction, value.shape, value.dtype, value.device
        if key not in self._inputs:
            self._inputs[key] = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        link.inputs.append(self._inputs[key])
        if half.direction is Direction.BACKWARD:
            if self._zero is None:
                self._zero = torch.zeros((), device=value.device)
            state.slots[ZERO] = self._zero
            return
        link.waiting += passes.modules
        for tensor in state.blocks[0].outside:
            kept = next((one for one in self._outside if one.given is tensor), None)
            if kept is None:
                kept = _Outside(tensor, tensor.clone(), step)
                self._outside.append(kept)
            kept.step = step
            link.outside.append(kept)
        for block in state.blocks:
            block.outside = tuple([one.static for one in link.outside])

    def _prepare(self, link: _Link, halves: Sequence[Half]) -> None:
        """Wait for parameters, and copy the inputs."""
        wait_for_parameters(link.waiting)
        for half, static in zip(halves, link.inputs, strict=True):
            static.copy_(half.chained.state.slots[half.input_slot])

    def _keep_results(self, link: _Link, halves: Sequence[Half]) -> None:
        """Keep what is read after a launch, without ownership of its memory."""
        for place, (direction, chained) in enumerate(halves):
            for slot in chained.passes.results[direction]:
                value = chained.state.slots[slot]
                assert value is None or isinstance(value, Tensor), f"a pass ends with {value}"
                link.results.append((place, slot, None if value is None else without_memory(value)))
                del value
            if direction is Direction.FORWARD:
                continue
            for layer, functions in enumerate(chained.passes.functions):
                leaves, sums = self._leaves_of(functions), chained.state.sums[layer]
                for number, parameter in enumerate(functions.parameters.all):
                    total, is_writable = sums.entry(number)
                    if leaves.is_fused(number):
                        link.fused.append((layer, number, parameter))
                    elif total is not None:
                        link.sums.append((layer, number, without_memory(total), is_writable))
                    del total

    def _leaves_of(self, functions: BlockFunctions) -> BlockLeaves:
        """The leaves of a block, one set for all tapes: captured graphs of both passes refer to them."""
        if id(functions) not in self._leaves:
            self._leaves[id(functions)] = BlockLeaves(functions)
        return self._leaves[id(functions)]

    @contextlib.contextmanager
    def _on_leaves(self, halves: Sequence[Half]) -> Iterator[None]:
        """Replace the parameters of all blocks by leaves; restore them on exit."""
        sums_of: dict[int, list[GradientSums]] = {}
        for _, chained in halves:
            for functions, sums in zip(chained.passes.functions, chained.state.sums, strict=True):
                sums_of.setdefault(id(functions), []).append(sums)
        with contextlib.ExitStack() as stack:
            for functions in self._functions_of(halves):
                stack.enter_context(self._leaves_of(functions).in_place(sums_of[id(functions)]))
            yield

    def _functions_of(self, halves: Sequence[Half]) -> list[BlockFunctions]:
        """The stage functions of all blocks, each once."""
        functions = itertools.chain.from_iterable(chained.passes.functions for _, chained in halves)
        return list({id(one): one for one in functions}.values())


def _copy_outside(link: _Link, half: Half, step: int) -> None:
    """Copy what a forward half reads besides its input, if it is not what was copied last."""
    for kept, tensor in zip(link.outside, half.chained.state.blocks[0].outside, strict=True):
        if kept.given is not tensor:
            if kept.step == step:
                # The backward pass of an earlier micro-batch may still read it.
                raise _other_step("the rotary embedding differs between micro-batches of a step")
            kept.static.copy_(tensor)
            kept.given = tensor
        kept.step = step


def _other_step(rule: str) -> BadInput:
    remedy = "Train with --cuda-graph-impl none, or with the same micro-batches of one shape in every step."
    return BadInput("--cuda-graph-impl", "with --ampipe-partner", rule=rule, remedy=remedy)


class GraphChains:
    """The chains of a process, one for each kind of step, and the step that is run."""

    def __init__(self) -> None:
        self._chains: OrderedDict[Hashable, _Chain] = OrderedDict()
        """With the one that was used last at the end."""
        self._chain = _Chain()
        """Of the present step, if its mode is not ``OFF``."""
        self._mode = _Mode.OFF
        self._step = 0
        self._kind: Hashable = None
        self._recorded: list[_Kind] = []
        self._position = 0
        """How many passes of the step were launched."""

    def begin_step(self, kind: Hashable) -> None:
        """Begin the passes of a step, or of a part of one from which no pass is left when the next begins.

        Steps of one ``kind`` have the same passes. All passes of the step before have ended.
        """
        self.end_step()
        self._step += 1
        self._kind, self._mode = kind, _Mode.FIRST
        self._position = 0

    def end_step(self) -> None:
        """End a step whose passes have all been run; passes from here on run without graphs."""
        if self._mode is _Mode.RECORD:
            self._chain.sequence = self._recorded
            self._chain.num_recorded += sum(
                direction is Direction.FORWARD for kind in self._recorded for direction, _, _ in kind.halves
            )
        self.give_up_step()

    def give_up_step(self) -> None:
        """Forget a step that has failed, or whose passes are not those of a chain."""
        self._mode = _Mode.OFF
        self._recorded = []

    def pass_without_graph(self) -> None:
        """A pass of the step cannot be captured, so none is that comes after it."""
        if self._mode in (_Mode.CAPTURE, _Mode.REPLAY):
            raise _other_step("a pass of this step has other features than when the step was captured")
        self.give_up_step()

    def begin_pass(self, passes: StackPasses, state: MicroBatchState) -> ChainedPass | None:
        """Begin the passes of a micro-batch through a stack."""
        if self._mode is _Mode.FIRST:
            self._choose(passes)
        if self._mode is _Mode.OFF:
            return None
        is_captured = self._mode is not _Mode.RECORD
        return ChainedPass(self, passes, state, self._step, is_captured)

    def launch(self, halves: Sequence[Half], run: Callable[[], None], *, order: Hashable = None) -> bool:
        """Run a pass, or two together, as a graph; False if they run without one.

        Args:
            halves: A forward pass, a backward pass, or both.
            run: Runs all calls, to capture them.
            order: How the calls of two passes are merged.
        """
        if any(half.chained.step != self._step for half in halves):
            if any(half.chained.is_captured for half in halves):
                raise _other_step("a backward pass runs after the step of its forward pass")
            return False
        for direction, chained in halves:
            if direction is Direction.FORWARD:
                chained.forward_position = self._position
        described = tuple(
            (direction, chained.passes, chained.forward_position if direction is Direction.BACKWARD else -1)
            for direction, chained in halves
        )
        kind = _Kind(described, order)
        position = self._position
        self._position += 1
        if not halves[0].chained.is_captured:
            self._recorded.append(kind)
            return False
        chain = self._chain
        if position >= len(chain.sequence) or chain.sequence[position] != kind:
            raise _other_step(f"pass {position + 1} of this step is another one than when it was captured")
        if self._mode is _Mode.CAPTURE:
            link = chain.capture(halves, run, self._step)
            chain.replay(link, halves)
        else:
            chain.launch(chain.links[position], halves, self._step)
        return True

    def _choose(self, first: StackPasses) -> None:
        """Choose the chain of a step, and what is done with it, at its first pass."""
        key = self._kind, first
        chain = self._chains.setdefault(key, _Chain())
        self._chains.move_to_end(key)
        chain.last_step = self._step
        idle = [key for key, one in self._chains.items() if one.last_step + MAX_IDLE_STEPS < self._step]
        for idle_key in idle or list(self._chains)[:-MAX_CHAINS]:
            del self._chains[idle_key]
        if not all(one.options.is_current() for one in chain.stacks):
            chain = self._chains[key] = _Chain()
            chain.last_step = self._step
        self._chain = chain
        if chain.warms_up:
            chain.forget_graphs()
            self._mode = _Mode.RECORD
            return
        made_for = {one: one.made_for() for one in chain.stacks}
        is_complete = len(chain.links) == len(chain.sequence)
        if is_complete and chain.made_for == made_for:
            self._mode = _Mode.REPLAY
            return
        chain.forget_graphs()
        chain.made_for = made_for
        self._mode = _Mode.CAPTURE
