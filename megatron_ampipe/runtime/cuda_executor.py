"""Runs the stages on a GPU: computation on the current stream, communication on separate streams."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_ampipe.runtime.crossing import Crossing
from megatron_ampipe.runtime.executors import Needs, Order, RunStage, finish
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.stream_order import StageEnd, StreamOrder
from megatron_ampipe.schedule import Stage, stream_of
from megatron_ampipe.schedule.stage_kind import COMPUTE


class CudaExecutor:
    """Runs computation on the current stream, each communication lane on two more: one is for its counts.

    An event is recorded for each stage that another stream waits for; waits that earlier ones imply are left
    out. Communication streams have a high priority, so that a collective that is ready does not wait for the
    remaining thread blocks of a kernel that fills the GPU. :mod:`.stream_order` tracks how long memory has to
    be kept.
    """

    host_waits = True
    crosses_streams = True

    def __init__(self) -> None:
        self._streams: dict[str, torch.cuda.Stream] = {}

    def execute(
        self,
        order: Order,
        needs: Needs,
        run_stage: RunStage,
        recorder: Recorder,
        crossing: Crossing | None = None,
    ) -> None:
        """See :class:`~.executors.Executor`. On return, the current stream waits for all stages."""
        names = {stage: stream_of(lane, stage) for lane, stage in order}
        compute = torch.cuda.current_stream()
        streams = {name: compute if name == COMPUTE else self._stream(name) for name in set(names.values())}
        others = [stream for name, stream in streams.items() if name != COMPUTE]
        begun = compute.record_event() if others else None
        for stream in others:
            stream.wait_event(begun)
        try:
            self._issue(order, needs, run_stage, recorder, crossing, names, streams)
        finally:
            # Also after a failure: memory that is released from here on may be reused on the current stream.
            for stream in others:
                compute.wait_stream(stream)

    def _issue(
        self,
        order: Order,
        needs: Needs,
        run_stage: RunStage,
        recorder: Recorder,
        crossing: Crossing | None,
        names: Mapping[Stage, str],
        streams: Mapping[str, torch.cuda.Stream],
    ) -> None:
        awaited = {needed for stage in names for needed in needs[stage] if names[needed] != names[stage]}
        known = StreamOrder(names.values())
        ended: dict[Stage, tuple[StageEnd, torch.cuda.Event | None]] = {}
        for lane, stage in order:
            name = names[stage]
            stream = streams[name]
            for needed in needs[stage]:
                mark, event = ended[needed]
                if event is not None and not known.is_after(name, mark):
                    stream.wait_event(event)
                    known.wait(name, mark)
            known.release()
            with torch.cuda.stream(stream), recorder.on_stream(lane, stage, stream):
                finish(run_stage(stage))
            mark = known.issue(name)
            ended[stage] = (mark, stream.record_event() if stage in awaited else None)
            if crossing is not None:
                known.keep(mark, crossing.take())

    def _stream(self, name: str) -> torch.cuda.Stream:
        if name not in self._streams:
            _, highest = torch.cuda.Stream.priority_range()
            self._streams[name] = torch.cuda.Stream(priority=highest)
        return self._streams[name]
