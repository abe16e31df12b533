"""Effects of executors on the process: thread priorities and released memory."""

import ctypes
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.runtime.executors import ThreadExecutor, _Lane, demote_gloo_threads
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.tape import Tape
from megatron_ampipe.schedule import kinds
from megatron_ampipe.schedule.program import Stage
from megatron_ampipe.schedule.stage_kind import COMM

_PR_SET_NAME = 15


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="needs Linux")
def test_only_the_event_loops_of_gloo_become_batch_threads() -> None:
    ready, done = threading.Event(), threading.Event()

    def live() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, b"gloo_tcp_loop", 0, 0, 0)
        ready.set()
        done.wait()

    thread = threading.Thread(target=live)
    thread.start()
    ready.wait()
    try:
        demote_gloo_threads()
        assert os.sched_getscheduler(thread.native_id or 0) == os.SCHED_BATCH
    finally:
        done.set()
        thread.join()
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_buffers_of_a_collective_are_released_before_its_result_is_set() -> None:
    """The release is slow here, and must end before the waiting thread continues."""
    events: list[str] = []

    def record_release() -> None:
        time.sleep(0.05)
        events.append("released")

    def run(_: Any) -> Transfer:
        received = torch.empty(1)
        weakref.finalize(received, record_release)
        return Transfer((received,))

    stage = Stage(kinds.DISPATCH, 0)
    ThreadExecutor().execute(Tape.of([(COMM, stage)], {stage: ()}), run, Recorder())
    events.append("ended")
    assert events == ["released", "ended"]


def test_a_lane_fails_if_what_a_stage_started_is_no_transfer() -> None:
    """Its thread would otherwise end without a word, and the pass would wait forever."""
    executor, stage = ThreadExecutor(), Stage(kinds.DISPATCH, 0)

    def execute(run: Any) -> None:
        executor.execute(Tape.of([(COMM, stage)], {stage: ()}), run, Recorder())

    for _ in range(3):
        with pytest.raises(AttributeError, match="begin"):
            execute(lambda _stage: object())
    # The lane goes on.
    execute(lambda _stage: Transfer((torch.empty(1),)))


def test_no_thread_of_a_lane_is_left_when_it_has_stopped() -> None:
    """Not even one that has returned, whose destructors still run."""
    for _ in range(200):
        lane = _Lane("ends")
        numbers = [thread.native_id for thread in lane._threads]
        lane._stop()
        assert not [number for number in numbers if Path(f"/proc/self/task/{number}").exists()]
