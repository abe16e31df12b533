"""Attention in the steps of a ring, all ranks in one process, against attention of the whole sequence."""

import pytest

from megatron_ampipe.schedule import BlockFeatures, Direction, Pipeline, from_text, to_text
from megatron_ampipe.schedule.dataflow import needs_of
from megatron_ampipe.schedule.kinds import ATTEND, RERING, RING, step_of
from megatron_ampipe.schedule.program import issue_order

NAMES = ("ampipe", "moe-only", "lancet", "sequential")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_rank_holds_the_keys_of_two_others_at_most(name: str, num_ranks: int) -> None:
    """In any order that the dependencies allow: here communication runs as far ahead as it can."""
    features = BlockFeatures(ring_ranks=num_ranks)
    schedule = Pipeline.of(3, schedule=name).schedule_of([features])
    assert from_text(to_text(schedule)) == schedule
    for direction in Direction:
        needs = needs_of(schedule, [features], direction)
        bring = RING if direction is Direction.FORWARD else RERING
        order = [stage for _, stage in issue_order(schedule.program(direction), needs, host_waits=False)]
        arrived: list[int] = []
        most = 0
        for place, stage in enumerate(order):
            if stage.kind.row == bring:
                arrived.append(stage.kind.step)
            used = [
                step for step in arrived
                if not any(one.kind == step_of(ATTEND, step) for one in order[place:])
            ]  # fmt: skip
            most = max(most, len(arrived) - len(used))
        assert len(arrived) == num_ranks - 1
        assert most == min(2, num_ranks - 1)
