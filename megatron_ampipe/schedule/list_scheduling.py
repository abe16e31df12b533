"""List scheduling: an order of stages in lanes, from dependencies, times and ranks. Stages are numbers."""

from __future__ import annotations

from collections.abc import Sequence


def list_schedule(
    lane_of: Sequence[int],
    needs: Sequence[Sequence[int]],
    *,
    num_lanes: int,
    times: Sequence[float],
    rank: Sequence[float],
) -> list[list[int]]:
    """The order of each lane in which the stage that can begin first is next; of several, that of least rank.

    Stages whose dependencies wait for each other are left out.

    Args:
        lane_of: For each stage, the index of its lane.
        needs: For each stage, the stages that must have ended before it begins, each once.
        num_lanes: The number of lanes, some of which may have no stage.
        times: The time of each stage alone.
        rank: The rank of each stage.
    """
    orders: list[list[int]] = [[] for _ in range(num_lanes)]
    lane_is_free_at = [0.0] * len(orders)
    followers: list[list[int]] = [[] for _ in needs]
    for stage, needed_stages in enumerate(needs):
        for needed in needed_stages:
            followers[needed].append(stage)
    num_awaited = list(map(len, needs))
    # When the last dependency of each stage ends, once all of them are in an order.
    ready_at = [0.0] * len(needs)
    ready = [stage for stage, count in enumerate(num_awaited) if not count]
    while ready:
        first_begin = first_rank = float("inf")
        first = -1
        for stage in ready:
            begin = ready_at[stage]
            if lane_is_free_at[lane_of[stage]] > begin:
                begin = lane_is_free_at[lane_of[stage]]
            if begin < first_begin or (begin == first_begin and rank[stage] < first_rank):
                first_begin, first_rank, first = begin, rank[stage], stage
        ready.remove(first)
        orders[lane_of[first]].append(first)
        end = first_begin + times[first]
        lane_is_free_at[lane_of[first]] = end
        for follower in followers[first]:
            if ready_at[follower] < end:
                ready_at[follower] = end
            num_awaited[follower] -= 1
            if not num_awaited[follower]:
                ready.append(follower)
    return orders
