"""Does it save bytes to bring a sequence to the rank with most of its tokens? Luffy's migration, simulated.

After the experts of a layer, a sequence's rows are combined on some rank, and the sequence lives there from
then on: the rows of its tokens that are there already need not travel. What else has to follow is counted
too: its residual rows, to which the experts' outputs are added. Keys and values need not, as the next layer
computes new ones. Counted on a recorded routing, in rows of the hidden size. The backward pass sends as many
rows the other way. Pure. Called by ``ampipe routing``.

Source: Chen et al., Luffy, 2024 (arXiv 2411.15419); of the paper, the abstract was at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from megatron_ampipe.plan.recorded_routing import RecordedRouting


class Residual(StrEnum):
    """Which residual rows follow a sequence that moves."""

    ALL = "all"
    MISSING = "missing"
    """Those of tokens that no expert of the new rank had. The others would be computed back from the
    normalized rows that were sent to the experts there, with rounding."""
    NONE = "none"
    """None, which no implementation can do: what the combine alone would save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One sequence in one layer.

    Attributes:
        rows: Rows that experts of each rank return, ``[rank]``.
        present: Tokens that have experts on each rank, ``[rank]``.
        tokens: Tokens of the sequence.
    """

    rows: Sequence[int]
    present: Sequence[int]
    tokens: int

    def dispatched(self, home: int) -> int:
        """Rows that leave the rank of the sequence."""
        return sum(self.rows) - self.rows[home]

    def combined(self, home: int, new: int, residual: Residual) -> int:
        """Rows that travel so that the sequence lives on a rank afterwards."""
        moved = sum(self.rows) - self.rows[new]
        if new == home or residual is Residual.NONE:
            return moved
        return moved + self.tokens - (self.present[new] if residual is Residual.MISSING else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """Rows of a forward pass, of all recorded sequences.

    Attributes:
        dispatch: With every sequence where it is.
        combine: Likewise.
        most: Both, if every sequence goes to the rank with most of its rows, in every layer.
        most_combine: The combine of that alone, with what follows.
        best: Both, if each sequence takes the way over the ranks with the fewest rows in total. No choice
            is better; that all might end up on one rank is not excluded.
    """

    dispatch: float
    combine: float
    most: float
    most_combine: float
    best: float

    @property
    def saved_by_most(self) -> float:
        """Share of dispatch and combine, below 0 where more is sent."""
        return _saved(self.most, self.dispatch + self.combine)

    @property
    def saved_of_combine(self) -> float:
        """Share of the combine alone."""
        return _saved(self.most_combine, self.combine)

    @property
    def saved_by_best(self) -> float:
        """Share of dispatch and combine that no choice of ranks exceeds."""
        return _saved(self.best, self.dispatch + self.combine)


def simulate(routing: RecordedRouting, ranks: int, *, once: bool, residual: Residual) -> Moves:
    """What sequences send that stay, and that move.

    The mean over all ranks on which a sequence can begin.

    Args:
        routing: Of sequences that are whole on a rank (``ranks_per_sequence`` 1).
        ranks: Between which the experts are divided.
        once: A token is sent to a rank once (``--ampipe-exchange ranks``); otherwise for each of its experts.
        residual: What follows.
    """
    totals = [0.0] * 5
    for record in routing.records:
        assert record.ranks_per_sequence == 1
        tokens = sum(record.tokens)
        for part in range(record.num_parts):
            layers = []
            for one in record.layers:
                present = one.arriving(part, ranks) if ranks > 1 else (tokens,)
                rows = present if once else one.part_per_place(part, ranks)
                layers.append(Layer(rows=rows, present=present, tokens=tokens))
            for home in range(ranks):
                for index, value in enumerate(_of_sequence(layers, home, residual)):
                    totals[index] += value / ranks
    dispatch, combine, most_dispatch, most_combine, best = totals
    return Moves(
        dispatch=dispatch,
        combine=combine,
        most=most_dispatch + most_combine,
        most_combine=most_combine,
        best=best,
    )


def _of_sequence(layers: Sequence[Layer], home: int, residual: Residual) -> tuple[int, int, int, int, int]:
    stays = sum(layer.dispatched(home) for layer in layers)
    dispatched = combined = 0
    at = home
    for layer in layers:
        dispatched += layer.dispatched(at)
        # It stays where it is if no rank has more.
        new = max(range(len(layer.rows)), key=lambda rank: (layer.rows[rank], rank == at))
        combined += layer.combined(at, new, residual)
        at = new
    return stays, stays, dispatched, combined, fewest(layers, home, residual)


def fewest(layers: Sequence[Layer], home: int, residual: Residual) -> int:
    """Rows of dispatch and combine on the best way of a sequence over the ranks, from a given one."""
    ranks = range(len(layers[0].rows))
    left = [0 for _ in ranks]
    for layer in reversed(layers):
        left = [
            layer.dispatched(at) + min(layer.combined(at, new, residual) + left[new] for new in ranks)
            for at in ranks
        ]
    return left[home]


def _saved(rows: float, before: float) -> float:
    return 1 - rows / before if before else 0.0
