"""Attention of a chunk whose sequences consist of documents: every row sees its own document only.

Two ways to the same function, neither with a mask: :func:`by_document` calls any kernel of
:mod:`.attention_kernels` once per document, and :mod:`.varlen_kernels` has kernels for GPUs that take all
documents of a chunk in one call. Called by ``layers``.

Shapes as in :mod:`.attention_kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_ampipe.runtime.attention_kernels import KERNELS, AttentionKernel
from megatron_ampipe.runtime.key_value_sums import KeyValueSums, SequenceSums
from megatron_ampipe.runtime.varlen_kernels import VARLEN_KERNELS
from megatron_ampipe.schedule.documents import DocumentRows


def attend_to_documents(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    rows: Sequence[DocumentRows],
    scale: float,
    dropout: float = 0.0,
    window: int | None = None,
    sums: KeyValueSums | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with the kernel of a name in ``KERNELS``, in one call if it can take several documents.

    Args:
        name: Of the kernel.
        query: ``[R, B, H, C]``.
        key: ``[S, B, G, C]``, from the start of the sequences.
        value: ``[S, B, G, V]``.
        rows: The query rows by document (``Documents.rows_of``).
        scale: Factor on the scores.
        dropout: Probability of dropping an attention weight.
        window: How many keys before its own position a query sees; None for all of its document.
        sums: See :class:`.attention_kernels.AttentionKernel`.
        sinks: Likewise.

    Returns:
        ``[R, B, H * V]``.
    """
    if name in VARLEN_KERNELS:
        assert sinks is None, "another kernel is chosen for sinks"
        return VARLEN_KERNELS[name](query, key, value, rows=rows, scale=scale, dropout=dropout, window=window)
    return by_document(
        KERNELS[name],
        query,
        key,
        value,
        rows=rows,
        scale=scale,
        dropout=dropout,
        window=window,
        sums=sums,
        sinks=sinks,
    )


def by_document(
    kernel: AttentionKernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    rows: Sequence[DocumentRows],
    scale: float,
    dropout: float = 0.0,
    window: int | None = None,
    sums: KeyValueSums | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """One call of ``kernel`` for each document; arguments as in :func:`attend_to_documents`."""
    outputs: list[list[Tensor]] = [[] for _ in range(query.shape[1])]
    # Views of one split: its backward joins the gradients of all documents in one copy.
    by_sequence = [
        part.split([one.num_rows for one in rows if one.sequence == sequence])
        for sequence, part in enumerate(query.split(1, dim=1))
    ]
    for one in rows:
        keys, sequence = slice(one.first_key, one.last_key), one.sequence
        output = kernel(
            by_sequence[sequence][len(outputs[sequence])],
            key[keys, sequence : sequence + 1],
            value[keys, sequence : sequence + 1],
            spans=(one.span,),
            scale=scale,
            dropout=dropout,
            window=window,
            sums=None if sums is None else SequenceSums(sums, sequence=sequence, first=one.first_key),
            sinks=sinks,
        )
        outputs[sequence].append(output)
    joined = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in outputs]
    return joined[0] if len(joined) == 1 else torch.cat(joined, dim=1)
