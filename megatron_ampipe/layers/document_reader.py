"""Reads where documents begin from what Megatron passes to a layer.

Megatron has two forms. A packed micro-batch (``--sft``, ``--dataloader-inter-document-masking``) comes with
``PackedSeqParams``, which has the bounds of its documents; with ``--reset-attention-mask`` the data loader
makes a mask.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_ampipe.schedule.chunks import Documents

# S sequence rows, B batch, D hidden size.


class DocumentReader:
    """Reads the documents of each micro-batch once, for all layers.

    Args:
        masked: Whether the data loader's masks separate documents (``--reset-attention-mask``).
    """

    def __init__(self, *, masked: bool = False) -> None:
        self._masked = masked
        self._last: weakref.ref[Any] | None = None
        self._documents: Documents | None = None

    def read(
        self, packing: PackedSeqParams | None, mask: Tensor | None, *, num_rows: int, ranks: int = 1
    ) -> Documents | None:
        """The documents of a micro-batch; None if a row may attend to all earlier rows of its sequence.

        Waits for the device once per micro-batch, for the bounds. ``mask [B or 1, 1, S, S]`` bool, True where
        a row must not attend to a key, is read only if masks separate documents. Sequence parallelism spreads
        ``num_rows`` of all packed sequences together over so many tensor-parallel ``ranks``.
        """
        source = packing if packing is not None else mask if self._masked else None
        if source is None:
            return None
        if self._last is None or self._last() is not source:
            if isinstance(source, Tensor):
                self._documents = _masked_documents(source)
            else:
                self._documents = _packed_documents(source, num_rows, ranks=ranks)
            self._last = weakref.ref(source)
        return self._documents


def _packed_documents(packing: PackedSeqParams, num_rows: int, *, ranks: int) -> Documents:
    """The documents of a packed micro-batch of ``num_rows`` rows.

    Several sequences are one after another in it. Megatron's MoE layers treat those that a rank holds as the
    sequences of a micro-batch (``TransformerLayer._maybe_unflatten_for_moe``), so of every rank the first
    ones are one sequence here, the second ones the next. If a rank holds less than two, all rows are one.
    """
    assert packing.qkv_format == "thd", f"an unknown packed format {packing.qkv_format}"
    padded, bounds = packing.cu_seqlens_q_padded, packing.cu_seqlens_q
    assert bounds is not None
    *firsts, end = sorted(set((bounds if padded is None else padded).tolist()))
    assert firsts[0] == 0 and end == num_rows, f"documents {firsts} to {end} of {num_rows} rows"
    of_rank = num_rows // ranks
    length = packing.tokens_per_sample or of_rank
    if length > of_rank or of_rank % length:
        length = of_rank
    starts: list[list[int]] = [[] for _ in range(of_rank // length)]
    for start in firsts:
        rank, row = divmod(start, of_rank)
        sequence, row = divmod(row, length)
        starts[sequence].append(rank * length + row)
    return Documents(tuple(map(tuple, starts)), length * ranks, own_positions=True)


def _masked_documents(mask: Tensor) -> Documents:
    """The documents that a mask separates: a row begins one if it does not see the row before it."""
    begins = mask[:, 0].diagonal(offset=-1, dim1=1, dim2=2).cpu()
    starts = tuple((0, *(rows.nonzero().flatten() + 1).tolist()) for rows in begins)
    return Documents(starts, mask.shape[-1], own_positions=False)


@functools.lru_cache(maxsize=8)
def positions_in_documents(documents: Documents, device: torch.device) -> Tensor:
    """``[S, B]``, the position of each row in its document."""
    rows = torch.arange(documents.num_rows)
    positions = []
    for starts in documents.starts:
        first = torch.tensor(starts)
        positions.append(rows - first[torch.bucketize(rows, first, right=True) - 1])
    return torch.stack(positions, dim=1).to(device)
