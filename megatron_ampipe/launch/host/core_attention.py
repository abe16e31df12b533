"""Core attention for what Megatron's local attention does not support: context parallelism, latent attention,
packed documents.

Megatron supports them only with Transformer Engine, which needs a GPU. On the host platform, stock layers and
AMPipe layers use the same module, so the two can be compared. All other attention is Megatron's unchanged
``DotProductAttention``. Called by :mod:`.megatron`.
"""

import copy
import itertools
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megatron_ampipe.attention.kernels import KERNELS
from megatron_ampipe.layers.chunk_attention import gather_sequence
from megatron_ampipe.schedule import SequenceLayout


class HostDotProductAttention(DotProductAttention):
    """``DotProductAttention`` that also supports context parallelism, a separate head size for values, and
    packed documents.

    Args:
        config: Megatron's configuration.
        args: As for ``DotProductAttention``.
        k_channels: Head size of queries and keys, given by latent attention.
        v_channels: Head size of values, given by latent attention.
        kwargs: As for ``DotProductAttention``.
    """

    def __init__(
        self,
        config: Any,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        # The stock constructor reads the setting only to refuse context parallelism.
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        super().__init__(alone, *args, **kwargs)
        self.config = config
        self._uses_exact = config.context_parallel_size > 1 or v_channels is not None
        self._window = None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, self.layer_number):
            self._window = config.window_size[0]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """``[S, B, H, C]``, ``[S, B, G, C]``, ``[S, B, G, V]`` (rows of this rank) to ``[S, B, H * V]``.

        Of packed documents without ``B``, as Transformer Engine takes them; each is attended to on its own.
        """
        if packed_seq_params is not None:
            bounds = packed_seq_params.cu_seqlens_q.tolist()
            documents = [
                self._attend(*(x[first:last].unsqueeze(1) for x in (query, key, value)), None)
                for first, last in itertools.pairwise(bounds)
            ]
            return torch.cat(documents).squeeze(1)
        return self._attend(query, key, value, *args, **kwargs)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self._uses_exact:
            return super().forward(query, key, value, *args, **kwargs)
        group = self.pg_collection.cp
        layout = SequenceLayout(context_ranks=group.size(), context_rank=group.rank())
        key, value = gather_sequence(key, group), gather_sequence(value, group)
        return KERNELS["exact"](
            query,
            key,
            value,
            spans=layout.spans(0, query.shape[0], sequence_length=key.shape[0]),
            scale=self.softmax_scale,
            dropout=self.attention_dropout.p if self.training else 0.0,
            window=self._window,
            sinks=self.softmax_offset,
        )
