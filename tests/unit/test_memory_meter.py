"""Peak memory: what is counted of a pass on a CPU, and what is asked of torch on a GPU."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("torch")
import torch

from megatron_ampipe.runtime.executors import ThreadExecutor
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.tape import Tape
from megatron_ampipe.schedule import Stage, kinds
from megatron_ampipe.tools.measuring import peak_memory

KIB = 1024


def test_the_most_that_is_alive_at_once_is_counted() -> None:
    known, meter = torch.zeros(KIB), peak_memory.TensorMeter()
    kept = []

    def run() -> None:
        kept.clear()
        first = torch.empty(KIB, dtype=torch.uint8)
        view, second = first[10:], torch.empty(2 * KIB, dtype=torch.uint8)
        del first, view, second
        known.add_(1)
        kept.append(torch.empty(KIB, dtype=torch.uint8))

    assert peak_memory.peak_bytes(run, passes=2, known=[known], meter=meter) == 3 * KIB
    assert [shape for *_, shape in meter.at_peak] == [[KIB], [2 * KIB]]
    assert meter.now == KIB


def test_other_threads_of_an_executor_are_watched() -> None:
    meter = peak_memory.TensorMeter()
    stages = [Stage(kinds.QKV), Stage(kinds.DISPATCH, 0)]
    order = [("compute", stages[0]), ("comm", stages[1])]
    threads, made = set(), []

    def stage(_: object) -> None:
        threads.add(threading.get_ident())
        made.append(torch.empty(KIB, dtype=torch.uint8))

    def run() -> None:
        made.clear()
        watched.execute(Tape.of(order, {one: () for one in stages}), stage, Recorder())

    watched = peak_memory.WatchedExecutor(ThreadExecutor(), meter)
    assert peak_memory.peak_bytes(run, passes=2, known=(), meter=meter) == 2 * KIB
    assert len(threads) > 1
    assert sorted(place.split()[0] for _, place, _ in meter.at_peak) == ["dispatch.0", "qkv"]


def test_a_gpu_is_asked_for_the_peak_of_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    peaks = iter((700, 900))
    monkeypatch.setattr(peak_memory.torch.cuda, "synchronize", lambda: happened.append("synchronize"))
    monkeypatch.setattr(peak_memory.torch.cuda, "reset_peak_memory_stats", lambda: happened.append("reset"))
    monkeypatch.setattr(peak_memory.torch.cuda, "memory_allocated", lambda: 500)
    monkeypatch.setattr(peak_memory.torch.cuda, "max_memory_allocated", lambda: next(peaks))
    assert peak_memory.peak_bytes(lambda: happened.append("run"), passes=2, known=(), meter=None) == 400
    assert happened == ["synchronize", "reset", "run"] * 2
