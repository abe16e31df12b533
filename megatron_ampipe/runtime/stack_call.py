"""One pass of one micro-batch through the blocks that share a schedule, forward and backward.

Blocks pass rows on chunk by chunk: a block takes what the one below it has written so far. Called by
:mod:`.autograd_block`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.runtime.crossing import Crossing
from megatron_ampipe.runtime.executors import Executor
from megatron_ampipe.runtime.pass_state import BlockState, Pass
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.reductions import Reductions
from megatron_ampipe.runtime.segment import BlockParameters, GradientSums
from megatron_ampipe.runtime.steps import ZERO, Step
from megatron_ampipe.runtime.tape import Call, Tapes
from megatron_ampipe.schedule import Direction, Stage, StageKind
from megatron_ampipe.schedule.kinds import REDUCE, REDUCE_EXPERTS

# S sequence rows, B batch, D hidden size.


class StackCall:
    """One forward pass through consecutive blocks and its backward.

    Args:
        blocks: The state of each layer.
        tapes: What runs, and in which order.
        executor: On what.
        recorder: Told of every stage.
        numbers: Of the layers in Megatron, for the recorder.
        parameters: Of each layer.
        keep_graph: Whether there will be a backward pass.
        reductions: Of gradients, which stages of the backward pass start; None where no schedule has such
            stages, or nothing is differentiated.
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
        self._reductions, self._keeps_graph = reductions, keep_graph
        self._state = Pass(
            tapes.num_slots,
            blocks,
            parameters,
            Crossing() if executor.crosses_streams else None,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Run the forward pass on ``hidden`` ``[S, B, D]``."""
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

    def backward(self, gradient: Tensor, finished: Callable[[int, GradientSums, bool], None]) -> Tensor:
        """Run the backward pass.

        Args:
            gradient: Of the output, ``[S, B, D]``.
            finished: Called on the thread that computes with each layer, from the last to the first, and its
                sums: with True as soon as those of the feed-forward half are complete, if the layer has one,
                and with False when all others are.

        Returns:
            The gradient of ``hidden``.
        """
        state, tapes = self._state, self._tapes
        state.slots[tapes.above] = gradient
        state.slots[ZERO] = torch.zeros((), device=gradient.device)
        # How many reductions were asked for when the gradients were complete that a stage waits for.
        self._asked: dict[tuple[StageKind, int], int] = {}
        self._note_asked(REDUCE, len(state.blocks) - 1)
        del gradient

        def end(layer: int) -> None:
            finished(layer, state.sums[layer], False)
            self._note_asked(REDUCE, layer - 1)

        def end_half(layer: int) -> None:
            finished(layer, state.sums[layer], True)
            self._note_asked(REDUCE_EXPERTS, layer)

        self._execute(Direction.BACKWARD, end, end_half)
        if self._reductions is not None:
            self._reductions.passed(self)
        for move in tapes.finish:
            move(state.slots)
        hidden: Tensor = state.slots[tapes.gradient]
        assert hidden is not None, "no stage has taken what the block was given"
        state.slots.clear()
        return hidden

    def _note_asked(self, kind: StageKind, layer: int) -> None:
        if self._reductions is not None:
            self._asked[kind, layer] = self._reductions.mark

    def _reduce(self, stage: Stage) -> Transfer:
        assert self._reductions is not None, "this pass was not given what its schedule reduces"
        return self._reductions.start_until(self._asked[stage.kind, stage.layer])

    def _described(self, step: Step) -> str:
        """A step, and the sizes of what it has not freed yet."""
        names, slots = self._tapes.names, self._state.slots
        sizes = [
            f"{names[slot]} {list(slots[slot].shape)}"
            for slot in dict.fromkeys((*step.taken, *step.given))
            if isinstance(slots[slot], Tensor)
        ]
        return "\n".join([step.text(names), *([f"there are {', '.join(sizes)}"] if sizes else [])])

    def _execute(
        self, direction: Direction, end: Callable[[int], None], end_half: Callable[[int], None] | None = None
    ) -> None:
        state, tape = self._state, self._tapes.passes[direction]

        def run(call: Call) -> Transfer | None:
            if not call.steps and call.stage.kind.of_parameters:
                return self._reduce(call.stage)
            transfer = None
            for step in call.steps:
                try:
                    transfer = step.run(state)
                except Exception as error:
                    error.add_note(f"{direction} pass, call {call.position}: {self._described(step)}")
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
