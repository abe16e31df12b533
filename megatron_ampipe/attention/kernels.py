"""The kernels of core attention by name, and the choice of a kernel for a layer.

Queries are the rows of a list of spans. The rows of a span see the keys ``[0, global_start + length)`` under
a causal mask aligned to the bottom right (AMPipe, figure 5), or those of them in the row's document. Each
name stands for one backend, except ``sdpa``, whose backend torch chooses. Shapes as in :mod:`.pieces`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Required, TypedDict, Unpack

import torch
from torch import Tensor

from megatron_ampipe import compat
from megatron_ampipe.attention import backends, flash_packages
from megatron_ampipe.attention.backends import DocumentFunction, SpanFunction, bounds_of
from megatron_ampipe.attention.pieces import (
    AddKeys,
    AttentionInPieces,
    PieceKernel,
    joined,
    split_spans,
)
from megatron_ampipe.block.megatron_settings import MegatronSettings
from megatron_ampipe.runtime.segment import KeyValueSums
from megatron_ampipe.schedule.chunks import DocumentRows, Documents, Span
from megatron_ampipe.schedule.features import uses_ring_attention


class ScoringOptions(TypedDict, total=False):
    """Keywords of a :data:`~.backends.SpanFunction` beyond the scale."""

    dropout: float
    window: int | None
    sinks: Tensor | None


class _Scoring(ScoringOptions, total=False):
    scale: Required[float]


class KernelSettings(MegatronSettings, Protocol):
    """What is read of Megatron's settings to choose a kernel. Latent attention has separate head sizes."""

    @property
    def params_dtype(self) -> torch.dtype: ...

    @property
    def kv_channels(self) -> int: ...

    @property
    def qk_head_dim(self) -> int: ...

    @property
    def qk_pos_emb_head_dim(self) -> int: ...

    @property
    def v_head_dim(self) -> int: ...


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
        **options: Unpack[ScoringOptions],
    ) -> Tensor:
        """Attention of one chunk; differentiable.

        Takes ``query [R, B, H, C]``, the rows of all spans in order, ``key [S, B, G, C]`` from the start of
        the sequence, and ``value [S, B, G, V]``; returns ``[R, B, H * V]``. ``options`` are other keywords of
        a :data:`~.backends.SpanFunction`; without any, pieces are used if supported. Pieces add the gradients
        of keys and values to ``sums``, and return None for both.
        """
        tensors = (query, key, value)
        scoring: _Scoring = {"scale": scale, **options}
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
        self, tensors: Sequence[Tensor], spans: Sequence[Span], scoring: _Scoring, add: AddKeys | None
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
        scoring: _Scoring,
        sums: KeyValueSums | None,
    ) -> Tensor:
        query, *keys_and_values = tensors
        add_to_sums = None if sums is None else sums.add

        def attend(queries: Tensor, rows: DocumentRows) -> Tensor:
            add = None
            if add_to_sums is not None:
                add = functools.partial(_add_in_document, add_to_sums, rows)
            keys, sequence = slice(rows.first_key, rows.last_key), slice(rows.sequence, rows.sequence + 1)
            seen = [x[keys, sequence] for x in keys_and_values]
            return self._attend((queries, *seen), (rows.span,), scoring, add)

        outputs: list[Tensor] = []
        for sequence, part in enumerate(query.split(1, dim=1)):
            in_sequence = [rows for rows in documents if rows.sequence == sequence]
            # Views of one split, whose backward joins the gradients of all documents in one copy.
            queries = part.split([rows.num_rows for rows in in_sequence])
            outputs.append(joined(list(map(attend, queries, in_sequence))))
        return joined(outputs, dim=1)


def _add_in_document(
    add: Callable[..., None], rows: DocumentRows, start: int, key: Tensor, value: Tensor
) -> None:
    """Add gradients of keys and values from row ``start`` of a document on (:data:`~.pieces.AddKeys`)."""
    add(rows.first_key + start, key, value, sequence=rows.sequence)


def _keys_of_documents(tensor: Tensor, documents: Sequence[DocumentRows]) -> Tensor:
    """The keys of all documents, concatenated: a view if they are consecutive in the only sequence."""
    pairs = itertools.pairwise(documents)
    if tensor.shape[1] == 1 and all(earlier.last_key == later.first_key for earlier, later in pairs):
        return tensor[documents[0].first_key : documents[-1].last_key, 0]
    return torch.cat([tensor[rows.first_key : rows.last_key, rows.sequence] for rows in documents])


KERNELS: dict[str, Kernel] = {
    "flash-attn-3": Kernel(
        flash_packages.flash_3, flash_packages.FLASH_3_PIECES, flash_packages.flash_3_documents
    ),
    "cudnn": Kernel(pieces=backends.CUDNN),
    "flash-attn-4": Kernel(
        flash_packages.flash_4, flash_packages.FLASH_4_PIECES, flash_packages.flash_4_documents
    ),
    "torch-flash-2": Kernel(backends.torch_flash, backends.TORCH_FLASH_2, backends.torch_flash_documents),
    "flash-attn-2": Kernel(
        flash_packages.flash_2, flash_packages.FLASH_2_PIECES, flash_packages.flash_2_documents
    ),
    "sdpa": Kernel(backends.sdpa),
    "cpu-flash": Kernel(pieces=backends.CPU_FLASH),
    "exact-pieces": Kernel(pieces=backends.EXACT_PIECES),
}
"""The kernels by the name that the start-up table and benchmarks print."""

DROPOUT, WINDOW = "attention dropout", "sliding window"
LATENT, SINKS = "latent attention", "attention sinks"
FLASH_KERNELS = {
    "flash-attn-3": (WINDOW, LATENT),
    "cudnn": (),
    "flash-attn-4": (WINDOW, LATENT, SINKS),
    "torch-flash-2": (DROPOUT, WINDOW),
    "flash-attn-2": (DROPOUT, WINDOW),
}
"""Kernels for GPUs in order of preference, and their features beyond plain attention.

On Hopper, FlashAttention 3 and cuDNN are about equally fast, their authors publish; a chunk takes one
call of FlashAttention 3, but two of cuDNN and a merge. FlashAttention 4 is called through more Python, which
takes the host longer. torch has the kernels of flash-attn, and calls them from C++.
"""
_MINIMUM_CUDNN = 91501
"""Older versions gave NaN or wrong gradients for lengths that are not multiples of 128."""
_LATENT_HEADS = (192, 128)
"""Of keys and of values: the only different sizes that FlashAttention 3 and 4 support on all GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a layer needs of a kernel for GPUs."""

    head_size: int
    """Of queries and keys."""
    value_size: int
    """The head size of values."""
    features: tuple[str, ...] = ()
    """Beyond plain attention, from those of :data:`FLASH_KERNELS`."""
    documents: bool = False
    """Whether attention stays within documents."""


def why_not(name: str, gpu: compat.Gpu, needs: Needs) -> str | None:
    """Why a kernel of :data:`FLASH_KERNELS` cannot run a layer on this GPU, or should not; None if it can.

    The package of a kernel comes last: "not installed" means that installing it would help.
    """
    reason = device_objection(name, gpu)
    if reason is None:
        missing = [feature for feature in needs.features if feature not in FLASH_KERNELS[name]]
        reason = f"no support for {' or '.join(missing)}" if missing else None
    if reason is None:
        reason = _size_objection(name, gpu, needs)
    if reason is None and needs.documents and KERNELS[name].documents is None:
        reason = "one call for each document"
    return reason or compat.flash_attention_problem(name)


def device_objection(name: str, gpu: compat.Gpu) -> str | None:
    """Why a GPU cannot run a kernel of :data:`FLASH_KERNELS` for any layer; None if it can for some."""
    is_hopper, is_blackwell = gpu.capability == (9, 0), gpu.capability[0] == 10
    if name == "flash-attn-3":
        return None if is_hopper else "needs Hopper"
    if name in ("cudnn", "flash-attn-4") and not (is_hopper or is_blackwell):
        return "needs Hopper or Blackwell"
    if gpu.capability < (8, 0):
        return "needs Ampere or later"
    if name == "cudnn" and gpu.cudnn < _MINIMUM_CUDNN:
        return f"cuDNN {gpu.cudnn} is older than {_MINIMUM_CUDNN} (9.15.1)"
    if name == "cudnn" and gpu.deterministic:
        return "not deterministic"
    if name == "torch-flash-2" and not gpu.torch_flash:
        return "this torch was built without FlashAttention"
    return None


def _size_objection(name: str, gpu: compat.Gpu, needs: Needs) -> str | None:
    size, of_values = needs.head_size, needs.value_size
    if size != of_values:
        supported = (size, of_values) == _LATENT_HEADS
        return None if supported else f"head sizes {size} and {of_values} differ, and are not 192 and 128"
    is_blackwell = gpu.capability[0] == 10
    if name == "flash-attn-4" and is_blackwell and size == 256 and SINKS not in needs.features:
        return None
    largest = _largest_head_size(name, gpu, dropout=DROPOUT in needs.features)
    if size % 8 or size > largest:
        return f"head size {size} is not a multiple of 8 up to {largest}"
    return None


def _largest_head_size(name: str, gpu: compat.Gpu, *, dropout: bool) -> int:
    is_blackwell = gpu.capability[0] == 10
    if name == "cudnn" or (name == "flash-attn-4" and is_blackwell):
        return 128
    if name == "flash-attn-3":
        # Its deterministic backward supports no larger ones.
        return 192 if gpu.deterministic else 256
    # On devices with less shared memory, the backward of FlashAttention 2 supports not all larger ones.
    has_memory = gpu.capability == (8, 0) or gpu.capability[0] in (9, 10)
    return 256 if has_memory or (name == "flash-attn-2" and not dropout) else 192


TRANSFORMER_ENGINE = "te"
"""In place of a kernel's name: Megatron's module of Transformer Engine is called."""


class KernelChoice(NamedTuple):
    """``TRANSFORMER_ENGINE`` or a name in :data:`KERNELS`, and the reasons against each preferred kernel."""

    name: str
    reason: str = ""


def choose_kernel(
    settings: KernelSettings, *, local: bool, on_gpu: bool, documents: bool = False
) -> KernelChoice:
    """Choose the kernel for all chunks of a layer.

    A layer built with Transformer Engine keeps TE's attention, with two exceptions: under context parallelism
    TE would start its own exchange of keys and values, and TE takes the bounds of documents for those of
    whole sequences. Other layers get the first of :data:`FLASH_KERNELS` that computes the same function and
    can run here, otherwise torch's; in a ring, a kernel with pieces.

    ``settings`` are Megatron's arguments or the configuration of a layer; a ``local`` layer is built from
    Megatron's local modules. With ``documents``, attention stays within documents.
    """
    if not (local or documents or settings.context_parallel_size > 1):
        return KernelChoice(TRANSFORMER_ENGINE)
    used = {
        LATENT: settings.multi_latent_attention,
        DROPOUT: settings.attention_dropout > 0,
        WINDOW: settings.window_size is not None,
        SINKS: has_sinks(settings),
    }
    head_size, value_size = _head_sizes(settings)
    needs = Needs(
        head_size=head_size,
        value_size=value_size,
        features=tuple(name for name, is_used in used.items() if is_used),
        documents=documents,
    )
    choice = _preferred_kernel(needs, on_gpu=on_gpu, dtype=settings.params_dtype)
    in_ring = uses_ring_attention(settings) and not documents
    has_pieces = KERNELS[choice.name].pieces is not None
    return choice._replace(name="exact-pieces") if in_ring and not has_pieces else choice


def _head_sizes(settings: KernelSettings) -> tuple[int, int]:
    """The head size of queries and keys, and that of values."""
    if settings.multi_latent_attention:
        return settings.qk_head_dim + settings.qk_pos_emb_head_dim, settings.v_head_dim
    return settings.kv_channels, settings.kv_channels


def pinned_kernel(*, on_gpu: bool, dtype: torch.dtype, head_size: int | None = None) -> str:
    """The kernel for comparisons of local layers, whose backend does not depend on the shape.

    ``head_size`` is needed on a GPU only.
    """
    if not on_gpu:
        return "cpu-flash"
    assert head_size is not None
    needs = Needs(head_size=head_size, value_size=head_size)
    name = _preferred_kernel(needs, on_gpu=True, dtype=dtype).name
    return "exact-pieces" if name == "sdpa" else name


def has_sinks(settings: object) -> bool:
    """Whether the softmax of the layers has sinks (``--softmax-type``)."""
    return (getattr(settings, "softmax_type", None) or "vanilla") != "vanilla"


def _preferred_kernel(needs: Needs, *, on_gpu: bool, dtype: torch.dtype) -> KernelChoice:
    """The first of AMPipe's kernels that supports a layer."""
    if not on_gpu and needs.features:
        return KernelChoice("sdpa", f"cpu-flash: no support for {' or '.join(needs.features)}")
    if not on_gpu:
        return KernelChoice("cpu-flash")
    if dtype not in (torch.float16, torch.bfloat16):
        return KernelChoice("sdpa", f"flash kernels: do not support {str(dtype).removeprefix('torch.')}")
    gpu = compat.current_gpu()
    reasons: list[str] = []
    for name in FLASH_KERNELS:
        reason = why_not(name, gpu, needs)
        if reason is None:
            return KernelChoice(name, "; ".join(reasons))
        reasons.append(f"{name}: {reason}")
    return KernelChoice("sdpa", "; ".join(reasons))
