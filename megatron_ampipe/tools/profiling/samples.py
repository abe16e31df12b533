"""What the ranks measured, as plain data, and how it is reduced to one number. Pure.

The time of an operation is its median over repeats on a rank, and of these the maximum over ranks: a
collective is over when its slowest rank is, and a block waits for the slowest computation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Sample:
    """One size of one operation.

    Attributes:
        family: Which operation: ``gemm``, ``intra.all_to_all``, ``attention.forward``.
        columns: What its time is made of: by the name of a figure of the cluster file, how often it counts.
        us: Microseconds.
    """

    family: str
    columns: Mapping[str, float]
    us: float


def slowest(reports: Sequence[Sequence[Mapping[str, Any]]]) -> list[Sample]:
    """Of each sample, the maximum over ranks.

    Args:
        reports: By rank, its samples, in the same order on every rank.
    """
    return [
        Sample(of_ranks[0]["family"], of_ranks[0]["columns"], max(found["us"] for found in of_ranks))
        for of_ranks in zip(*reports, strict=True)
    ]


def slowest_numbers(reports: Sequence[Any]) -> Any:
    """Mappings of mappings of numbers, one for each rank: the maximum of each number over ranks."""
    if isinstance(reports[0], Mapping):
        return {key: slowest_numbers([report[key] for report in reports]) for key in reports[0]}
    return max(reports)
