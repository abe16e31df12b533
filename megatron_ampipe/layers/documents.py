"""Documents: reads where they begin in a micro-batch, from the arguments that Megatron passes to a layer."""

from __future__ import annotations

import weakref

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_ampipe.errors import BadInput
from megatron_ampipe.schedule.chunks import Documents
from megatron_ampipe.schedule.features import PACKED_WITH_CONTEXT


def check_packing(*, context_ranks: int) -> None:
    """Raise :class:`BadInput` if documents are packed and the sequence is split over ranks.

    A launch refuses the flags at start-up; other programs only show with a packed micro-batch that they pack.
    """
    if context_ranks > 1:
        remedy = "Use one context-parallel rank, or sequences that are not packed."
        raise BadInput("context_parallel_size", context_ranks, rule=PACKED_WITH_CONTEXT, remedy=remedy)


class DocumentReader:
    """Reads the bounds of documents from the arguments of a layer, once per micro-batch for all layers.

    A packed micro-batch (``--sft``, ``--dataloader-inter-document-masking``) comes with the bounds of its
    documents; ``refused``, if given, is raised for it. With ``--reset-attention-mask`` the data loader makes
    a mask, which is read if ``masked``.
    """

    def __init__(self, *, masked: bool = False, refused: BadInput | None = None) -> None:
        self._masked, self._refused = masked, refused
        self._last: weakref.ref[PackedSeqParams | Tensor] | None = None
        self._documents: Documents | None = None

    def read(
        self, packing: PackedSeqParams | None, mask: Tensor | None, *, num_rows: int, ranks: int = 1
    ) -> Documents | None:
        """The documents of a micro-batch; None if a row may attend to all earlier rows of its sequence.

        Waits for the device once per micro-batch. ``mask [B or 1, 1, S, S]`` is bool, True where a row must
        not attend to a key. ``num_rows`` counts the rows of all packed sequences together, over all
        ``ranks`` of sequence parallelism.
        """
        if packing is not None and self._refused is not None:
            raise self._refused
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

    It holds several sequences one after another. Megatron's MoE layers treat the sequences on a rank as the
    batch (``TransformerLayer._maybe_unflatten_for_moe``): the first sequences of all ranks are one sequence
    here, the second ones the next. If a rank holds less than two sequences, all rows are one sequence.
    """
    assert packing.qkv_format == "thd", f"an unknown packed format {packing.qkv_format}"
    padded, bounds = packing.cu_seqlens_q_padded, packing.cu_seqlens_q
    assert bounds is not None
    *firsts, end = sorted(set((bounds if padded is None else padded).tolist()))
    assert firsts[0] == 0 and end == num_rows, f"documents {firsts} to {end} of {num_rows} rows"
    rows_per_rank = num_rows // ranks
    length = packing.tokens_per_sample or rows_per_rank
    if length > rows_per_rank or rows_per_rank % length:
        length = rows_per_rank
    starts: list[list[int]] = [[] for _ in range(rows_per_rank // length)]
    for start in firsts:
        rank, row = divmod(start, rows_per_rank)
        sequence, row = divmod(row, length)
        starts[sequence].append(rank * length + row)
    return Documents(tuple(map(tuple, starts)), length * ranks, own_positions=True)


def _masked_documents(mask: Tensor) -> Documents:
    """The documents that a mask separates: a row that does not see the row before it begins a document."""
    begins = mask[:, 0].diagonal(offset=-1, dim1=1, dim2=2).cpu()
    starts = tuple((0, *(rows.nonzero().flatten() + 1).tolist()) for rows in begins)
    return Documents(starts, mask.shape[-1], own_positions=False)
