"""Megatron's self-attention in the two parts that are run by chunk: QKV projection, then core attention.

Mirrors ``Attention.forward`` and ``MultiLatentAttention.forward`` for training.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megatron_ampipe import compat
from megatron_ampipe.attention.backends import EXACT_PIECES
from megatron_ampipe.attention.kernels import KERNELS, TRANSFORMER_ENGINE, Kernel, ScoringOptions, has_sinks
from megatron_ampipe.attention.ring import RingAttention
from megatron_ampipe.layers.linear_layers import replaced
from megatron_ampipe.runtime.collectives import copy_to_device
from megatron_ampipe.runtime.saved_tensors import RecomputedTensors
from megatron_ampipe.runtime.segment import KeyValueSums
from megatron_ampipe.runtime.slot_ops import take_rows
from megatron_ampipe.schedule import Span
from megatron_ampipe.schedule.chunks import Documents

RotaryEmbedding = Tensor | tuple[Tensor, Tensor]


def project_qkv(
    attention: Attention,
    normed: Tensor,
    rotary_pos_emb: RotaryEmbedding | None,
    *,
    spans: Sequence[Span],
    num_keys: int,
    documents: Documents | None = None,
    gathered: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of some rows, with the rotary embedding applied.

    Args:
        attention: Megatron's module.
        normed: ``[rows of this rank, B, D]``, the output of the input norm.
        rotary_pos_emb: Embedding of the whole sequence; None for latent attention, which computes its own.
        spans: The rows of the local sequence that ``normed`` holds.
        num_keys: Rows of the whole sequence.
        documents: None unless attention stays within documents.
        gathered: Whether keys and values are gathered over the context-parallel ranks.

    Returns:
        ``[R, B, H, C]``, with an output gate ``[R, B, H, 2 * C]``; ``[R, B, G, C]``; ``[R, B, G, V]``.
    """
    rows = functools.partial(_rotary_of_rows, spans=spans, documents=documents)
    if isinstance(attention, MultiLatentAttention):
        # Megatron takes the rows for the first ones of the sequence. Not under context parallelism, where its
        # embedding knows which rows of a sequence a rank holds, but not which of packed documents; the
        # projection is then never cut into chunks.
        real_positions: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if attention.pg_collection.cp.size() == 1 or documents is not None:
            rotary = _RotaryOfRows(attention.rotary_pos_emb, rows, num_keys)
            real_positions = replaced((attention, "rotary_pos_emb", rotary))
        with real_positions:
            query, key, value, *_ = attention.get_query_key_value_tensors(normed)
    else:
        assert isinstance(attention, SelfAttention)
        has_gate = attention.config.attention_output_gate
        query, key, value, *gate = attention.get_query_key_value_tensors(normed, None, output_gate=has_gate)
        query, key = _rotate(attention, query, key, rotary_pos_emb, rows)
        if gate:
            query = torch.cat([query, gate[0].view(query.shape)], dim=-1)
    if not gathered:
        return query, key, value
    group = attention.pg_collection.cp
    return query, *(gather_sequence(rows, group, documents) for rows in (key, value))


def _rotary_of_rows(embedding: Tensor, *, spans: Sequence[Span], documents: Documents | None) -> Tensor:
    """The part ``[R, 1 or B, 1, C]`` of a rotary embedding ``[positions, 1, 1, C]`` for these rows."""
    if documents is None or not documents.own_positions:
        return take_rows(embedding, spans)
    positions = _positions_in_documents(documents, embedding.device)
    parts = [positions[span.global_start : span.global_end] for span in spans]
    return embedding[:, 0][parts[0] if len(parts) == 1 else torch.cat(parts)]


@functools.lru_cache(maxsize=8)
def _positions_in_documents(documents: Documents, device: torch.device) -> Tensor:
    """``[S, B]``, the position of each row in its document."""
    rows = torch.arange(documents.num_rows)
    positions = []
    for starts in documents.starts:
        first = torch.tensor(starts)
        positions.append(rows - first[torch.bucketize(rows, first, right=True) - 1])
    return copy_to_device(torch.stack(positions, dim=1), device)


class _RotaryEmbeddings(Protocol):
    """What attention calls of Megatron's module. YaRN's returns ``(embedding, factor)``."""

    def __call__(self, length: int, **kwargs: object) -> Tensor | tuple[Tensor, float]: ...

    def get_cached_cos_sin(self, length: int, **kwargs: object) -> tuple[Tensor, ...]: ...


class _RotaryOfRows:
    """Wraps a rotary embedding of Megatron to return only some of its rows."""

    def __init__(self, whole: _RotaryEmbeddings, rows: Callable[[Tensor], Tensor], num_keys: int) -> None:
        self._whole, self._rows, self._num_keys = whole, rows, num_keys

    def get_rotary_seq_len(self, *args: object, **kwargs: object) -> int:
        return self._num_keys

    def __call__(self, length: int, **kwargs: object) -> Tensor | tuple[Tensor, float]:
        # As for packed rows: with context parallelism, the embedding would take only a rank's rows.
        embedding = self._whole(length, **{**kwargs, "packed_seq": True})
        if not isinstance(embedding, tuple):
            return self._rows(embedding)
        return self._rows(embedding[0]), *embedding[1:]

    def get_cached_cos_sin(self, length: int, **kwargs: object) -> tuple[Tensor, ...]:
        return tuple(self._rows(part) for part in self._whole.get_cached_cos_sin(length, **kwargs))


def _rotate(
    attention: SelfAttention,
    query: Tensor,
    key: Tensor,
    rotary_pos_emb: RotaryEmbedding | None,
    rows: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    skips = attention.config.no_rope_freq
    if rotary_pos_emb is None or (skips and skips[attention.layer_number - 1]):
        return query, key
    if isinstance(rotary_pos_emb, tuple):
        for_query, for_key = (part if part is None else rows(part) for part in rotary_pos_emb)
    else:
        for_query = for_key = rows(rotary_pos_emb)
    return _rotate_rows(attention, query, for_query), _rotate_rows(attention, key, for_key)


def _rotate_rows(attention: SelfAttention, tensor: Tensor, embedding: Tensor | None) -> Tensor:
    if embedding is None:
        return tensor
    # Fused kernels take one embedding for all sequences: if positions differ, join the sequences into one.
    differ = embedding.shape[1] > 1
    rows, positions = (x.flatten(0, 1).unsqueeze(1) if differ else x for x in (tensor, embedding))
    # From its module: Megatron-Bridge replaces it there, as its configurations have None without YaRN.
    factor = yarn_rotary_pos_embedding._yarn_get_concentration_factor_from_config(attention.config)
    rotated: Tensor = apply_rotary_pos_emb(
        rows,
        positions,
        config=attention.config,
        mscale=factor,
        cp_group=attention.pg_collection.cp,
    )
    return rotated.view(tensor.shape)


def gather_sequence(tensor: Tensor, group: dist.ProcessGroup, documents: Documents | None = None) -> Tensor:
    """Gather rows from Megatron's zigzag layout over context-parallel ranks into sequence order.

    Takes ``[S / ranks, ...]``, the slices ``r`` and ``2 * ranks - 1 - r`` of the sequence, or of each of the
    ``documents`` that ranks share, and returns ``[S, ...]``. Differentiable.
    """
    num_ranks = group.size()
    if num_ranks == 1:
        return tensor
    gathered: Tensor = gather_from_sequence_parallel_region(tensor.contiguous(), group=group)
    if documents is not None and documents.context_ranks > 1:
        return gathered.index_select(0, _order_of_ranks(documents, tensor.device))
    slices = gathered.chunk(2 * num_ranks)
    return torch.cat([*slices[0::2], *reversed(slices[1::2])])


@functools.lru_cache(maxsize=8)
def _order_of_ranks(documents: Documents, device: torch.device) -> Tensor:
    """``[S]``, see :meth:`Documents.order_of_ranks`."""
    return copy_to_device(torch.tensor(documents.order_of_ranks()), device)


class ChunkAttention:
    """Core attention of the chunks of one layer. ``kernel`` is ``te`` or a name in ``KERNELS``."""

    def __init__(self, attention: Attention, *, kernel: str) -> None:
        config = attention.config
        self._core = attention.core_attention
        calls_module = kernel == TRANSFORMER_ENGINE
        self._kernel = Kernel(self._transformer_engine) if calls_module else KERNELS[kernel]
        self._scale = _scale(attention)
        self._sequence_parallel = config.sequence_parallel
        # Transformer Engine's module applies dropout, sinks and window itself.
        is_kernel = not calls_module
        self._dropout = config.attention_dropout if is_kernel else 0.0
        self._has_sinks = is_kernel and has_sinks(config)
        self._options: ScoringOptions = {}
        if is_kernel and _has_window(attention):
            left, right = config.window_size
            assert right == 0, "start-up refuses windows that look ahead"
            if left >= 0:
                self._options["window"] = left

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        spans: tuple[Span, ...],
        documents: Documents | None = None,
        sums: KeyValueSums | None = None,
        core: RecomputedTensors | None = None,
    ) -> Tensor:
        """``[R, B, H, C]``, ``[S, B, G, C]``, ``[S, B, G, V]`` to ``[R, B, H * V]``.

        ``core`` runs it, if what it saves is recomputed.
        """
        dropout = self._dropout if self._core.training else 0.0

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            # As in DotProductAttention: tensor-parallel ranks need different dropout masks.
            forks_rng = dropout > 0 and not self._sequence_parallel
            options: ScoringOptions = {**self._options}
            if dropout:
                options["dropout"] = dropout
            if self._has_sinks:
                options["sinks"] = _read_sinks(self._core)
            with tensor_parallel.get_cuda_rng_tracker().fork() if forks_rng else contextlib.nullcontext():
                return self._kernel(
                    query,
                    key,
                    value,
                    spans=spans,
                    scale=self._scale,
                    documents=documents,
                    sums=sums,
                    **options,
                )

        if core is None:
            return attend(query, key, value)
        same_random_states = functools.partial(random_states, random._get_all_rng_states())
        return core.run(attend, query, key, value, within=same_random_states)

    def ring(self, ranks: dist.ProcessGroup) -> RingAttention:
        """The ring attention of one pass: to the keys of one rank after another."""
        return RingAttention(
            self._kernel.pieces or EXACT_PIECES, scale=self._scale, rank=ranks.rank(), num_ranks=ranks.size()
        )

    def _transformer_engine(self, query: Tensor, key: Tensor, value: Tensor, **_: float) -> Tensor:
        """Megatron's TE attention module with a bottom-right causal mask, for the rows of one span."""
        with compat.backend_of_shape((id(self._core), query.shape, key.shape)):
            output: Tensor = self._core(
                query, key, value, None, attn_mask_type=AttnMaskType.causal_bottom_right
            )
        return output


@contextlib.contextmanager
def random_states(states: tuple[object, ...]) -> Iterator[None]:
    """Set these random states; restore the current ones on exit."""
    with random._fork_rng():
        random._set_all_rng_states(*states)
        yield


def _read_sinks(core_attention: torch.nn.Module) -> Tensor:
    """The sinks ``[H]``, read through a call of the module: hooks may have to wait for the parameter."""
    with replaced((core_attention, "forward", lambda: core_attention.softmax_offset)):
        return core_attention()  # type: ignore[no-any-return]


def reads_mask(attention: Attention) -> bool:
    """Whether the stock layer applies the mask of the data loader (``--reset-attention-mask``).

    Megatron's ``DotProductAttention`` does, unless a window replaces the mask; Transformer Engine does not.
    """
    return (
        isinstance(attention.core_attention, DotProductAttention)
        and not isinstance(attention, MultiLatentAttention)
        and attention.config.context_parallel_size == 1
        and not _has_window(attention)
    )


def _has_window(attention: Attention) -> bool:
    config = attention.config
    return bool(
        is_layer_window_attention(config.window_size, config.window_attn_skip_freq, attention.layer_number)
    )


def _scale(attention: Attention) -> float:
    """The factor on the attention scores."""
    if isinstance(attention, MultiLatentAttention):
        return float(attention.softmax_scale)
    core = attention.core_attention
    if not isinstance(core, DotProductAttention):
        return float(attention.hidden_size_per_attention_head**-0.5)
    # With query-key layer scaling, softmax_scale is divided by the layer number.
    divisor = core.layer_number if core.config.apply_query_key_layer_scaling else 1
    return float(core.softmax_scale * divisor)
