"""Executors: run the stages of one direction in a given issue order. They decide nothing.

``SequentialExecutor`` is the oracle. ``ThreadExecutor`` pipelines on a CPU host: threads of a communication
lane start collectives and wait on the backend's asynchronous handles. ``CudaExecutor`` pipelines on a
GPU: each communication lane is a stream.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.schedule.types import COMPUTE, Stage

RunStage = Callable[[Stage], Transfer | None]
"""Does the work of a stage; a collective is only started, and has ended when its transfer was waited for."""
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
            run_stage: Does the work of a stage, in the lane that calls it; see :data:`RunStage`.
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
            run_on_host(lane, stage, run_stage, recorder)


def run_on_host(lane: str, stage: Stage, run_stage: RunStage, recorder: Recorder) -> None:
    """Run a stage to its end on the calling thread, timed by the host's clock."""
    begin = time.perf_counter()
    finish(run_stage(stage))
    recorder.add(lane, stage, begin, time.perf_counter())


def finish(transfer: Transfer | None) -> None:
    """Wait for what a stage has started, if it has started anything."""
    if transfer is not None:
        transfer.wait()


class ThreadExecutor:
    """Compute on the calling thread, each communication lane on two threads of its own.

    A lane starts its collectives in order, and starts one before the one ahead of it has arrived: on the
    wire they follow each other without the gap that a host needs to learn of an arrival and to answer.
    """

    host_waits = False
    holds_buffers = False

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}

    def execute(self, order: Order, needs: Needs, run_stage: RunStage, recorder: Recorder) -> None:
        """See :class:`Executor`.

        After a failure no stage is begun any more, in no lane, and the first error is the one that is
        raised: a collective that a peer does not answer to would end the process instead.
        """
        travelling: dict[Stage, Future[None]] = {}
        failures: list[BaseException] = []

        def begin(stage: Stage) -> None:
            for needed in needs[stage]:
                if needed in travelling:
                    travelling[needed].result()
            if failures:
                raise failures[0]

        def start(stage: Stage) -> Transfer | None:
            begin(stage)
            return run_stage(stage)

        with _noted(failures):
            for lane, stage in order:
                if lane == COMPUTE:
                    if travelling:
                        # What the threads of a lane have to do would wait for the scheduler's next tick.
                        os.sched_yield()
                    begin(stage)
                    run_on_host(lane, stage, run_stage, recorder)
                else:
                    if lane not in self._lanes:
                        calm_event_loops()
                        self._lanes[lane] = _Lane(lane)
                    travelling[stage] = self._lanes[lane].submit(
                        _Call(stage, start, recorder, failures, future=Future())
                    )
        for future in travelling.values():
            future.result()


def calm_event_loops() -> None:
    """Have gloo's event loops wait for the processor instead of taking it from a thread that runs.

    A loop that is woken while another thread of the process sends finds the connection locked, and asks
    again and again until the scheduler takes its core away: up to 4 ms, in which the sender does not get to
    unlock it. As a batch thread it cannot interrupt (docs/log.md). Where the system has no such threads, or
    no such policy, nothing is done.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for task in Path("/proc/self/task").glob("*"):
        # A thread may end while we look.
        with suppress(OSError):
            if (task / "comm").read_text().strip() == _EVENT_LOOP:
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))


_EVENT_LOOP = "gloo_tcp_loop"
"""Name of the thread of a gloo device; one for each process group."""


@contextmanager
def _noted(failures: list[BaseException]) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        failures.append(error)
        raise


@dataclass(slots=True)
class _Call:
    """One collective on its way through a lane."""

    stage: Stage
    start: RunStage
    recorder: Recorder
    failures: list[BaseException]
    future: Future[None]
    transfer: Transfer | None = None
    begin: float = 0.0


_IN_FLIGHT = 2
"""Collectives of a lane that are started and have not arrived: the second keeps the wire busy when the
first arrives; a third would only hold more memory."""


class _Lane:
    """Starts collectives on one thread and waits for them on another, both in order.

    The threads are daemons, so that a lost peer cannot keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._submitted: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._started: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._free = threading.Semaphore(_IN_FLIGHT)
        self._last_end = 0.0
        self._threads = [
            threading.Thread(target=target, name=f"ampipe-{name}-{part}", daemon=True)
            for part, target in (("start", self._start), ("wait", self._wait))
        ]
        for thread in self._threads:
            thread.start()
        # A thread that is still inside torch when the interpreter goes away aborts the process.
        atexit.register(self._stop)

    def submit(self, call: _Call) -> Future[None]:
        self._submitted.put(call)
        return call.future

    def _stop(self) -> None:
        self._submitted.put(None)
        for thread in self._threads:
            thread.join(timeout=1.0)

    def _start(self) -> None:
        while (call := self._submitted.get()) is not None:
            self._free.acquire()
            try:
                with _noted(call.failures):
                    call.begin = time.perf_counter()
                    call.transfer = call.start(call.stage)
            except BaseException as error:
                self._free.release()
                call.future.set_exception(error)
            else:
                self._started.put(call)
            # Nothing of a finished call may live on while the lane waits for the next.
            del call
        self._started.put(None)

    def _wait(self) -> None:
        while (call := self._started.get()) is not None:
            try:
                with _noted(call.failures):
                    finish(call.transfer)
            except BaseException as error:
                call.future.set_exception(error)
            else:
                # The lane was this collective's only from when the one ahead of it had arrived.
                begin, self._last_end = max(call.begin, self._last_end), time.perf_counter()
                call.recorder.add(self._name, call.stage, begin, self._last_end)
                # Buffers and all that a stage can reach go before anyone hears of the arrival: the
                # threads of the lane may hold the call itself for a moment longer.
                del call.transfer, call.start
                call.future.set_result(None)
            finally:
                self._free.release()
            del call


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
                finish(run_stage(stage))
            event = torch.cuda.Event()
            event.record(stream)
            ended[stage] = (lane, event)
        for stream in self._streams.values():
            compute.wait_stream(stream)

    def _stream(self, lane: str) -> torch.cuda.Stream:
        if lane not in self._streams:
            self._streams[lane] = torch.cuda.Stream()
        return self._streams[lane]
