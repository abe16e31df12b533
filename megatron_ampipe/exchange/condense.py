"""Similar tokens go to an expert once (``--ampipe-condense``): Luffy's condensation, for causal models.

Among the rows of a chunk that one sequence sends to one expert, a row goes if no earlier row that goes is
similar to it. Every other row takes the result of the earliest such row: a later token never influences an
earlier one. The result is weighted by the token's own probability. This is another function than that of a
stock run; the backward pass is its exact adjoint, except that the choice of rows, like that of experts, has
no gradient.

Source: Chen et al., Luffy, 2024 (arXiv 2411.15419); of the paper, the abstract was at hand.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

ROUNDING = 1e-6
"""Rounding may make the cosine of equal rows so much smaller than 1."""

# P rows of a chunk before condensation, one for each pair of a token and an expert; Q rows that are sent;
# T tokens, E experts, B batch, D hidden size.


class Condensed(NamedTuple):
    """Which rows of a chunk are sent.

    Attributes:
        sent: ``[Q]`` int64, rows that are sent, in order.
        place: ``[P]`` int64, for each row the place in ``sent`` of the row whose result it takes.
        counts: ``[E]`` int64, rows that are sent for each expert.
    """

    sent: Tensor
    place: Tensor
    counts: Tensor


class Condenser:
    """Chooses the rows that are sent, and counts them. One object per process.

    Args:
        threshold: Cosine from which on two rows are similar, above 0 and at most 1.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self._rows = self._sent = 0

    def condense(self, rows: Tensor, routing_map: Tensor, *, batch: int, counted: bool) -> Condensed:
        """Choose the rows of one chunk.

        On a GPU the host waits for the number of rows of each expert, and for the choice.

        Args:
            rows: ``[P, D]``, sorted by expert and then by token, as Megatron permutes them; perhaps followed
                by rows that are not sent.
            routing_map: ``[T, E]`` bool; token ``t`` is of sequence ``t % B``.
            batch: Number of sequences, ``B``.
            counted: Whether the rows count for :meth:`take_share`.
        """
        tokens = routing_map.T.nonzero()[:, 1]
        directions = normalize(rows[: len(tokens)].detach().float(), dim=1)
        per_expert = routing_map.sum(dim=0).tolist()
        first, taken = 0, []
        for of_expert, of_token in zip(directions.split(per_expert), tokens.split(per_expert), strict=True):
            similarity = similarities(of_expert, of_token % batch)
            taken.append(first + representatives(similarity, self.threshold))
            first += len(of_token)
        taken_from = torch.cat(taken)
        goes = taken_from == torch.arange(first, device=rows.device)
        sent = goes.nonzero()[:, 0]
        counts = torch.stack([part.sum() for part in goes.split(per_expert)])
        if counted:
            self._rows, self._sent = self._rows + first, self._sent + len(sent)
        return Condensed(sent, (goes.cumsum(dim=0) - 1)[taken_from], counts)

    def take_share(self) -> float | None:
        """Share of the rows that were not sent since the last call, 0 to 1; None if there were none."""
        rows, sent = self._rows, self._sent
        self._rows = self._sent = 0
        return 1 - sent / rows if rows else None


def similarities(directions: Tensor, sequences: Tensor) -> Tensor:
    """The cosine of each row with each earlier row of its sequence, ``[N, N]``; minus infinity elsewhere.

    Args:
        directions: ``[N, D]`` of length 1, in the order of the tokens.
        sequences: ``[N]``, of which sequence a row is.
    """
    cosines = directions @ directions.T
    earlier = (sequences[:, None] == sequences).tril(-1)
    return cosines.masked_fill_(~earlier, float("-inf"))


def representatives(similarity: Tensor, threshold: float) -> Tensor:
    """For each row the earliest row that goes and is similar to it, ``[N]``; itself for a row that goes.

    Args:
        similarity: From :func:`similarities`.
        threshold: Cosine from which on rows are similar.
    """
    own = torch.arange(len(similarity), device=similarity.device)
    similar = similarity >= threshold - ROUNDING
    open_rows, goes = torch.ones_like(own, dtype=torch.bool), torch.zeros_like(own, dtype=torch.bool)
    while open_rows.any():
        # A row is decided when all earlier rows that are similar to it are.
        found = open_rows & ~(similar & open_rows).any(dim=1)
        goes |= found
        open_rows &= ~found
        open_rows &= ~(similar & goes).any(dim=1)
    # argmax is the first of equal values.
    return torch.where(goes, own, (similar & goes).int().argmax(dim=1)) if len(own) else own
