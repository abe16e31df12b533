"""One pass of one micro-batch through a block: what runs when the schedule says so, forward and backward.

:class:`BlockCall` holds everything of one forward pass and its backward, so that several micro-batches can be
in flight in one layer. It runs stages of any kind by the table of :mod:`megatron_ampipe.schedule.kinds`:
takes their inputs, calls their function, keeps their outputs. Called by :mod:`.autograd_block`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_ampipe.runtime.block_stages import BlockStages, CompiledSchedule
from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.runtime.crossing import Crossing
from megatron_ampipe.runtime.executors import Executor
from megatron_ampipe.runtime.gradients import Gradients
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.segment import GradientSums, Segment
from megatron_ampipe.runtime.values import BlockLayout, KeyValueRows, Note, Values
from megatron_ampipe.schedule import Direction, Layout, Stage, StageKind

# S sequence rows, B batch, D hidden size.


class BlockCall:
    """One forward pass through a block and its backward.

    Args:
        stages: What the layer computes.
        schedule: In which order.
        executor: On what.
        recorder: Told of every stage.
        layer: Layer number for the recorder.
        keep_graph: Whether :meth:`backward` will be called.
    """

    def __init__(
        self,
        stages: BlockStages,
        schedule: CompiledSchedule,
        executor: Executor,
        recorder: Recorder,
        *,
        layer: int,
        keep_graph: bool,
    ) -> None:
        self._stages, self._schedule, self._executor, self._recorder = stages, schedule, executor, recorder
        self._layer, self._keep_graph = layer, keep_graph
        self._layout = BlockLayout(schedule.flow, stages.chunks, schedule.whole)
        self._keys = KeyValueRows(self._layout, keep_graph=keep_graph)
        self._segments: dict[Stage, Segment] = {}
        self._crossing = Crossing() if executor.crosses_streams else None
        self._note: Note = _nothing if self._crossing is None else self._crossing.note_use
        self._crossed_inputs: dict[Stage, tuple[StorageWeakRef, ...]] = {}
        self._sums = GradientSums()

    def forward(self, hidden: Tensor) -> Tensor:
        """Run the forward program on ``hidden`` ``[S, B, D]``."""
        self._values = Values(self._layout, hidden.detach(), self._keys, note=self._note)
        self._execute(Direction.FORWARD)
        output = self._values.output
        assert output is not None
        del self._values
        return output

    def backward(self, gradient: Tensor) -> tuple[Tensor, GradientSums]:
        """Run the backward program.

        Args:
            gradient: Of the output, ``[S, B, D]``.

        Returns:
            The gradient of ``hidden`` and the sums of the parameters' gradients.
        """
        self._gradients = Gradients(self._layout, gradient, self._keys, note=self._note)
        self._execute(Direction.BACKWARD)
        hidden = self._gradients.hidden
        del self._gradients
        return hidden, self._sums

    def _execute(self, direction: Direction) -> None:
        parts = self._schedule.parts[direction]
        compute = self._compute if direction is Direction.FORWARD else self._differentiate

        def run(stage: Stage) -> Transfer | None:
            if stage.is_communication:
                return self._communicate(stage.kind, [part.chunk for part in parts[stage]], direction)
            for part in parts[stage]:
                compute(part)
            return None

        self._recorder.enter(self._layer, direction)
        with self._recorder.passes.timed(direction):
            self._executor.execute(
                self._schedule.order[direction],
                self._schedule.needs[direction],
                run,
                self._recorder,
                self._crossing,
            )

    def _compute(self, stage: Stage) -> None:
        """Run the function of one stage of one chunk, or of the whole sequence."""
        inputs = self._values.take(stage.kind, stage.chunk)
        crossed = self._crossing.note_use(inputs) if self._crossing is not None else ()
        extra: dict[str, Any] = {}
        if any(value.layout is Layout.KEYS for value in stage.kind.takes):
            extra["sums"] = self._keys.sums
        segment = Segment(
            functools.partial(self._stages.compute(stage.kind), stage.chunk, **extra),
            *inputs,
            keep_graph=self._keep_graph,
            recompute=stage.kind in self._stages.recomputed,
        )
        outputs, segment.values = segment.values, ()
        if self._keep_graph:
            self._segments[stage] = segment
            self._crossed_inputs[stage] = crossed
        self._values.give(stage.kind, stage.chunk, outputs)

    def _differentiate(self, stage: Stage) -> None:
        """The backward of :meth:`_compute`."""
        gradients = self._gradients.take(stage.kind, stage.chunk)
        segment = self._segments.pop(stage)
        if self._crossing is not None:
            self._crossing.note_use(gradients)
            self._crossing.note_backward(self._crossed_inputs.pop(stage))
        parameters = self._stages.parameters.get(stage.kind, ())
        found = segment.backward(gradients, parameters=parameters, sums=self._sums)
        self._gradients.add(stage.kind, stage.chunk, found)

    def _communicate(self, kind: StageKind, chunks: Sequence[int | None], direction: Direction) -> Transfer:
        """Start the transfer of some chunks: of values forward, of their gradients backward."""
        forward = direction is Direction.FORWARD
        take = self._values.take if forward else self._gradients.take
        tensors: list[list[Tensor]] = [take(kind, chunk) for chunk in chunks]
        transfer = self._stages.communicate(kind)(chunks, tensors, direction)
        give = self._values.give if forward else self._gradients.add
        count = len(transfer.outputs) // len(chunks)
        for place, chunk in enumerate(chunks):
            give(kind, chunk, transfer.outputs[place * count : (place + 1) * count])
        if self._crossing is not None:
            self._crossing.note_transfer((*itertools.chain(*tensors), *transfer.uses, *transfer.outputs))
        return transfer


def _nothing(tensors: Sequence[Tensor | None]) -> None:
    """In place of a crossing where no stream is crossed."""
