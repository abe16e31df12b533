"""Documents: reads where they begin in a micro-batch, from the arguments that Megatron passes to a layer."""

from __future__ import annotations

import itertools
import weakref

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_ampipe.errors import BadInput
from megatron_ampipe.schedule.chunks import Documents, SequenceLayout


class DocumentReader:
    """Reads the bounds of documents from the arguments of a layer, once per micro-batch for all layers.

    A packed micro-batch (``--sft``, ``--dataloader-inter-document-masking``) comes with the bounds of its
    documents; ``refused``, if given, is raised for it. With ``--reset-attention-mask`` the data loader makes
    a mask, which is read if ``masked``.

    Context-parallel ranks share each packed document (``--sft``, and as Transformer Engine expects), or, with
    ``slices_sequence``, the whole sequence (``--dataloader-inter-document-masking``).
    """

    def __init__(
        self, *, masked: bool = False, refused: BadInput | None = None, slices_sequence: bool = False
    ) -> None:
        self._masked, self._refused, self._slices_sequence = masked, refused, slices_sequence
        self._last: weakref.ref[PackedSeqParams | Tensor] | None = None
        self._documents: Documents | None = None

    def read(
        self,
        packing: PackedSeqParams | None,
        mask: Tensor | None,
        *,
        num_rows: int,
        layout: SequenceLayout | None = None,
    ) -> Documents | None:
        """The documents of a micro-batch; None if a row may attend to all earlier rows of its sequence.

        Waits for the device once per micro-batch. ``mask [B or 1, 1, S, S]`` is bool, True where a row must
        not attend to a key. ``num_rows`` counts the rows of all packed sequences that this rank holds of the
        residual stream, ``layout`` says which; None for all of them.
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
                self._documents = self._packed(source, num_rows, layout or SequenceLayout())
            self._last = weakref.ref(source)
        return self._documents

    def _packed(self, packing: PackedSeqParams, num_rows: int, layout: SequenceLayout) -> Documents:
        ranks = layout.context_ranks
        if ranks == 1:
            return _packed_documents(packing, num_rows * layout.tensor_ranks, ranks=layout.tensor_ranks)
        total = num_rows * layout.tensor_ranks * ranks
        firsts = _firsts(packing, total)
        if num_rows >= 2 * (packing.tokens_per_sample or total):
            # Megatron's MoE layers would take them for the batch.
            raise BadInput(
                "--micro-batch-size",
                total // (packing.tokens_per_sample or total),
                rule="with context parallelism, a rank may hold the rows of less than two packed sequences",
                remedy="Use a smaller --micro-batch-size, such as 1.",
            )
        if self._slices_sequence:
            return Documents((firsts,), total, own_positions=True)
        for start, end in itertools.pairwise((*firsts, total)):
            if (end - start) % (2 * ranks):
                raise BadInput(
                    "cu_seqlens",
                    f"{start} to {end}",
                    rule=f"{ranks} context-parallel ranks hold two slices of each document, so its rows must "
                    f"be a multiple of {2 * ranks}",
                    remedy=f"Pad each document to a multiple of {2 * ranks} rows.",
                )
        return Documents(
            (firsts,), total, own_positions=True, context_ranks=ranks, context_rank=layout.context_rank
        )


def _firsts(packing: PackedSeqParams, num_rows: int) -> tuple[int, ...]:
    """The first row of each document of a packed micro-batch of ``num_rows`` rows."""
    assert packing.qkv_format == "thd", f"an unknown packed format {packing.qkv_format}"
    padded, bounds = packing.cu_seqlens_q_padded, packing.cu_seqlens_q
    assert bounds is not None
    *firsts, end = sorted(set((bounds if padded is None else padded).tolist()))
    assert firsts[0] == 0 and end == num_rows, f"documents {firsts} to {end} of {num_rows} rows"
    return tuple(firsts)


def _packed_documents(packing: PackedSeqParams, num_rows: int, *, ranks: int) -> Documents:
    """The documents of a packed micro-batch of ``num_rows`` rows.

    It holds several sequences one after another. Megatron's MoE layers treat the sequences on a rank as the
    batch (``TransformerLayer._maybe_unflatten_for_moe``): the first sequences of all ranks are one sequence
    here, the second ones the next. If a rank holds less than two sequences, all rows are one sequence.
    """
    firsts = _firsts(packing, num_rows)
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
