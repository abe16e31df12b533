"""One micro-batch in the blocks that share a schedule: its forward pass and its backward pass.

All blocks are one autograd function, which runs a tape. They exchange rows chunk by chunk: a block reads the
rows that the block below it has written so far.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_ampipe.runtime.block_functions import BlockState
from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.runtime.cuts import alone
from megatron_ampipe.runtime.executors import Executor
from megatron_ampipe.runtime.graph_chain import ChainedPass, Half, StackPasses
from megatron_ampipe.runtime.graph_set import GraphSet
from megatron_ampipe.runtime.graphs import TapeGraphs
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.reductions import Reductions
from megatron_ampipe.runtime.segment import BlockParameters, accumulate_param_grads
from megatron_ampipe.runtime.slot_ops import run_slot_ops
from megatron_ampipe.runtime.steps import ZERO, MicroBatchState
from megatron_ampipe.runtime.streams import CommMemory
from megatron_ampipe.runtime.tape import Call, Tapes
from megatron_ampipe.schedule import Direction, StageKind
from megatron_ampipe.schedule.kinds import REDUCE, REDUCE_EXPERTS

# S sequence rows, B batch, D hidden size.


class PassRunner(Protocol):
    """Runs the passes of a call, possibly with another micro-batch's pass (:class:`~.partners.Partners`)."""

    def forward(self, call: StackCall, hidden: Tensor) -> Tensor:
        """See :meth:`StackCall.forward`."""

    def backward(self, call: StackCall, gradient: Tensor) -> list[Tensor | None]:
        """See :meth:`StackCall.backward`."""


@dataclass(slots=True)
class PassRun:
    """What runs the passes of a stack.

    Attributes:
        executor: Runs the tapes.
        recorder: Records every stage.
        numbers: Megatron's layer number of each block.
        reductions: The gradient reductions, if stages of the backward pass start them.
        partners: Runs a pass together with one of another micro-batch; None to run each alone.
    """

    executor: Executor
    recorder: Recorder
    numbers: Sequence[int]
    reductions: Reductions | None = None
    partners: PassRunner | None = None


class StackCall:
    """One forward pass through consecutive blocks and its backward.

    Args:
        blocks: The state of each block.
        tapes: The tapes of both passes.
        run: What runs them.
        parameters: The parameters of each block.
        keep_graph: Whether there will be a backward pass.
        graphs: CUDA graphs of the tapes, or what a chain of graphs of a step needs of them, if any.
    """

    def __init__(
        self,
        blocks: Sequence[BlockState],
        tapes: Tapes,
        run: PassRun,
        *,
        parameters: Sequence[BlockParameters],
        keep_graph: bool,
        graphs: TapeGraphs | StackPasses | None = None,
    ) -> None:
        self.tapes, self.executor, self.recorder = tapes, run.executor, run.recorder
        self.numbers, self.partners = run.numbers, run.partners
        self._keeps_graph, self._parameters = keep_graph, parameters
        self._reductions = run.reductions if keep_graph else None
        comm_memory = CommMemory() if run.executor.host_waits else None
        self.state = MicroBatchState(tapes.num_slots, blocks, parameters, comm_memory)
        self._graphs: GraphSet | None = None
        self.chained: ChainedPass | None = None
        """Of a step with partners whose passes are graphs, or are recorded to be captured later."""
        # Whether both passes are graphs, in place of some of their calls.
        self._is_whole = False
        if isinstance(graphs, TapeGraphs):
            self._graphs = graphs.begin(self.state)
            self._is_whole = self._graphs is not None and graphs.is_whole
        elif graphs is not None:
            self.chained = graphs.begin(self.state)
            self._is_whole = self.chained is not None and self.chained.is_captured
        # How many reductions had been requested when a reducing stage's gradients were complete.
        self._asked: dict[tuple[StageKind, int], int] = {}

    def run(self, hidden: Tensor) -> Tensor:
        """Run the blocks on this rank's rows ``[S, B, D]``, to ``[S, B, D]``. Differentiable if the graph is
        kept."""
        if not self._keeps_graph:
            return self.forward(hidden)
        anchor = hidden.new_empty(0).requires_grad_()
        output: Tensor = _Blocks.apply(self, anchor, hidden, *self._parameters[0].others)
        return output

    def forward(self, hidden: Tensor) -> Tensor:
        """Run the forward pass alone."""
        self.begin_forward(hidden)
        self._execute(Direction.FORWARD)
        return self.end_forward()

    def backward(self, gradient: Tensor) -> list[Tensor | None]:
        """Run the backward pass: the gradients of ``hidden`` and of the first layer's attention half.

        The feed-forward half is experts and MLPs; the router and all other parameters count to attention.
        The gradients of later layers, and of the first layer's feed-forward half, are complete earlier. They
        are handed to their accumulation nodes at that time, whose hooks start the reductions.
        """
        self.begin_backward(gradient)
        del gradient
        self._execute(Direction.BACKWARD)
        return self.end_backward()

    def begin_forward(self, hidden: Tensor) -> None:
        """Set the input, before the first call of the forward pass."""
        self.state.slots[self.tapes.hidden] = hidden.detach()

    def end_forward(self) -> Tensor:
        """Return the output, after the last call of the forward pass."""
        state, tapes = self.state, self.tapes
        self._end_layers(Direction.FORWARD)
        if self._reductions is not None:
            self._reductions.expect(self)
        output: Tensor = state.slots[tapes.output]
        state.slots[tapes.output] = None
        # Later graphs write to the memory of this one.
        return output.clone() if self._graphs is not None or self._is_whole else output

    def begin_backward(self, gradient: Tensor) -> None:
        """Set the gradient of the output, before the first call of the backward pass."""
        slots = self.state.slots
        # Detached: gradients that a pipeline stage receives require one (Megatron's p2p_communication).
        slots[self.tapes.above] = gradient.detach()
        slots[ZERO] = torch.zeros((), device=gradient.device)
        for sums in self.state.sums:
            sums.find_hooks()
        self._note_asked(REDUCE, len(self.state.blocks) - 1)

    def end_backward(self) -> list[Tensor | None]:
        """Return the gradients of :meth:`backward`, after the last call of the backward pass."""
        state, tapes = self.state, self.tapes
        self._end_layers(Direction.BACKWARD)
        if self._reductions is not None:
            self._reductions.passed(self)
        run_slot_ops(tapes.finish, state.slots)
        hidden: Tensor = state.slots[tapes.gradient]
        assert hidden is not None, "no stage has read the input of the block"
        state.slots.clear()
        if self._graphs is not None or self._is_whole:
            hidden = hidden.clone()
        if self._graphs is not None:
            self._graphs.end()
        return [hidden, *self._gradients(0, half=False)[1]]

    def _gradients(self, layer: int, *, half: bool) -> tuple[Sequence[Parameter], list[Tensor | None]]:
        """The parameters of a layer and their gradients: of its feed-forward half, or all others."""
        parameters, sums = self._parameters[layer], self.state.sums[layer]
        chosen = parameters.feed_forward if half else parameters.others
        first = 0 if half else len(parameters.feed_forward)
        return chosen, [sums.take(number) for number in range(first, first + len(chosen))]

    def _accumulate_param_grads(self, layer: int, *, half: bool) -> None:
        parameters, gradients = self._gradients(layer, half=half)
        # No name for the zip: it would keep the last gradient alive, which would then be copied.
        trained = [p for p, gradient in zip(parameters, gradients, strict=True) if gradient is not None]
        gradients[:] = [gradient for gradient in gradients if gradient is not None]
        if trained:
            accumulate_param_grads(trained, gradients)

    def _note_asked(self, kind: StageKind, layer: int) -> None:
        if self._reductions is not None:
            self._asked[kind, layer] = self._reductions.mark

    def run_call(self, direction: Direction, call: Call) -> Transfer | None:
        """Run one call of a pass. A transfer is started and returned."""
        state = self.state
        if not call.steps and call.stage.kind.of_parameters:
            assert self._reductions is not None, "a schedule with reductions runs without them"
            return self._reductions.start_until(self._asked[call.stage.kind, call.stage.layer])
        transfer, steps = None, call.steps
        if self._graphs is not None and self._graphs.run_call(direction, call, state, self._capture_calls):
            steps = ()
        for step in steps:
            try:
                transfer = step.run(state)
            except Exception as error:
                names, slots = self.tapes.names, state.slots
                shapes = [
                    f"{names[slot]} {list(slots[slot].shape)}"
                    for slot in dict.fromkeys((*step.taken, *step.given))
                    if isinstance(slots[slot], Tensor)
                ]
                text = f"{step.text(names)}\nthere are {', '.join(shapes) or 'no tensors'}"
                error.add_note(f"{direction} pass, call {call.position}: {text}")
                raise
        if call.ends or call.ends_half:
            self.end_call(direction, call)
        return transfer

    def end_call(self, direction: Direction, call: Call) -> None:
        """Do what follows a call on the host: hand over gradients, and end its layer."""
        if call.ends_half:
            self._accumulate_param_grads(call.stage.layer, half=True)
            self._note_asked(REDUCE_EXPERTS, call.stage.layer)
        if call.ends:
            self._end_layer(direction, call.stage.layer)

    def _end_layer(self, direction: Direction, layer: int) -> None:
        """Called when all stages of a layer have run."""
        if direction is Direction.FORWARD:
            if layer in self.tapes.for_recompute and not self._is_whole:
                blocks = self.state.blocks
                blocks[layer] = blocks[layer].for_recompute()
            return
        if layer:
            self._accumulate_param_grads(layer, half=False)
        self._note_asked(REDUCE, layer - 1)

    def _end_layers(self, direction: Direction) -> None:
        """End the layers that no call ends, after the pass."""
        left = set(range(len(self.state.blocks))) - self.tapes.passes[direction].ended
        for layer in sorted(left, reverse=direction is Direction.BACKWARD):
            self._end_layer(direction, layer)

    def _execute(self, direction: Direction) -> None:
        state, recorder = self.state, self.recorder
        recorder.enter(self.numbers, direction)
        # Set once for all segments; all else works on tensors without a graph.
        with recorder.passes.timed(direction), torch.set_grad_enabled(self._keeps_graph):
            tape, run = self.tapes.passes[direction], functools.partial(self.run_call, direction)
            if self.chained is not None:
                capture = functools.partial(self._capture_calls, direction, tape.calls)
                if self.chained.chains.launch([Half(direction, self.chained)], capture):
                    for call in tape.calls:
                        self.end_call(direction, call)
                    return
            if not self._is_whole:
                self.executor.execute(tape, run, recorder, state.comm_memory)
                return
            assert self._graphs is not None, "a whole pass without its graphs"
            for call in self._graphs.stops(direction):
                # It launches the graph that begins there. The host ends layers after the launch.
                transfer = run(call)
                if transfer is not None and transfer.begin is not None:
                    # Reductions. Megatron waits for them; the next graph runs meanwhile.
                    transfer.begin()

    def _capture_calls(self, direction: Direction, calls: Sequence[Call]) -> None:
        """Run calls of a pass, without what the host does at the end of a layer."""
        run = functools.partial(self.run_call, direction)
        graphs, self._graphs = self._graphs, None
        try:
            self.executor.execute(alone(calls), run, self.recorder, self.state.comm_memory)
        finally:
            self._graphs = graphs
        if direction is Direction.FORWARD:
            self.prepare_recompute()

    def prepare_recompute(self) -> None:
        """After the capture of a forward pass, make the states of recomputed blocks."""
        blocks = self.state.blocks
        for layer in self.tapes.for_recompute:
            blocks[layer] = blocks[layer].for_recompute()


class _BlocksContext(Protocol):
    """What a node of :class:`_Blocks` saves, until it is differentiated."""

    call: StackCall | None


class _Blocks(torch.autograd.Function):
    """The autograd node of a :class:`StackCall`."""

    @staticmethod
    def forward(
        ctx: _BlocksContext, call: StackCall, anchor: Tensor, hidden: Tensor, *_: Parameter
    ) -> Tensor:
        ctx.call = call
        return call.forward(hidden) if call.partners is None else call.partners.forward(call, hidden)

    @staticmethod
    def backward(ctx: _BlocksContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.call is None:
            raise RuntimeError(
                "an AMPipe block was differentiated twice; its graph is gone after the first time"
            )
        call, ctx.call = ctx.call, None
        if call.partners is not None:
            return None, None, *call.partners.backward(call, gradient)
        return None, None, *call.backward(gradient)
