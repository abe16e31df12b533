"""What executors do to the process they run in."""

import ctypes
import os
import threading

import pytest

from megatron_ampipe.runtime.executors import calm_event_loops

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
        calm_event_loops()
        policies = {name: os.sched_getscheduler(number) for name, number in found.items()}
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert policies == {b"gloo_tcp_loop": os.SCHED_BATCH, b"something": os.SCHED_OTHER}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
