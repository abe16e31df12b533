"""One pass of one micro-batch through the blocks that share a schedule, forward and backward.

The blocks are one autograd function, whose inside runs by a tape. They pass rows on chunk by chunk: a block
takes what the one below it has written so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_ampipe.runtime.block_functions import BlockState
from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.runtime.executors import Executor
from megatron_ampipe.runtime.moves import run_moves
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.reductions import Reductions
from megatron_ampipe.runtime.segment import BlockParameters, hand_over
from megatron_ampipe.runtime.steps import ZERO, Pass
from megatron_ampipe.runtime.streams import Crossing
from megatron_ampipe.runtime.tape import Call, Tapes
from megatron_ampipe.schedule import Direction, StageKind
from megatron_ampipe.schedule.kinds import REDUCE, REDUCE_EXPERTS

# S sequence rows, B batch, D hidden size.


class StackCall:
    """One forward pass through consecutive blocks and its backward.

    Args:
        blocks: The state of each layer; ``parameters`` are of each, and ``numbers`` Megatron's.
        tapes: What runs.
        executor: Runs it, and tells ``recorder`` of every stage.
        keep_graph: Whether there will be a backward pass.
        reductions: Of gradients, if stages of the backward pass start them.
    """

    def __init__(
        self,
        blocks: Sequence[BlockState],
        tapes: Tapes,
        executor: Executor,
        recorder: Recorder,
        *,
        numbers: Sequence[int],
        parameters: Sequence[BlockParameters],
        keep_graph: bool,
        reductions: Reductions | None = None,
    ) -> None:
        self._tapes, self._executor, self._recorder, self._numbers = tapes, executor, recorder, numbers
        self._reductions, self._keeps_graph, self._parameters = reductions, keep_graph, parameters
        self._state = Pass(tapes.num_slots, blocks, parameters, Crossing() if executor.host_waits else None)
        # How many reductions were asked for when the gradients were complete that a stage waits for.
        self._asked: dict[tuple[StageKind, int], int] = {}

    def run(self, hidden: Tensor) -> Tensor:
        """Run the blocks on this rank's rows ``[S, B, D]``, to ``[S, B, D]``; differentiable if the graph is
        kept."""
        if not self._keeps_graph:
            return self.forward(hidden)
        anchor = hidden.new_empty(0).requires_grad_()
        output: Tensor = _Blocks.apply(self, anchor, hidden, *self._parameters[0].others)
        return output

    def forward(self, hidden: Tensor) -> Tensor:
        state, tapes = self._state, self._tapes
        state.slots[tapes.hidden] = hidden.detach()

        def end(layer: int) -> None:
            if layer in tapes.again:
                state.run_again(layer)

        self._execute(Direction.FORWARD, end)
        if self._reductions is not None:
            self._reductions.expect(self)
        output: Tensor = state.slots[tapes.output]
        state.slots[tapes.output] = None
        return output

    def backward(self, gradient: Tensor) -> list[Tensor | None]:
        """From the gradient of the output to those of ``hidden`` and the other parameters of the first layer.

        Those of later layers, and of the feed-forward half of the first one, are complete before the pass
        ends, and are handed to their accumulation nodes then: the hooks there start their reduction.
        """
        state, tapes = self._state, self._tapes
        state.slots[tapes.above] = gradient
        state.slots[ZERO] = torch.zeros((), device=gradient.device)
        del gradient
        self._note_asked(REDUCE, len(state.blocks) - 1)

        def end(layer: int) -> None:
            if layer:
                self._hand_over(layer, half=False)
            self._note_asked(REDUCE, layer - 1)

        def end_half(layer: int) -> None:
            self._hand_over(layer, half=True)
            self._note_asked(REDUCE_EXPERTS, layer)

        self._execute(Direction.BACKWARD, end, end_half)
        if self._reductions is not None:
            self._reductions.passed(self)
        run_moves(tapes.finish, state.slots)
        hidden: Tensor = state.slots[tapes.gradient]
        assert hidden is not None, "no stage has taken what the block was given"
        state.slots.clear()
        return [hidden, *self._gradients(0, half=False)[1]]

    def _gradients(self, layer: int, *, half: bool) -> tuple[Sequence[Parameter], list[Tensor | None]]:
        """The parameters of the feed-forward half of a layer, or all others, and their gradients."""
        parameters, sums = self._parameters[layer], self._state.sums[layer]
        chosen = parameters.feed_forward if half else parameters.others
        first = 0 if half else len(parameters.feed_forward)
        return chosen, [sums.take(number) for number in range(first, first + len(chosen))]

    def _hand_over(self, layer: int, *, half: bool) -> None:
        parameters, gradients = self._gradients(layer, half=half)
        # No name for the iterator: it would keep the last gradient, which would then be copied.
        trained = [one for one, gradient in zip(parameters, gradients, strict=True) if gradient is not None]
        gradients[:] = [gradient for gradient in gradients if gradient is not None]
        if trained:
            hand_over(trained, gradients)

    def _note_asked(self, kind: StageKind, layer: int) -> None:
        if self._reductions is not None:
            self._asked[kind, layer] = self._reductions.mark

    def _execute(
        self, direction: Direction, end: Callable[[int], None], end_half: Callable[[int], None] | None = None
    ) -> None:
        state, tape = self._state, self._tapes.passes[direction]

        def run(call: Call) -> Transfer | None:
            if not call.steps and call.stage.kind.of_parameters:
                assert self._reductions is not None, "this pass was not given what its schedule reduces"
                return self._reductions.start_until(self._asked[call.stage.kind, call.stage.layer])
            transfer = None
            for step in call.steps:
                try:
                    transfer = step.run(state)
                except Exception as error:
                    names, slots = self._tapes.names, state.slots
                    shapes = [
                        f"{names[slot]} {list(slots[slot].shape)}"
                        for slot in dict.fromkeys((*step.taken, *step.given))
                        if isinstance(slots[slot], Tensor)
                    ]
                    text = f"{step.text(names)}\nthere are {', '.join(shapes) or 'no tensors'}"
                    error.add_note(f"{direction} pass, call {call.position}: {text}")
                    raise
            if call.ends_half and end_half is not None:
                end_half(call.stage.layer)
            if call.ends:
                end(call.stage.layer)
            return transfer

        self._recorder.enter(self._numbers, direction)
        # Once for all segments. All else works on tensors without a graph.
        with self._recorder.passes.timed(direction), torch.set_grad_enabled(self._keeps_graph):
            self._executor.execute(tape, run, self._recorder, state.crossing)
        with_the_pass = set(range(len(state.blocks))) - {call.stage.layer for call in tape.calls if call.ends}
        for layer in sorted(with_the_pass, reverse=direction is Direction.BACKWARD):
            end(layer)


class _Blocks(torch.autograd.Function):
    """The autograd node of a call."""

    @staticmethod
    def forward(ctx, call: StackCall, anchor: Tensor, hidden: Tensor, *_: Parameter) -> Tensor:
        ctx.call = call
        return call.forward(hidden)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.call is None:
            raise RuntimeError(
                "an AMPipe block was differentiated twice; its graph is gone after the first time"
            )
        call, ctx.call = ctx.call, None
        return None, None, *call.backward(gradient)
