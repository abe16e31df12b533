"""Core attention for what Megatron's local attention does not support: context parallelism, latent attention.

Megatron supports both only with Transformer Engine, which needs a GPU. On the host platform, stock layers and
AMPipe layers use the same module, so the two can be compared. All other attention is Megatron's unchanged
``DotProductAttention``. Called by :mod:`.megatron`.
"""

import copy
from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megatron_ampipe.layers.chunk_attention import gather_sequence
from megatron_ampipe.runtime.attention_kernels import exact
from megatron_ampipe.schedule import SequenceLayout


class HostDotProductAttention(DotProductAttention):
    """``DotProductAttention`` that also supports context parallelism and a separate head size for values.

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

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``[S, B, H, C]``, ``[S, B, G, C]``, ``[S, B, G, V]`` (rows of this rank) to ``[S, B, H * V]``."""
        if not self._uses_exact:
            return super().forward(query, key, value, *args, **kwargs)
        group = self.pg_collection.cp
        layout = SequenceLayout(context_ranks=group.size(), context_rank=group.rank())
        key, value = gather_sequence(key, group), gather_sequence(value, group)
        return exact(
            query,
            key,
            value,
            spans=layout.spans(0, query.shape[0], sequence_length=key.shape[0]),
            scale=self.softmax_scale,
            dropout=self.attention_dropout.p if self.training else 0.0,
            window=self._window,
        )
