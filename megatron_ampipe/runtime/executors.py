"""Executors: run the stages of one direction in a given issue order. They decide nothing.

``SequentialExecutor`` is the oracle. ``ThreadExecutor`` pipelines on a CPU host: each communication
lane is a thread that waits on the backend's asynchronous handles. ``CudaExecutor`` pipelines on a GPU:
each communication lane is a stream.
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch

from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.schedule.types import COMPUTE, Stage

RunStage = Callable[[Stage], None]
Order = Sequence[tuple[str, Stage]]
Needs = Mapping[Stage, tuple[Stage, ...]]


class Executor(Protocol):
    """What runs one direction of a block."""

    host_waits: bool
    """Whether issuing a stage can make the host wait for the device; see ``schedule.issue_order``."""
    holds_buffers: bool
    """Whether what a collective reads or writes must stay referenced until ``execute`` has returned."""

    def execute(self, order: Order, needs: Needs, run_stage: RunStage, recorder: Recorder) -> None:
        """Run every stage once.

        Args:
            order: ``(lane, stage)`` in issue order, the same on every rank.
            needs: What each stage waits for.
            run_stage: Does the work of a stage, in the lane that calls it.
            recorder: Told when each stage began and ended.
        """
        ...


class SequentialExecutor:
    """One stage after another on the calling thread, every collective waited for."""

    host_waits = False
    holds_buffers = False

    def execute(self, order: Order, needs: Needs, run_stage: RunStage, recorder: Recorder) -> None:
        """See :class:`Executor`."""
        for lane, stage in order:
            with recorder.on_host(lane, stage):
                run_stage(stage)


class ThreadExecutor:
    """Compute on the calling thread, each communication lane on a thread of its own."""

    host_waits = False
    holds_buffers = False

    def __init__(self) -> None:
        self._lanes: dict[str, _LaneThread] = {}

    def execute(self, order: Order, needs: Needs, run_stage: RunStage, recorder: Recorder) -> None:
        """See :class:`Executor`.

        After a failure no stage is begun any more, in no lane, and the first error is the one that is
        raised: a collective that a peer does not answer to would end the process instead.
        """
        travelling: dict[Stage, Future[None]] = {}
        failures: list[BaseException] = []

        def run(lane: str, stage: Stage) -> None:
            for needed in needs[stage]:
                if needed in travelling:
                    travelling[needed].result()
            if failures:
                raise failures[0]
            try:
                with recorder.on_host(lane, stage):
                    run_stage(stage)
            except BaseException as error:
                failures.append(error)
                raise

        for lane, stage in order:
            if lane == COMPUTE:
                run(lane, stage)
            else:
                if lane not in self._lanes:
                    self._lanes[lane] = _LaneThread(lane)
                travelling[stage] = self._lanes[lane].submit(run, lane, stage)
        for future in travelling.values():
            future.result()


_Call = tuple[Future[None], Callable[..., None], tuple[object, ...]]


class _LaneThread:
    """Runs calls one after another. A daemon, so that a lost peer cannot keep the process alive."""

    def __init__(self, lane: str) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"ampipe-{lane}", daemon=True)
        self._thread.start()
        # A thread that is still inside torch when the interpreter goes away aborts the process.
        atexit.register(self._stop)

    def _stop(self) -> None:
        self._calls.put(None)
        self._thread.join(timeout=1.0)

    def submit(self, function: Callable[..., None], *arguments: object) -> Future[None]:
        future: Future[None] = Future()
        self._calls.put((future, function, arguments))
        return future

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function, arguments = call
            try:
                function(*arguments)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            # Nothing of a finished call may live on while the lane waits for the next.
            del call, future, function, arguments


class CudaExecutor:
    """Compute on the current stream, each communication lane on a stream of its own.

    One event per operation. Memory that crosses streams is safe without ``record_stream``. What a
    collective reads or writes in the forward pass, the block keeps referenced until ``execute`` returns,
    by when every stream is ordered after every other. What the graph frees during the backward pass was
    received by a lane's stream: a collective that could be given that memory again is issued right
    behind a stage it needs, and then waits for all that was issued to the compute stream.
    """

    host_waits = True
    holds_buffers = True

    def __init__(self) -> None:
        self._streams: dict[str, torch.cuda.Stream] = {}

    def execute(self, order: Order, needs: Needs, run_stage: RunStage, recorder: Recorder) -> None:
        """See :class:`Executor`. Returns when everything is issued and ordered before the current stream."""
        compute = torch.cuda.current_stream()
        ended: dict[Stage, tuple[str, torch.cuda.Event]] = {}
        for lane in {lane for lane, _ in order} - {COMPUTE}:
            self._stream(lane).wait_stream(compute)
        previous: Stage | None = None
        for lane, stage in order:
            stream = compute if lane == COMPUTE else self._stream(lane)
            if lane != COMPUTE and previous in needs[stage]:
                stream.wait_stream(compute)
            for needed in needs[stage]:
                needed_lane, event = ended[needed]
                if needed_lane != lane:
                    stream.wait_event(event)
            previous = stage
            with torch.cuda.stream(stream), recorder.on_stream(lane, stage, stream):
                run_stage(stage)
            event = torch.cuda.Event()
            event.record(stream)
            ended[stage] = (lane, event)
        for stream in self._streams.values():
            compute.wait_stream(stream)

    def _stream(self, lane: str) -> torch.cuda.Stream:
        if lane not in self._streams:
            self._streams[lane] = torch.cuda.Stream()
        return self._streams[lane]
