"""How long memory that several streams use is kept. tests/streams runs blocks on a modelled device."""

from typing import Any

import pytest
import torch

from megatron_ampipe.runtime.streams import CommMemory, stream_plan


@pytest.mark.parametrize(
    ("streams", "needs", "waits", "releases"),
    [
        # Before the third call, a waits for the use on b; b always was after it.
        ("ababb", [(), (), (1,), (), ()], [(), (), (1,), (), ()], [(), (), (1,), (), (3,)]),
        # a never waits for b, whose memory is kept; b has nothing left to allocate.
        ("baaa", [()] * 4, [()] * 4, [(), (), (1,), (2,)]),
        # What another wait implies is not waited for.
        ("abcac", [(), (0,), (1, 0), (), (0,)], [(), (0,), (1,), (), ()], None),
    ],
)
def test_streams_wait_once_and_memory_is_released_when_all_are_after_its_use(
    streams: str, needs: list[tuple[int, ...]], waits: list[tuple[int, ...]], releases: Any
) -> None:
    plan = stream_plan(streams, needs)
    assert plan.waits == tuple(waits)
    assert releases is None or plan.releases == tuple(releases)


def test_memory_of_collectives_and_its_views_is_reported_until_it_is_released() -> None:
    comm_memory = CommMemory()
    received, other = torch.zeros(4, 2), torch.zeros(4, 2)
    comm_memory.record_transfer([received])
    assert len(comm_memory.take()) == 1
    references = comm_memory.record_use([received[1:], other, None])
    assert len(references) == len(comm_memory.take()) == 1
    comm_memory.record_backward(references)
    assert [storage._cdata for storage in comm_memory.take()] == [received.untyped_storage()._cdata]
    del received
    comm_memory.record_backward(references)
    assert comm_memory.take() == []
