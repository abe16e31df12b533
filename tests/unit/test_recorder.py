"""The recorder: stages by iteration and by pass. No device: events are fakes with a clock."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
import torch

from megatron_ampipe.runtime import recorder as module
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.schedule import Direction, Stage, kinds

QKV, LOSSES = Stage(kinds.QKV), Stage(kinds.LOSSES)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The current time in seconds, for the recorder."""
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def run(recorder: Recorder, clock: list[float], stage: Stage, seconds: float) -> None:
    begin = clock[0]
    clock[0] += seconds
    recorder.add("compute", stage, begin, clock[0])


def test_passes_are_distinguished(clock: list[float]) -> None:
    recorder = Recorder(num_iterations=1)
    recorder.start_iteration(5)
    # Two micro-batches; the second has one more stage, as in a recompute.
    for stages in ((QKV,), (QKV, LOSSES)):
        recorder.enter((1,), Direction.FORWARD)
        for stage in stages:
            run(recorder, clock, stage, 0.002)
    recorder.enter((1,), Direction.BACKWARD)
    run(recorder, clock, QKV, 0.003)
    times = recorder.pass_times_us(5)
    assert times[Direction.FORWARD] == pytest.approx([2000, 4000])
    assert times[Direction.BACKWARD] == pytest.approx([3000])
    assert recorder.pass_times_us(4) == {direction: [] for direction in Direction}
    assert recorder.timeline(rank=0, labels={}, iteration=4).spans == ()


def test_a_repeated_iteration_is_named_and_its_passes_are_counted_apart(clock: list[float]) -> None:
    recorder = Recorder(num_iterations=3)
    recorder.repeat_iteration()
    recorder.start_iteration(5)
    for milliseconds in (2, 3):
        recorder.enter((1,), Direction.FORWARD)
        run(recorder, clock, QKV, milliseconds / 1000)
        clock[0] += 1
        if milliseconds == 2:
            recorder.repeat_iteration()
            # As before every forward pass of a model.
            recorder.start_iteration(5)
    spans = recorder.timeline(rank=0, labels={}).spans
    assert [(span.iteration, span.of_repeat) for span in spans] == [(5, False), (5, True)]
    assert recorder.pass_times_us(5)[Direction.FORWARD] == pytest.approx([2000, 3000])


def test_each_iteration_has_its_own_origin_event(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA returns the time between events as a 32-bit float: after hours its resolution is milliseconds."""
    distances = []

    class Event:
        def __init__(self, **_: object) -> None:
            self.at = clock[0]

        def record(self, stream: object) -> None: ...
        def synchronize(self) -> None: ...
        def elapsed_time(self, other: Event) -> float:
            distances.append(other.at - self.at)
            return (other.at - self.at) * 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    recorder = Recorder(num_iterations=2)
    for iteration in (1, 2):
        recorder.start_iteration(iteration)
        recorder.enter((1,), Direction.FORWARD)
        with recorder.on_stream("compute", QKV, None):  # type: ignore[arg-type]
            clock[0] += 0.25
        clock[0] += 36_000.0
    first, second = recorder.timeline(rank=0, labels={}).spans
    assert first.end_us - first.begin_us == second.end_us - second.begin_us == pytest.approx(0.25e6)
    assert second.begin_us - first.begin_us == pytest.approx(36_000.25e6)
    assert max(distances) < 1


@pytest.mark.parametrize(("graphs", "traced", "records"), [(0, 0, True), (1, 0, False), (1, 1, True)])
def test_logged_iterations_are_not_recorded_where_graphs_are_used(
    graphs: int, traced: int, records: bool, tmp_path: Path
) -> None:
    """What is recorded runs without graphs: with ``--log-interval 1`` they would never be used."""
    from megatron_ampipe.block.settings import Settings
    from megatron_ampipe.launch.recording import Recording
    from megatron_ampipe.layers.context import AMPipeContext
    from megatron_ampipe.schedule import Pipeline

    settings = Settings(trace_dir=str(tmp_path) if traced else None)
    modules = frozenset({"attn"} if graphs else ())
    context = AMPipeContext(
        settings, Pipeline.of(4), recorder=Recorder(num_iterations=1), graph_modules=modules
    )
    environment = SimpleNamespace(rank=0, world_size=1, log_interval=1, iteration=7)
    Recording(context, environment).before_forward(SimpleNamespace(training=True))
    assert context.recorder.recording is records
