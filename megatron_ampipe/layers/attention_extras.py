"""What some attention layers have besides queries, keys and values: an output gate, and sinks.

A gate of each row is projected together with its query, and multiplies the output of core attention. It
travels with the query, because the same stages give and take both. Sinks are scores that the softmax has for
no key. Used by :mod:`.chunk_attention` and :mod:`.attention_stages`.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import Attention
from torch import Tensor
from torch.nn import Module

# R rows of a chunk, B batch, H heads, C head size.


def _has_gate(attention: Attention) -> bool:
    # Older versions have none.
    return bool(getattr(attention.config, "attention_output_gate", False))


def gate_option(attention: Attention) -> dict[str, bool]:
    """The option with which ``get_query_key_value_tensors`` also returns a gate, if the layer has one."""
    return {"output_gate": True} if _has_gate(attention) else {}


def join_gate(query: Tensor, gate: Tensor | None = None) -> Tensor:
    """Queries ``[R, B, H, C]`` and their gate to ``[R, B, H, 2 * C]``; the queries if there is no gate."""
    return query if gate is None else torch.cat([query, gate.view(query.shape)], dim=-1)


def split_gate(query: Tensor, attention: Attention) -> tuple[Tensor, Tensor | None]:
    """The two parts that :func:`join_gate` joined; None without a gate."""
    if not _has_gate(attention):
        return query, None
    queries, gate = query.chunk(2, dim=-1)
    return queries, gate


def pad_gate(gradient: Tensor, attention: Attention) -> Tensor:
    """The gradient of what :func:`join_gate` returns, from that of the queries alone."""
    return torch.cat([gradient, torch.zeros_like(gradient)], dim=-1) if _has_gate(attention) else gradient


def has_sinks(config: Any) -> bool:
    """Whether the softmax of the layers has one more score (``--softmax-type``)."""
    return getattr(config, "softmax_type", "vanilla") != "vanilla"


def read_sinks(core_attention: Module) -> Tensor:
    """The sinks ``[H]`` of Megatron's core attention, read as if it were called.

    They can be a parameter, for which a forward pre-hook waits under ``--overlap-param-gather``.
    """
    core_attention.forward = lambda: core_attention.softmax_offset  # type: ignore[method-assign]
    try:
        sinks: Tensor = core_attention()
    finally:
        del core_attention.forward
    return sinks
