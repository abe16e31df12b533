"""Executors: run the calls of a tape. They make no scheduling decisions.

:class:`SequentialExecutor` is the reference, :class:`ThreadExecutor` pipelines on a CPU, and
:class:`CudaExecutor` on a GPU.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import UntypedStorage

from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.tape import Call, Tape
from megatron_ampipe.schedule.stage_kind import COMPUTE

RunCall = Callable[[Call], Transfer | None]
"""Runs a call. It only starts a collective, and returns its transfer, which the caller waits for."""


class UsedMemory(Protocol):
    """Records the memory that several streams use (:class:`~.streams.CommMemory`)."""

    def take(self) -> list[UntypedStorage]:
        """Return the memory that the current stage has used, and forget it."""


class Executor(Protocol):
    """Runs the calls of a tape."""

    host_waits: bool
    """Whether stages run on several streams of a device, whose results the host may have to wait for."""
    threads: bool
    """Whether lanes run on several threads."""

    def __hash__(self) -> int:
        """Tapes are cached by executor."""

    def execute(
        self, tape: Tape, run: RunCall, recorder: Recorder, comm_memory: UsedMemory | None = None
    ) -> None:
        """Run all calls once, in issue order; ``comm_memory`` records what several streams use."""


class SequentialExecutor:
    """Runs one stage after another on the calling thread, and waits for every collective."""

    host_waits = False
    threads = False

    def execute(
        self, tape: Tape, run: RunCall, recorder: Recorder, comm_memory: UsedMemory | None = None
    ) -> None:
        for call in tape.calls:
            if recorder.recording:
                run_on_host(call, run, recorder)
            elif (transfer := run(call)) is not None:
                transfer.wait()
                # Release the received tensors before the next call.
                transfer = None


def run_on_host(call: Call, run: RunCall, recorder: Recorder) -> None:
    """Run a call on the calling thread, wait until it ends, and record it."""
    begin = time.perf_counter()
    finish(run(call))
    recorder.add(call.lane, call.stage, begin, time.perf_counter())


def finish(transfer: Transfer | None) -> None:
    """Wait for the collective of a stage, if it has started one."""
    if transfer is not None:
        transfer.wait()


class CudaExecutor:
    """Runs computation on the current stream, and each communication lane on another, ``counts`` on one more.

    Communication streams have a high priority, so that a collective that is ready does not wait for the
    remaining thread blocks of a kernel that fills the GPU.
    """

    host_waits = True
    threads = False

    def __init__(self) -> None:
        self._streams: dict[str, torch.cuda.Stream] = {}

    def execute(
        self, tape: Tape, run: RunCall, recorder: Recorder, comm_memory: UsedMemory | None = None
    ) -> None:
        """On return, the current stream waits for all calls."""
        compute = torch.cuda.current_stream()
        streams = {name: compute if name == COMPUTE else self._stream(name) for name in set(tape.streams)}
        others = [stream for name, stream in streams.items() if name != COMPUTE]
        if others:
            begun = compute.record_event()
            for stream in others:
                stream.wait_event(begun)
        try:
            self._issue(tape, run, recorder, comm_memory, streams)
        finally:
            # Also after a failure, because memory released from here on may be reused on the current stream.
            for stream in others:
                compute.wait_stream(stream)

    def _issue(
        self,
        tape: Tape,
        run: RunCall,
        recorder: Recorder,
        comm_memory: UsedMemory | None,
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
            if comm_memory is not None:
                kept[call.position] = comm_memory.take()

    def _stream(self, name: str) -> torch.cuda.Stream:
        if name not in self._streams:
            _, highest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]  # static in torch
            self._streams[name] = torch.cuda.Stream(priority=highest)
        return self._streams[name]


class ThreadExecutor:
    """Runs computation on the calling thread, and each communication lane on two separate threads.

    A lane starts its collectives in order, each before the previous one has ended, so that the network is
    not idle while the host finishes that one. ``Transfer.begin`` starts operations that must run alone.

    After a failure every lane still runs the calls before it, up to the first one that needs what has failed.
    How far that is does not depend on time, so if all ranks fail at the same stage, all have started the same
    collectives, and can run the next pass once these have ended.
    """

    host_waits = False
    threads = True

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        self._left: tuple[Sequence[Future[None]], BaseException] | None = None
        """Collectives of a failed pass that had not ended when its error was raised, and the error."""

    def execute(
        self, tape: Tape, run: RunCall, recorder: Recorder, comm_memory: UsedMemory | None = None
    ) -> None:
        """If a call fails, raise its error when the collectives before it have ended, or after a short wait.

        Raises:
            RuntimeError: An earlier pass has failed, and other ranks have not joined its collectives.
        """
        self._finish_failed_pass()
        in_flight: dict[int, Future[None]] = {}
        failures: dict[str, BaseException] = {}

        def wait_for_needs(call: Call) -> None:
            for position in call.needs:
                if position in in_flight:
                    in_flight[position].result()

        def start(call: Call) -> Transfer | None:
            wait_for_needs(call)
            return run(call)

        try:
            for call in tape.calls:
                if call.lane == COMPUTE:
                    if in_flight:
                        # Else the threads of a lane would wait for the next tick of the scheduler.
                        os.sched_yield()
                    wait_for_needs(call)
                    run_on_host(call, run, recorder)
                    continue
                if call.lane not in self._lanes:
                    demote_gloo_threads()
                    self._lanes[call.lane] = _Lane(call.lane)
                collective = _Collective(call, start, recorder, failures)
                in_flight[call.position] = collective.future
                self._lanes[call.lane].submitted.put(collective)
            for future in in_flight.values():
                future.result()
        except BaseException as error:
            # An interrupt ends the process.
            wait_s = _DRAIN_S if isinstance(error, Exception) else 0.0
            if left := futures.wait(in_flight.values(), timeout=wait_s).not_done:
                self._left = (tuple(left), error)
            raise

    def _finish_failed_pass(self) -> None:
        """Wait for the collectives that a failed pass has left; their groups end this after their timeout."""
        if self._left is None:
            return
        left, of_pass = self._left
        self._left = None
        for future in left:
            error = future.exception()
            if error is not None and error is not of_pass:
                raise RuntimeError(
                    "an earlier pass has failed on this rank, and other ranks have not joined its "
                    "collectives: they have failed at another stage, or not at all. The run cannot go on; "
                    "continue it from its last checkpoint"
                ) from error


def demote_gloo_threads() -> None:
    """Give the threads of gloo's event loops the scheduling policy ``SCHED_BATCH``.

    If an event loop wakes up while another thread of the process sends, the connection is locked, and the
    loop polls until the scheduler suspends it, for up to 4 ms. On a shared core, the sending thread cannot
    unlock the connection in that time. A batch thread does not preempt the sending one (docs/log).
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for task in Path("/proc/self/task").glob("*"):
        # A thread may have ended since it was listed.
        with suppress(OSError):
            if (task / "comm").read_text().strip() == _EVENT_LOOP:
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))


_EVENT_LOOP = "gloo_tcp_loop"
"""Name of gloo's event-loop threads; there is one for each process group."""


@dataclass(slots=True)
class _Collective:
    """A collective that was submitted to a lane."""

    call: Call
    start: RunCall
    recorder: Recorder
    failures: dict[str, BaseException]
    """By lane, the first error of the pass."""
    future: Future[None] = field(default_factory=Future)
    transfer: Transfer | None = None
    begin: float = 0.0
    places: int = 1
    """How many of the :data:`_MAX_IN_FLIGHT` places it takes."""

    def check_lane(self) -> None:
        """Raise the error of an earlier collective of the lane."""
        if self.call.lane in self.failures:
            raise self.failures[self.call.lane]

    def fail(self, error: BaseException) -> None:
        self.failures.setdefault(self.call.lane, error)
        self.future.set_exception(error)


def _is_listed(thread: threading.Thread) -> bool:
    """Whether the kernel has a thread, on Linux."""
    return Path(f"/proc/self/task/{thread.native_id}").exists()


_STOP_S = 2.0
"""How long the end of a process waits for the threads of a lane."""
_DRAIN_S = 3.0
"""How long a failed pass waits for the collectives before the failure; the next pass waits for the rest."""
_MAX_IN_FLIGHT = 2
"""Collectives per lane: the second keeps the network busy when the first ends; a third only uses memory."""


class _Lane:
    """Starts collectives on one thread and waits for them on another, both in order.

    The threads are daemons, so that a failed rank cannot keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.submitted: queue.SimpleQueue[_Collective | None] = queue.SimpleQueue()
        self._started: queue.SimpleQueue[_Collective | None] = queue.SimpleQueue()
        self._free = threading.Semaphore(_MAX_IN_FLIGHT)
        self._last_end = 0.0
        self._threads = [
            threading.Thread(target=target, name=f"ampipe-{name}-{part}", daemon=True)
            for part, target in (("start", self._start), ("wait", self._wait))
        ]
        for thread in self._threads:
            thread.start()
        # A thread that still runs torch code at interpreter exit would abort the process.
        atexit.register(self._stop)

    def _stop(self) -> None:
        """End both threads, unless a collective keeps them for too long."""
        self.submitted.put(None)
        latest = time.monotonic() + _STOP_S
        for thread in self._threads:
            thread.join(timeout=max(0.0, latest - time.monotonic()))
        # Before Python 3.13, join returns while torch's destructors of the thread may still run. They must
        # not run at the same time as those of the process.
        while any(map(_is_listed, self._threads)) and time.monotonic() < latest:
            time.sleep(0.001)

    def _start(self) -> None:
        while (collective := self.submitted.get()) is not None:
            self._free.acquire()
            try:
                collective.check_lane()
                collective.begin = time.perf_counter()
                collective.transfer = collective.start(collective.call)
                if collective.transfer is not None and collective.transfer.begin is not None:
                    while collective.places < _MAX_IN_FLIGHT:
                        self._free.acquire()
                        collective.places += 1
                    collective.begin = time.perf_counter()
            except BaseException as error:
                self._free.release(collective.places)
                collective.fail(error)
            else:
                self._started.put(collective)
            # Do not keep a finished call alive while the lane waits for the next one.
            del collective
        self._started.put(None)

    def _wait(self) -> None:
        while (collective := self._started.get()) is not None:
            try:
                finish(collective.transfer)
            except BaseException as error:
                collective.fail(error)
            else:
                # The recorded stage starts at the earliest when the previous one of the lane has ended.
                begin, self._last_end = max(collective.begin, self._last_end), time.perf_counter()
                collective.recorder.add(self._name, collective.call.stage, begin, self._last_end)
                # Release the buffers, and all that the stage refers to, before the result is set: the
                # threads of the lane may keep this object alive a little longer.
                del collective.transfer, collective.start
                collective.future.set_result(None)
            finally:
                self._free.release(collective.places)
            del collective
