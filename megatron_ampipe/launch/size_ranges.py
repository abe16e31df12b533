"""What was chosen for which size of input, and what follows for a size between two others.

Algorithm 1 of MPipeMoE (section III-C). It supposes that the best number of chunks does not fall when the
input grows. So a size between two that chose the same needs no trials, and one between two that chose
differently tries only degrees between those. The paper keeps a range of sizes for each degree; here the sizes
themselves are kept, of which such a range consists. Pure: ranks that are told the same decide the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, Self

from megatron_ampipe.schedule import Exchange, Pipeline

Shape = tuple[int, int]
"""Rows of the residual stream that a rank holds, and batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenSize:
    """One size of input, and what trials chose for it: plain data, for a file and for other ranks.

    Attributes:
        rows: Of the residual stream that a rank holds.
        batch: Sequences of a micro-batch.
        degree: See ``Pipeline``, as the others.
    """

    rows: int
    batch: int
    degree: int
    backward_degree: int
    schedule: str
    exchange: Literal["rows", "ranks", "nodes", "2dh"]

    @classmethod
    def of(cls, shape: Shape, pipeline: Pipeline) -> Self:
        """The record of a choice."""
        rows, batch = shape
        return cls(
            rows=rows,
            batch=batch,
            degree=pipeline.degree,
            backward_degree=pipeline.backward_degree,
            schedule=pipeline.schedule,
            exchange=pipeline.exchange.value,
        )

    @property
    def shape(self) -> Shape:
        """The size."""
        return self.rows, self.batch

    def pipeline(self, given: Pipeline) -> Pipeline:
        """What was chosen; the rest as given.

        Raises:
            BadInput: one of the two degrees does not divide the other.
        """
        return replace(
            given,
            degree=self.degree,
            backward_degree=self.backward_degree,
            schedule=self.schedule,
            exchange=Exchange(self.exchange),
        )


class SizeRanges:
    """Choices by the number of tokens of a rank's input, rows times batch."""

    def __init__(self) -> None:
        self._chosen: dict[int, Pipeline] = {}

    def add(self, tokens: int, pipeline: Pipeline) -> None:
        """Record a choice."""
        self._chosen[tokens] = pipeline

    def find(self, tokens: int, degrees: Iterable[int]) -> tuple[Pipeline, str] | None:
        """What the next smaller and larger size both chose, and the two as text; None if it is to be tried.

        ``degrees`` are those that this input can be cut into.
        """
        below, above = self._neighbours(tokens)
        if below is None or above is None or self._chosen[below] != self._chosen[above]:
            return None
        chosen = self._chosen[below]
        fits = {chosen.degree, chosen.backward_degree} <= set(degrees)
        return (chosen, f"{below} and {above} tokens") if fits else None

    def left(self, tokens: int, degrees: Iterable[int]) -> tuple[int, ...]:
        """Those of the degrees that are left to try; all if the choices so far contradict the supposition."""
        given = tuple(degrees)
        below, above = self._neighbours(tokens)
        least, most = min(given), max(given)
        if below is not None:
            least = min(self._chosen[below].degree, self._chosen[below].backward_degree)
        if above is not None:
            most = self._chosen[above].num_chunks
        return tuple(degree for degree in given if least <= degree <= most) or given

    def _neighbours(self, tokens: int) -> tuple[int | None, int | None]:
        """The largest known size up to this one, and the smallest from this one on."""
        below = max((size for size in self._chosen if size <= tokens), default=None)
        above = min((size for size in self._chosen if size >= tokens), default=None)
        return below, above
