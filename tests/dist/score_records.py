"""The largest attention scores that ``--qk-clip`` reads, and what it does with them.

Megatron's local attention keeps none, so those of a stock layer are computed here from what its core
attention is given, plainly: with a mask of all rows and keys.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention

from megatron_ampipe.layers.chunk_attention import gather_sequence
from tests.dist.cases import Case


@contextmanager
def watched(layer: torch.nn.Module, case: Case) -> Iterator[dict[str, torch.Tensor]]:
    """Afterwards the dictionary has the largest scores of each layer, and the weights that were clipped."""
    found: dict[str, torch.Tensor] = {}
    wanted = {"qk_clip", "log_max_attention_logit"} & case.model.keys()
    if not wanted:
        yield found
        return
    attentions = {name: part for name, part in layer.named_modules() if isinstance(part, SelfAttention)}
    handles = [
        attention.core_attention.register_forward_pre_hook(
            functools.partial(_of_stock, attention), with_kwargs=True
        )
        for attention in attentions.values()
    ]
    yield found
    for handle in handles:
        handle.remove()
    for name, attention in attentions.items():
        scores = attention.core_attention.current_max_attn_logits
        torch.distributed.all_reduce(
            scores, op=torch.distributed.ReduceOp.MAX, group=attention.pg_collection.cp
        )
        found[f"largest scores of {name}"] = scores.clone()
        if "qk_clip" in wanted:
            before = attention.linear_qkv.weight.detach().clone()
            attention.clip_qk()
            found[f"clipped weight of {name}"] = attention.linear_qkv.weight.detach().clone()
            assert not torch.equal(before, attention.linear_qkv.weight), "nothing was clipped"
        attention.core_attention.current_max_attn_logits = None


def _of_stock(attention: SelfAttention, core: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    query, key = (gather_sequence(x.detach(), attention.pg_collection.cp) for x in args[:2])
    packing, bounds = kwargs.get("packed_seq_params"), [0, len(query)]
    if packing is not None:
        bounds = packing.cu_seqlens_q.tolist()
        query, key = query.unsqueeze(1), key.unsqueeze(1)
    key = key.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
    scores = torch.einsum("rbhc,sbhc->hbrs", query, key).flatten(0, 1) * core.softmax_scale
    column = torch.arange(len(query), device=query.device)
    row = column.unsqueeze(1)
    seen = column <= row
    if attention.config.window_size is not None:
        seen &= column >= row - attention.config.window_size[0]
    for _, end in itertools.pairwise(bounds):
        seen &= (row < end) == (column < end)
    largest = scores.masked_fill(~seen, float("-inf")).amax(dim=(1, 2)).view(query.shape[2], -1).amax(dim=1)
    earlier = getattr(core, "current_max_attn_logits", None)
    core.current_max_attn_logits = largest if earlier is None else largest.maximum(earlier)
