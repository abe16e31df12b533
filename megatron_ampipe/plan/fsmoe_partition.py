"""FSMoE's partitioning of gradients over the layers of a backward pass (section 5), in times, not bytes.

A layer can reduce gradients that are complete before it: those of the layers that the pass has run before.
What is not reduced in a layer is reduced after the pass. Pure, with scipy. Called by :mod:`.gradient_plan`.

The paper's second step minimizes the sum of layers' times, each with the best degree for its part of the
gradients, by differential evolution. Here the order of stages is given, and a layer may run into the next
one. While stages do not slow each other down, the time of the pass is then the longest chain of stages, and
its minimum a linear program, whose solution is the optimum.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

EARLINESS = 1e-4
"""Share of a saving below which gradients stay after the pass: so that a second step without use is empty."""


@dataclass(frozen=True, slots=True)
class StageGraph:
    """The stages of a backward pass by number, in the order of the lanes.

    Attributes:
        before: For each stage those that end before it begins: what it needs, and the one before it in its
            lane.
        times: Of each stage alone.
        issued: When the host has issued each stage at the earliest.
        reductions: Those that reduce gradients, one for each layer, in the order of the pass.
    """

    before: Sequence[Sequence[int]]
    times: Sequence[float]
    issued: Sequence[float]
    reductions: Sequence[int]


def first_step(gradients: Sequence[float], gaps: Sequence[float]) -> list[float]:
    """Equations 3 and 4: every gap is filled with what is complete before it.

    Args:
        gradients: What the reduction of each layer's gradients takes, in the order of the backward pass.
        gaps: How long each layer can reduce without delaying what follows.

    Returns:
        How long each layer reduces.
    """
    placed, waiting = [], 0.0
    for gradient, gap in zip(gradients, gaps, strict=True):
        placed.append(min(waiting, gap))
        waiting += gradient - placed[-1]
    return placed


def second_step(graph: StageGraph, gradients: Sequence[float], first: Sequence[float]) -> list[float]:
    """Equation 5: what the first step has left, where the pass with all its reductions is shortest.

    Args:
        graph: Of the pass.
        gradients: What the reduction of each layer's gradients takes, in the order of the pass.
        first: What :func:`first_step` has placed in each layer.

    Returns:
        How long each layer reduces, at least what the first step says. No other partition is shorter, if
        stages do not slow each other down.
    """
    # Imported here: it takes longer than the rest of a plan without reductions.
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    num_stages, num_layers = len(graph.times), len(gradients)
    end_of_pass = num_stages + num_layers
    reduction_of = {stage: num_stages + layer for layer, stage in enumerate(graph.reductions)}
    # Unknown are the ends of all stages, what each layer reduces, and the end of the pass.
    rows = _Rows()
    for stage, before in enumerate(graph.before):
        time = reduction_of.get(stage)
        reduced = [] if time is None else [(time, 1.0)]
        alone = graph.times[stage] if time is None else 0.0
        for one in before:
            rows.add([(one, 1.0), (stage, -1.0), *reduced], at_most=-alone)
        if reduced:
            rows.add([(stage, -1.0), *reduced], at_most=-graph.issued[stage])
        rows.add([(stage, 1.0), (end_of_pass, -1.0)], at_most=0.0)
    for layer, complete in enumerate(itertools.accumulate([0.0, *gradients[:-1]])):
        rows.add([(num_stages + one, 1.0) for one in range(layer + 1)], at_most=complete)
    earliest = [
        0.0 if stage in reduction_of else graph.issued[stage] + time for stage, time in enumerate(graph.times)
    ]
    saved = -(1.0 - EARLINESS)
    shape = (len(rows.limits), end_of_pass + 1)
    found = linprog(
        [0.0] * num_stages + [saved] * num_layers + [1.0],
        A_ub=coo_array((rows.factors, (rows.numbers, rows.unknowns)), shape=shape),
        b_ub=rows.limits,
        bounds=[(one, None) for one in (*earliest, *first, 0.0)],
        method="highs",
    )
    assert found.status == 0, found.message
    return [max(least, float(time)) for least, time in zip(first, found.x[num_stages:], strict=False)]


class _Rows:
    """Inequalities of a linear program, as coordinates of a sparse matrix."""

    def __init__(self) -> None:
        self.factors: list[float] = []
        self.numbers: list[int] = []
        self.unknowns: list[int] = []
        self.limits: list[float] = []

    def add(self, terms: Iterable[tuple[int, float]], *, at_most: float) -> None:
        for unknown, factor in terms:
            self.factors.append(factor)
            self.numbers.append(len(self.limits))
            self.unknowns.append(unknown)
        self.limits.append(at_most)
