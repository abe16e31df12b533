"""What Megatron's self-attention computes, in the two pieces that chunks need: projection, then attention.

Mirrors ``megatron.core.transformer.attention.Attention.forward`` for training. Used by :mod:`.stages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_ampipe import compat
from megatron_ampipe.errors import BadInput
from megatron_ampipe.runtime.attention import KERNELS, AttentionKernel
from megatron_ampipe.schedule import Span


def project_qkv(
    attention: SelfAttention, normed: Tensor, rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of the whole sequence, rotary embedding applied.

    Args:
        attention: Megatron's module.
        normed: ``[S, B, D]``, behind the input norm.
        rotary_pos_emb: As Megatron passes it to a layer.

    Returns:
        ``[S, B, H, C]``, ``[S, B, G, C]``, ``[S, B, G, C]``.
    """
    query, key, value = attention.get_query_key_value_tensors(normed, None)
    config = attention.config
    skips = config.no_rope_freq and config.no_rope_freq[attention.layer_number - 1]
    if rotary_pos_emb is not None and not skips:
        embeddings = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
        query, key = (
            tensor
            if embedding is None
            else apply_rotary_pos_emb(
                tensor,
                embedding,
                config=config,
                mscale=attention._yarn_concentration_factor,
                cp_group=attention.pg_collection.cp,
            )
            for tensor, embedding in zip((query, key), embeddings, strict=True)
        )
    return query, key, value


def attention_scale(attention: SelfAttention) -> float:
    """The factor on the attention scores."""
    core = attention.core_attention
    if not isinstance(core, DotProductAttention):
        return float(attention.hidden_size_per_attention_head**-0.5)
    # Query-key layer scaling divides here and multiplies again inside the softmax.
    again = core.layer_number if core.config.apply_query_key_layer_scaling else 1
    return float(core.softmax_scale * again)


def kernel_name(*, local: bool, on_gpu: bool, dtype: torch.dtype) -> str:
    """Which kernel attends to the chunks of a layer: ``te`` or one of ``runtime.attention.KERNELS``.

    A layer built with Transformer Engine keeps it. A local layer, whose own kernel holds the scores of
    the whole sequence, gets the leanest kernel there is that computes the same function.

    Args:
        local: The layer is made of Megatron's local modules rather than Transformer Engine's.
        on_gpu: Where it runs.
        dtype: Of its parameters.
    """
    if not local:
        return "te"
    if not on_gpu:
        return "cpu-flash" if compat.has_cpu_flash() else "sdpa"
    sixteen_bit = dtype in (torch.float16, torch.bfloat16)
    return "flash-attn" if compat.has_flash_attn() and sixteen_bit else "sdpa"


def bind_kernel(attention: SelfAttention, name: str) -> AttentionKernel:
    """The kernel of that name, ready to be called for this layer.

    Raises:
        BadInput: no kernel has that name.
    """
    if name == "te":
        return partial(_transformer_engine, attention.core_attention)
    if name not in KERNELS:
        raise BadInput(
            "attention kernel", name, rule=f"is not one of te, {', '.join(KERNELS)}", remedy="Use sdpa."
        )
    return KERNELS[name]


def _transformer_engine(
    core: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    spans: Sequence[Span],
    scale: float,
    dropout: float,
) -> Tensor:
    """Megatron's own TE attention module, once per span, causal to the bottom right."""
    outputs = [
        core(
            rows,
            key[: span.global_end],
            value[: span.global_end],
            None,
            attn_mask_type=AttnMaskType.causal_bottom_right,
        )
        for rows, span in zip(query.split([span.length for span in spans]), spans, strict=True)
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
