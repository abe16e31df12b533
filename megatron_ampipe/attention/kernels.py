"""The kernels of core attention by name, and the choice of a kernel for a layer.

Queries are the rows of a list of spans. The rows of a span see the keys ``[0, global_start + length)`` under
a causal mask aligned to the bottom right (AMPipe, figure 5), or those of them in the row's document. Each
name stands for one backend, except ``sdpa``, whose backend torch chooses. Shapes as in :mod:`.pieces`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ampipe import compat
from megatron_ampipe.attention import backends
from megatron_ampipe.attention.backends import DocumentFunction, SpanFunction, bounds_of
from megatron_ampipe.attention.pieces import (
    AddKeys,
    AttentionInPieces,
    PieceKernel,
    joined,
    split_spans,
)
from megatron_ampipe.runtime.segment import KeyValueSums
from megatron_ampipe.schedule.chunks import DocumentRows, Documents, Span
from megatron_ampipe.schedule.features import uses_ring_attention


@dataclass(frozen=True, slots=True)
class Kernel:
    """A backend of attention."""

    span: SpanFunction | None = None
    """Attention of a span with all features; None if it only supports plain attention."""
    pieces: PieceKernel | None = None
    """Plain attention in pieces, also for a ring; None if not supported."""
    documents: DocumentFunction | None = None
    """Attention of all documents in one call; None for one call per document."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        spans: tuple[Span, ...],
        scale: float,
        documents: Documents | None = None,
        sums: KeyValueSums | None = None,
        **options: Any,
    ) -> Tensor:
        """Attention of one chunk; differentiable.

        Takes ``query [R, B, H, C]``, the rows of all spans in order, ``key [S, B, G, C]`` from the start of
        the sequence, and ``value [S, B, G, V]``; returns ``[R, B, H * V]``. ``options`` are other keywords of
        a :data:`~.backends.SpanFunction`; without any, pieces are used if supported. Pieces add the gradients
        of keys and values to ``sums``, and return None for both.
        """
        tensors, scoring = (query, key, value), {"scale": scale, **options}
        if documents is None:
            return self._attend(tensors, spans, scoring, None if sums is None else sums.add)
        rows = documents.rows_of(spans)
        if self.documents is not None:
            queries = query.transpose(0, 1).flatten(0, 1)
            keys, values = (_keys_of_documents(x, rows) for x in (key, value))
            bounds = bounds_of(rows, device=query.device)
            output = self.documents(queries, keys, values, *bounds, **scoring)
            return output.reshape(query.shape[1], query.shape[0], -1).transpose(0, 1)
        return self._attend_one_by_one(tensors, rows, scoring, sums)

    def _attend(
        self, tensors: Sequence[Tensor], spans: Sequence[Span], scoring: dict[str, Any], add: AddKeys | None
    ) -> Tensor:
        if self.pieces is not None and len(scoring) == 1:
            output: Tensor = AttentionInPieces.apply(*tensors, self.pieces, spans, scoring["scale"], add)
            return output
        assert self.span is not None, "pieces only support plain attention"
        (query, key, value), outputs = tensors, []
        for rows, span in split_spans(query, spans):
            window = scoring.get("window")
            first = 0 if window is None else max(0, span.global_start - window)
            seen = slice(first, span.global_end)
            outputs.append(self.span(rows, key[seen], value[seen], **scoring))
        return joined(outputs).flatten(2)

    def _attend_one_by_one(
        self,
        tensors: Sequence[Tensor],
        documents: Sequence[DocumentRows],
        scoring: dict[str, Any],
        sums: KeyValueSums | None,
    ) -> Tensor:
        query, *keys_and_values = tensors

        def attend(queries: Tensor, rows: DocumentRows) -> Tensor:
            def add(start: int, *parts: Tensor) -> None:
                sums.add(rows.first_key + start, *parts, sequence=rows.sequence)

            keys, sequence = slice(rows.first_key, rows.last_key), slice(rows.sequence, rows.sequence + 1)
            seen = [x[keys, sequence] for x in keys_and_values]
            return self._attend((queries, *seen), (rows.span,), scoring, None if sums is None else add)

        outputs = []
        for sequence, part in enumerate(query.split(1, dim=1)):
            in_sequence = [rows for rows in documents if rows.sequence == sequence]
            # Views of one split, whose backward joins the gradients of all documents in one copy.
            queries = part.split([rows.num_rows for rows in in_sequence])
            outputs.append(joined(list(map(attend, queries, in_sequence))))
        return joined(outputs, dim=1)


def _keys_of_documents(tensor: Tensor, documents: Sequence[DocumentRows]) -> Tensor:
    """The keys of all documents, concatenated: a view if they are consecutive in the only sequence."""
    pairs = itertools.pairwise(documents)
    if tensor.shape[1] == 1 and all(earlier.last_key == later.first_key for earlier, later in pairs):
        return tensor[documents[0].first_key : documents[-1].last_key, 0]
    return torch.cat([tensor[rows.first_key : rows.last_key, rows.sequence] for rows in documents])


_MINIMUM_CUDNN = 91501
"""Older versions gave NaN or wrong gradients for lengths that are not multiples of 128."""


def why_not(name: str, gpu: compat.Gpu, head_size: int) -> str | None:
    """Why this GPU cannot run a kernel of :data:`FLASH_KERNELS`; None if it can."""
    if name == "cudnn":
        if gpu.capability != (9, 0) and gpu.capability[0] != 10:
            return "needs Hopper or Blackwell"
        if gpu.cudnn < _MINIMUM_CUDNN:
            return f"cuDNN {gpu.cudnn} is older than {_MINIMUM_CUDNN} (9.15.1)"
        if gpu.deterministic:
            return "not deterministic"
        largest = 128
    else:
        if gpu.capability < (8, 0):
            return "needs Ampere or later"
        # The backward kernel does not support all larger head sizes on devices with less shared memory.
        largest = 256 if gpu.capability == (8, 0) or gpu.capability[0] in (9, 10) else 192
    if head_size % 8 or head_size > largest:
        return f"head size {head_size} is not a multiple of 8 up to {largest}"
    return None


KERNELS: dict[str, Kernel] = {
    "cudnn": Kernel(pieces=backends.CUDNN),
    "torch-flash-2": Kernel(backends.torch_flash, backends.TORCH_FLASH_2, backends.torch_flash_documents),
    "sdpa": Kernel(backends.sdpa),
    "cpu-flash": Kernel(pieces=backends.CPU_FLASH),
    "exact-pieces": Kernel(pieces=backends.EXACT_PIECES),
}
"""The kernels by the name that the start-up table and benchmarks print."""
FLASH_KERNELS = ("cudnn", "torch-flash-2")
"""Kernels for GPUs, the fastest first."""


TRANSFORMER_ENGINE = "te"
"""In place of a kernel's name: Megatron's module of Transformer Engine is called."""


class KernelChoice(NamedTuple):
    """:data:`TRANSFORMER_ENGINE` or a name in :data:`KERNELS`, and the reasons against each faster kernel."""

    name: str
    reason: str = ""


def choose_kernel(settings: Any, *, local: bool, on_gpu: bool, documents: bool = False) -> KernelChoice:
    """Choose the kernel for all chunks of a layer.

    A layer built with Transformer Engine keeps TE's attention, with two exceptions: under context parallelism
    TE would start its own exchange of keys and values, and TE takes the bounds of documents for those of
    whole sequences. Other layers get the fastest available kernel that computes the same function; in a ring,
    a kernel with pieces.

    ``settings`` are Megatron's arguments or the configuration of a layer; a ``local`` layer is built from
    Megatron's local modules. With ``documents``, attention stays within documents.
    """
    if not (local or documents or settings.context_parallel_size > 1):
        return KernelChoice(TRANSFORMER_ENGINE)
    features = {
        "latent attention": settings.multi_latent_attention,
        "attention dropout": settings.attention_dropout > 0,
        "sliding window": settings.window_size is not None,
        "attention sinks": has_sinks(settings),
    }
    used = [name for name, is_used in features.items() if is_used]
    choice = _fastest_kernel(
        used, on_gpu=on_gpu, dtype=settings.params_dtype, head_size=settings.kv_channels, documents=documents
    )
    in_ring = uses_ring_attention(settings) and not documents
    has_pieces = KERNELS[choice.name].pieces is not None
    return choice._replace(name="exact-pieces") if in_ring and not has_pieces else choice


def pinned_kernel(*, on_gpu: bool, dtype: torch.dtype, head_size: int | None = None) -> str:
    """The kernel for comparisons of local layers, whose backend does not depend on the shape."""
    name = _fastest_kernel([], on_gpu=on_gpu, dtype=dtype, head_size=head_size).name
    return "exact-pieces" if name == "sdpa" else name


def has_sinks(settings: Any) -> bool:
    """Whether the softmax of the layers has sinks (``--softmax-type``)."""
    return getattr(settings, "softmax_type", "vanilla") != "vanilla"


_OF_TORCH_FLASH = ("attention dropout", "sliding window")
"""Features beyond plain attention that ``torch-flash-2`` also has."""


def _fastest_kernel(
    used: Sequence[str], *, on_gpu: bool, dtype: torch.dtype, head_size: int | None, documents: bool = False
) -> KernelChoice:
    """The fastest of AMPipe's kernels; ``used`` are the features beyond plain attention."""
    if not on_gpu and used:
        return KernelChoice("sdpa", f"cpu-flash: no support for {' or '.join(used)}")
    if not on_gpu:
        return KernelChoice("cpu-flash")
    if dtype not in (torch.float16, torch.bfloat16):
        return KernelChoice("sdpa", f"flash kernels: do not support {str(dtype).removeprefix('torch.')}")
    assert head_size is not None
    gpu, reasons = compat.current_gpu(), []
    for name in FLASH_KERNELS:
        others = [part for part in used if name == "cudnn" or part not in _OF_TORCH_FLASH]
        reason = why_not(name, gpu, head_size)
        if reason is None and others:
            reason = f"no support for {' or '.join(others)}"
        if reason is None and documents and KERNELS[name].documents is None:
            reason = "one call for each document"
        if reason is None:
            return KernelChoice(name, "; ".join(reasons))
        reasons.append(f"{name}: {reason}")
    return KernelChoice("sdpa", "; ".join(reasons))
