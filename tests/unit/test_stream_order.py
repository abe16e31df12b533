"""How long memory that several streams use is kept. tests/streams runs blocks on a modelled device."""

from __future__ import annotations

import pytest
import torch

from megatron_ampipe.runtime.executors import CudaExecutor
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.streams import Crossing, stream_plan
from megatron_ampipe.runtime.tape import Tape
from megatron_ampipe.schedule import Stage, kinds
from megatron_ampipe.schedule.stage_kind import COMM, COMPUTE
from tests.streams.model import DEVICE, ModelEvent, ModelStream


def test_memory_is_kept_until_every_stream_with_remaining_work_is_after_its_use() -> None:
    plan = stream_plan(["compute", "comm", "compute", "comm", "comm"], [(), (), (1,), (), ()])
    # Before the third call, compute waits for the use on comm; comm always was after it.
    assert plan.waits == ((), (), (1,), (), ())
    assert plan.releases == ((), (), (1,), (), (3,))


def test_a_stream_without_remaining_calls_does_not_delay_a_release() -> None:
    plan = stream_plan(["comm", "compute", "compute", "compute"], [(), (), (), ()])
    # Compute never waits for comm, so what comm has used is kept; comm has nothing left to allocate.
    assert plan.releases == ((), (), (1,), (2,))
    assert stream_plan(["comm", "comm"], [(), ()]).releases == ((), (0,))


def test_waits_are_transitive_and_not_repeated() -> None:
    plan = stream_plan(["a", "b", "c", "a", "c"], [(), (0,), (1, 0), (), (0,)])
    assert plan.waits == ((), (0,), (1,), (), ())
    assert plan.records == {0, 1}


def test_only_tensors_of_collectives_and_their_views_are_reported() -> None:
    crossing = Crossing()
    received, other = torch.zeros(4, 2), torch.zeros(4, 2)
    crossing.note_transfer([received])
    assert len(crossing.take()) == 1
    references = crossing.note_use([received[1:], other, None])
    assert len(references) == len(crossing.take()) == 1
    crossing.note_backward(references)
    assert [storage._cdata for storage in crossing.take()] == [received.untyped_storage()._cdata]


def test_released_memory_is_not_kept_again() -> None:
    crossing = Crossing()
    received = torch.zeros(4)
    crossing.note_transfer([received])
    references = crossing.note_use([received])
    crossing.take()
    del received
    crossing.note_backward(references)
    assert crossing.take() == []


def test_collectives_and_counts_use_high_priority_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", ModelStream)
    monkeypatch.setattr(torch.cuda, "Event", ModelEvent)
    monkeypatch.setattr(torch.cuda, "stream", DEVICE.using)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: DEVICE.current)
    route, counts, dispatch = (Stage(kind, 0) for kind in (kinds.ROUTE, kinds.COUNTS, kinds.DISPATCH))
    ran_on: dict[Stage, ModelStream] = {}
    tape = Tape.of(
        [(COMPUTE, route), (COMM, counts), (COMM, dispatch)],
        {route: (), counts: (route,), dispatch: (route, counts)},
    )
    CudaExecutor().execute(tape, lambda call: ran_on.update({call.stage: DEVICE.current}), Recorder())
    assert ran_on[route] is DEVICE.default
    assert len(set(ran_on.values())) == 3
    assert ran_on[counts].priority == ran_on[dispatch].priority == min(ModelStream.priority_range())
