"""One pass of one micro-batch through the blocks that share a schedule.

:class:`StackCall` holds everything of one forward pass and its backward, so that several micro-batches can be
in flight in one layer. Blocks pass rows on chunk by chunk: a block takes what the one below it has written so
far. Called by :mod:`.autograd_block`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from megatron_ampipe.runtime.block_call import BlockCall
from megatron_ampipe.runtime.block_stages import BlockStages, CompiledSchedule
from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.runtime.crossing import Crossing
from megatron_ampipe.runtime.executors import Executor
from megatron_ampipe.runtime.gradients import Gradients
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.reductions import Reductions
from megatron_ampipe.runtime.segment import GradientSums
from megatron_ampipe.runtime.values import Values
from megatron_ampipe.schedule import Direction, Stage, StageKind
from megatron_ampipe.schedule.kinds import REDUCE, REDUCE_EXPERTS

# S sequence rows, B batch, D hidden size.


class StackCall:
    """One forward pass through consecutive blocks and its backward.

    Args:
        stages: What each layer computes.
        schedule: In which order.
        executor: On what.
        recorder: Told of every stage.
        numbers: Of the layers in Megatron, for the recorder.
        keep_graph: Whether :meth:`backward` will be called.
        reductions: Of gradients, which stages of the backward pass start; None where no schedule has such
            stages.
    """

    def __init__(
        self,
        stages: Sequence[BlockStages],
        schedule: CompiledSchedule,
        executor: Executor,
        recorder: Recorder,
        *,
        numbers: Sequence[int],
        keep_graph: bool,
        reductions: Reductions | None = None,
    ) -> None:
        self._reductions = reductions if keep_graph else None
        self._schedule, self._executor, self._recorder, self._numbers = schedule, executor, recorder, numbers
        self._crossing = Crossing() if executor.crosses_streams else None
        self._blocks = [
            BlockCall(of_layer, block, self._crossing, keep_graph=keep_graph)
            for of_layer, block in zip(stages, schedule.blocks, strict=True)
        ]

    def forward(self, hidden: Tensor) -> Tensor:
        """Run the forward program on ``hidden`` ``[S, B, D]``."""
        below: Tensor | Values = hidden.detach()
        for block in self._blocks:
            below = block.begin_forward(below)
        last = self._blocks[-1].values

        def end(layer: int) -> None:
            self._blocks[layer].end_forward()

        self._execute(Direction.FORWARD, end)
        if self._reductions is not None:
            self._reductions.expect(self)
        assert last.output is not None
        return last.output

    def backward(self, gradient: Tensor, finished: Callable[[int, GradientSums, bool], None]) -> Tensor:
        """Run the backward program.

        Args:
            gradient: Of the output, ``[S, B, D]``.
            finished: Called on the thread that computes with each layer, from the last to the first, and its
                sums: with True as soon as those of the feed-forward half are complete, if the layer has one,
                and with False when all others are.

        Returns:
            The gradient of ``hidden``.
        """
        above: Tensor | Gradients = gradient
        for block in reversed(self._blocks):
            above = block.begin_backward(above, device=gradient.device)
        first = self._blocks[0].gradients
        # How many reductions were asked for when the gradients were complete that a stage waits for.
        self._asked: dict[tuple[StageKind, int], int] = {}
        self._note_asked(REDUCE, len(self._blocks) - 1)

        def end(layer: int) -> None:
            block = self._blocks[layer]
            if layer:
                block.end_backward()
            finished(layer, block.sums, False)
            self._note_asked(REDUCE, layer - 1)

        def end_half(layer: int) -> None:
            finished(layer, self._blocks[layer].sums, True)
            self._note_asked(REDUCE_EXPERTS, layer)

        self._execute(Direction.BACKWARD, end, end_half)
        if self._reductions is not None:
            self._reductions.passed(self)
        hidden = first.hidden
        self._blocks[0].end_backward()
        return hidden

    def _note_asked(self, kind: StageKind, layer: int) -> None:
        if self._reductions is not None:
            self._asked[kind, layer] = self._reductions.mark

    def _reduce(self, kind: StageKind, layer: int) -> Transfer:
        assert self._reductions is not None, "this pass was not given what its schedule reduces"
        return self._reductions.start_until(self._asked[kind, layer])

    def _execute(
        self, direction: Direction, end: Callable[[int], None], end_half: Callable[[int], None] | None = None
    ) -> None:
        schedule = self._schedule
        parts, ends = schedule.parts[direction], schedule.ends[direction]

        def run(stage: Stage) -> Transfer | None:
            if stage.kind.of_parameters:
                return self._reduce(stage.kind, stage.layer)
            as_in = Direction.FORWARD if stage.computes_values else direction
            transfer = self._blocks[stage.layer].run(parts[stage], as_in)
            if end_half is not None and stage in schedule.halves:
                end_half(stage.layer)
            if stage in ends:
                end(stage.layer)
            return transfer

        self._recorder.enter(self._numbers, direction)
        with self._recorder.passes.timed(direction):
            self._executor.execute(
                schedule.order[direction], schedule.needs[direction], run, self._recorder, self._crossing
            )
        with_the_pass = set(range(len(self._blocks))) - {stage.layer for stage in ends}
        for layer in sorted(with_the_pass, reverse=direction is Direction.BACKWARD):
            end(layer)
