"""Which of FSMoE's four cases a degree falls into (section 4.2), from the times of one chunk.

What a paper's inequalities say about two lanes of communication, shown next to the plan; the simulator
chooses. Called by :mod:`.planner`.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_ampipe.plan.operation_times import Pair
from megatron_ampipe.schedule import Direction, Stage, StageKind, kinds

LONGEST = {
    1: "transfers between nodes with the gradients' reduction",
    2: "the experts",
    3: "transfers between nodes",
    4: "transfers within nodes",
}
"""What takes the most time in each case."""


def fsmoe_case(
    exchange: float, gather: float, scatter: float, experts: float, *, degree: int, reduction: float = 0.0
) -> int:
    """The case, 1 to 4, by the questions Q1 to Q7.

    Args:
        exchange: An all-to-all of a chunk between nodes; dispatch and combine are equal.
        gather: What brings a chunk from there to the ranks of its experts.
        scatter: What brings it back.
        experts: The experts of a chunk.
        degree: Number of chunks.
        reduction: ``t_gar``, the part of the gradient all-reduce that is placed in this layer; 0 forward.
    """
    inside = gather + scatter
    # What the experts have beyond the exchanges that can hide them.
    beyond = degree * experts - 2 * (degree - 1) * exchange
    if exchange > gather:
        if beyond > 0:
            return 1 if reduction > beyond + inside else 2
        return 1 if reduction > inside else 3
    if degree * experts > (degree - 1) * inside:
        return 1 if reduction > beyond + inside else 2
    return 1 if reduction > degree * inside - 2 * (degree - 1) * exchange else 4


def described(costs: Mapping[Stage, Pair], *, direction: Direction, degree: int) -> str:
    """The case of a pass with transfers on two lanes, and what is longest in it.

    Args:
        costs: Of the stages of that direction.
        direction: Of which pass.
        degree: Of that direction.
    """

    def of_chunk(*parts: StageKind) -> float:
        chunks = (Stage(kind, number) for kind in parts for number in range(degree))
        return sum(costs[stage].of(direction) for stage in chunks if stage in costs) / degree

    case = fsmoe_case(
        of_chunk(kinds.DISPATCH),
        of_chunk(kinds.SPREAD, kinds.GATHER),
        of_chunk(kinds.SCATTER, kinds.COLLECT),
        of_chunk(kinds.EXPERT),
        degree=degree,
    )
    return f"{direction} case {case}, longest are {LONGEST[case]}"
