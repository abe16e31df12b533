"""What executors do to the process they run in."""

import ctypes
import os
import threading
import time
import weakref

import pytest
import torch

from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.runtime.executors import ThreadExecutor, demote_gloo_threads
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.schedule import kinds
from megatron_ampipe.schedule.kinds import COMM
from megatron_ampipe.schedule.types import Stage

_PR_SET_NAME = 15


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="needs Linux")
def test_event_loops_of_gloo_alone_become_batch_threads() -> None:
    ready, done = threading.Barrier(3), threading.Event()
    found: dict[bytes, int] = {}

    def live(name: bytes) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name, 0, 0, 0)
        found[name] = threading.get_native_id()
        ready.wait()
        done.wait()

    threads = [threading.Thread(target=live, args=(name,)) for name in (b"gloo_tcp_loop", b"something")]
    for thread in threads:
        thread.start()
    ready.wait()
    try:
        demote_gloo_threads()
        policies = {name: os.sched_getscheduler(number) for name, number in found.items()}
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert policies == {b"gloo_tcp_loop": os.SCHED_BATCH, b"something": os.SCHED_OTHER}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_nothing_of_a_collective_outlives_its_arrival() -> None:
    """What was received is let go, slowly here, before the thread that waits for the arrival goes on."""
    events: list[str] = []

    def let_go() -> None:
        time.sleep(0.05)
        events.append("let go")

    def run_stage(stage: Stage) -> Transfer:
        received = torch.empty(1)
        weakref.finalize(received, let_go)
        return Transfer((received,))

    stage = Stage(kinds.DISPATCH, 0)
    ThreadExecutor().execute([(COMM, stage)], {stage: ()}, run_stage, Recorder())
    events.append("arrived")
    assert events == ["let go", "arrived"]
