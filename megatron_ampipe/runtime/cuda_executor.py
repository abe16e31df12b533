"""Runs the stages on a GPU: computation on the current stream, communication on separate streams."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_ampipe.runtime.crossing import Crossing
from megatron_ampipe.runtime.executors import RunCall, finish
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.tape import Tape
from megatron_ampipe.schedule.stage_kind import COMPUTE


class CudaExecutor:
    """Runs computation on the current stream, each communication lane on two more: one is for its counts.

    It waits, records events and releases memory as the tape says (:mod:`.stream_order`). Communication
    streams have a high priority, so that a collective that is ready does not wait for the remaining thread
    blocks of a kernel that fills the GPU.
    """

    host_waits = True
    crosses_streams = True
    threads = False

    def __init__(self) -> None:
        self._streams: dict[str, torch.cuda.Stream] = {}

    def execute(self, tape: Tape, run: RunCall, recorder: Recorder, crossing: Crossing | None = None) -> None:
        """See :class:`~.executors.Executor`. On return, the current stream waits for all calls."""
        compute = torch.cuda.current_stream()
        streams = {name: compute if name == COMPUTE else self._stream(name) for name in set(tape.streams)}
        others = [stream for name, stream in streams.items() if name != COMPUTE]
        begun = compute.record_event() if others else None
        for stream in others:
            stream.wait_event(begun)
        try:
            self._issue(tape, run, recorder, crossing, streams)
        finally:
            # Also after a failure: memory that is released from here on may be reused on the current stream.
            for stream in others:
                compute.wait_stream(stream)

    def _issue(
        self,
        tape: Tape,
        run: RunCall,
        recorder: Recorder,
        crossing: Crossing | None,
        streams: Mapping[str, torch.cuda.Stream],
    ) -> None:
        plan = tape.stream_plan
        events: dict[int, torch.cuda.Event] = {}
        kept: dict[int, object] = {}
        for call, name, waits, releases in zip(
            tape.calls, tape.streams, plan.waits, plan.releases, strict=True
        ):
            stream = streams[name]
            for position in waits:
                stream.wait_event(events[position])
            for position in releases:
                kept.pop(position, None)
            with torch.cuda.stream(stream), recorder.on_stream(call.lane, call.stage, stream):
                finish(run(call))
            if call.position in plan.records:
                events[call.position] = stream.record_event()
            if crossing is not None:
                kept[call.position] = crossing.take()

    def _stream(self, name: str) -> torch.cuda.Stream:
        if name not in self._streams:
            _, highest = torch.cuda.Stream.priority_range()
            self._streams[name] = torch.cuda.Stream(priority=highest)
        return self._streams[name]
