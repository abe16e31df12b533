"""Executors: run the stages of one direction in a given issue order. They decide nothing.

``SequentialExecutor`` is the oracle. ``ThreadExecutor`` pipelines on a CPU host: threads of a communication
lane start collectives and wait on the backend's asynchronous handles. The one for GPUs is in
:mod:`.cuda_executor`.
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

from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.runtime.crossing import Crossing
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.schedule.kinds import COMPUTE
from megatron_ampipe.schedule.types import Stage

RunStage = Callable[[Stage], Transfer | None]
"""Does the work of a stage; a collective is only started, and has ended when its transfer was waited for."""
Order = Sequence[tuple[str, Stage]]
Needs = Mapping[Stage, tuple[Stage, ...]]


class Executor(Protocol):
    """What runs one direction of a block."""

    host_waits: bool
    """Whether issuing a stage can make the host wait for the device; see ``schedule.issue_order``."""
    crosses_streams: bool
    """Whether stages run on several streams of a device, and ``execute`` has to know what crosses them."""

    def execute(
        self,
        order: Order,
        needs: Needs,
        run_stage: RunStage,
        recorder: Recorder,
        crossing: Crossing | None = None,
    ) -> None:
        """Run every stage once.

        Args:
            order: ``(lane, stage)`` in issue order, the same on every rank.
            needs: What each stage waits for.
            run_stage: Does the work of a stage, in the lane that calls it; see :data:`RunStage`.
            recorder: Told when each stage began and ended.
            crossing: Says what a stage has used that crosses streams; None where nothing does.
        """
        ...


class SequentialExecutor:
    """One stage after another on the calling thread, every collective waited for."""

    host_waits = False
    crosses_streams = False

    def execute(
        self,
        order: Order,
        needs: Needs,
        run_stage: RunStage,
        recorder: Recorder,
        crossing: Crossing | None = None,
    ) -> None:
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
    crosses_streams = False

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}

    def execute(
        self,
        order: Order,
        needs: Needs,
        run_stage: RunStage,
        recorder: Recorder,
        crossing: Crossing | None = None,
    ) -> None:
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
                        demote_gloo_threads()
                        self._lanes[lane] = _Lane(lane)
                    travelling[stage] = self._lanes[lane].submit(
                        _Call(stage, start, recorder, failures, future=Future())
                    )
        for future in travelling.values():
            future.result()


def demote_gloo_threads() -> None:
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
