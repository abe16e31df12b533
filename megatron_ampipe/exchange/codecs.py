"""Lossy reductions of the bytes that are sent: rows in another format (wires), and fewer rows (condensation).

A :class:`Wire` (``--ampipe-wire``) encodes the rows of dispatch and combine; in the backward pass, gradients
go through the same two methods.

A :class:`Condenser` (``--ampipe-condense``) is Luffy's condensation, for causal models (Chen et al., 2024,
arXiv 2411.15419; from the abstract). Among the rows of a chunk that one sequence sends to one expert, a row
is sent unless it is similar to an earlier row that is sent. A row that is not sent uses the output of the
earliest such row, weighted by its own token's probability. The choice of rows has no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import normalize

from megatron_ampipe.block.settings import SHIPPED_WIRES, WIRE_FLAG, import_class
from megatron_ampipe.exchange.transports import Arrived
from megatron_ampipe.schedule import Direction

# T rows that are sent or received, D hidden size. Condensed: P rows of a chunk, one for each pair of a token
# and an expert; Q rows that are sent; T tokens, E experts, B batch.


@dataclass(frozen=True, slots=True)
class TransferId:
    """Identifies the transfer for which a wire is called."""

    layer: int
    """Megatron's number of the layer, from 1."""
    chunk: int
    stage: str
    """``dispatch`` or ``combine``."""
    direction: Direction
    """``forward`` for values, ``backward`` for gradients, which are sent in the opposite direction."""


class Wire(Protocol):
    """Encodes rows that are sent, and decodes received ones. One object per process, for all layers.

    Lanes call it from their own threads: ``encode`` and ``decode`` of different trips can run at the same
    time. On CUDA both run on the stream of the lane. Rows that stay on the rank are also encoded and decoded,
    so that the result does not depend on the placement of experts.
    """

    def encode(self, rows: Tensor, trip: TransferId) -> Sequence[Tensor]:
        """Encode ``rows [T, D]``, without changing them.

        Returns tensors ``[T, ...]`` whose row ``t`` depends on row ``t`` only, because rows go to different
        ranks. Number, other sizes and dtypes must be the same on all ranks. Must be deterministic, because
        some settings of memory and recompute send rows twice.
        """

    def decode(self, parts: Sequence[Tensor], out: Tensor, trip: TransferId) -> None:
        """Decode received tensors of other ranks' :meth:`encode` into ``out`` ``[T, D]``."""


class Bf16Wire:
    """Rows in bf16: half of the bytes of fp32. Relative error of a value at most 2**-8."""

    def encode(self, rows: Tensor, trip: TransferId) -> Sequence[Tensor]:
        return (rows.bfloat16(),)

    def decode(self, parts: Sequence[Tensor], out: Tensor, trip: TransferId) -> None:
        out.copy_(parts[0])


class Fp8Wire:
    """Rows in fp8 (e4m3) with a scale per row: ``D + 4`` bytes per row instead of ``2 * D`` in bf16.

    The largest value of a row is scaled to the largest of the format. Relative error of a value at most
    2**-4; values below 2**-16 of the largest in their row become 0. A row with NaN or infinity becomes NaN.
    """

    _LARGEST = torch.finfo(torch.float8_e4m3fn).max
    _SCALE_BYTES = 4

    def encode(self, rows: Tensor, trip: TransferId) -> Sequence[Tensor]:
        """One tensor ``[T, D + 4]`` of bytes, the values and then the scale in fp32."""
        wide = rows.float()
        largest = wide.abs().amax(dim=1, keepdim=True)
        # For a row of zeros any scale is right. The divisor must not be 0 in fp32.
        scale = torch.where(largest > 0, (largest / self._LARGEST).clamp_min(1e-37), 1.0)
        scale = torch.where(largest.isnan(), largest, scale)
        values = (wide / scale).clamp(-self._LARGEST, self._LARGEST).to(torch.float8_e4m3fn)
        return (torch.cat([values.view(torch.uint8), scale.view(torch.uint8)], dim=1),)

    def decode(self, parts: Sequence[Tensor], out: Tensor, trip: TransferId) -> None:
        values = parts[0][:, : -self._SCALE_BYTES].view(torch.float8_e4m3fn)
        scale = parts[0][:, -self._SCALE_BYTES :].contiguous().view(torch.float32)
        out.copy_(values.float().mul_(scale))


def load_wire(name: str) -> Wire:
    """Create an object of the class that ``--ampipe-wire NAME`` names; raises ``BadInput`` if that fails."""
    wire_class = import_class(
        name,
        SHIPPED_WIRES,
        flag=WIRE_FLAG,
        fits=lambda other: all(callable(getattr(other, method, None)) for method in ("encode", "decode")),
        rule="is no class with the methods encode(rows, trip) and decode(parts, out, trip)",
        remedy="Give it both; see docs/wire.md.",
    )
    wire: Wire = wire_class()
    return wire


class WireCodec:
    """A codec that uses a wire for one transfer. The first tensor of a chunk is encoded; others are not."""

    uses: Sequence[Tensor] = ()

    def __init__(self, wire: Wire, trip: TransferId) -> None:
        self._wire, self._trip = wire, trip

    @torch.no_grad()
    def send(self, tensors: Sequence[Tensor], *, combine: bool) -> Sequence[Tensor]:
        rows, *others = tensors
        encoded = tuple(self._wire.encode(rows, self._trip))
        self._num_parts, self._row_shape, self._dtype = len(encoded), rows.shape[1:], rows.dtype
        return (*encoded, *others)

    def arrive(self, received: Sequence[Tensor], *, combine: bool) -> Arrived:
        parts, others = received[: self._num_parts], received[self._num_parts :]
        rows = parts[0].new_empty((parts[0].shape[0], *self._row_shape), dtype=self._dtype)

        @torch.no_grad()
        def fill() -> None:
            self._wire.decode(parts, rows, self._trip)

        return (rows, *others), fill


ROUNDING = 1e-6
"""How much rounding may reduce the cosine of equal rows below 1."""


class Condensed(NamedTuple):
    """Which rows of a chunk are sent."""

    sent: Tensor
    """``[Q]`` int64, the rows that are sent, in order."""
    place: Tensor
    """``[P]`` int64, for each row, the index in ``sent`` of the row whose expert output it uses."""
    counts: Tensor
    """``[E]`` int64, number of rows sent to each expert."""


class Condenser:
    """Chooses the rows that are sent, and counts them. Rows are similar if their cosine is at least this."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self._rows = self._sent = 0

    def condense(self, rows: Tensor, routing_map: Tensor, *, batch: int, counted: bool) -> Condensed:
        """Choose the rows of one chunk, and count them for :meth:`take_share` if ``counted``. The host waits.

        ``rows [P, D]`` are sorted by expert and then by token, as Megatron permutes them; spare rows may
        follow. In ``routing_map [T, E]`` bool, token ``t`` belongs to sequence ``t % batch``.
        """
        tokens = routing_map.T.nonzero()[:, 1]
        directions = normalize(rows[: len(tokens)].detach().float(), dim=1)
        per_expert = routing_map.sum(dim=0).tolist()
        first, taken = 0, []
        for part, part_tokens in zip(directions.split(per_expert), tokens.split(per_expert), strict=True):
            taken.append(first + _earliest_similar(part, part_tokens % batch, self.threshold))
            first += len(part_tokens)
        taken_from = torch.cat(taken)
        goes = taken_from == torch.arange(first, device=rows.device)
        sent = goes.nonzero()[:, 0]
        counts = torch.stack([part.sum() for part in goes.split(per_expert)])
        if counted:
            self._rows, self._sent = self._rows + first, self._sent + len(sent)
        return Condensed(sent, (goes.cumsum(dim=0) - 1)[taken_from], counts)

    def take_share(self) -> float | None:
        """Share of the rows since the last call that were not sent, 0 to 1; None if there were no rows."""
        rows, sent = self._rows, self._sent
        self._rows = self._sent = 0
        return 1 - sent / rows if rows else None


def _earliest_similar(rows: Tensor, sequences: Tensor, threshold: float) -> Tensor:
    """For each row of one expert, the earliest sent row that is similar to it, ``[N]``; itself if it is sent.

    Rows are ``[N, D]`` of length 1, in the order of the tokens; ``sequences [N]`` is the sequence of each.
    """
    own = torch.arange(len(rows), device=rows.device)
    if not len(rows):
        return own
    similar = (rows @ rows.T >= threshold - ROUNDING) & (sequences[:, None] == sequences).tril(-1)
    open_rows, goes = torch.ones_like(own, dtype=torch.bool), torch.zeros_like(own, dtype=torch.bool)
    while open_rows.any():
        # A row is decided when all earlier rows that are similar to it are decided.
        decided = open_rows & ~(similar & open_rows).any(dim=1)
        goes |= decided
        open_rows &= ~(decided | (similar & goes).any(dim=1))
    # argmax returns the first of equal values.
    return torch.where(goes, own, (similar & goes).int().argmax(dim=1))
