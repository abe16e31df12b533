"""Makes a stock MoE layer compute what flags ask for that change the function, plainly.

Casts are applied to whole tensors, before Megatron's own collectives. Condensation sends all tokens to each
expert in turn, by Megatron's dispatcher, and takes the results of the tokens that stand for others, which it
finds in a loop.
"""

import copy
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from megatron_ampipe.exchange.codecs import TransferId, Wire
from megatron_ampipe.schedule import Direction

_TRIP = TransferId(1, 0, "dispatch", Direction.FORWARD)


class _RoundTrip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, wire: Wire) -> Tensor:
        ctx.wire = wire
        return _restored(wire, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _restored(ctx.wire, gradient), None


def _restored(wire: Wire, rows: Tensor) -> Tensor:
    out = torch.empty_like(rows)
    wire.decode(wire.encode(rows, _TRIP), out, _TRIP)
    return out


def send_through(layer: MoELayer, wire: Wire) -> None:
    """Send the rows of a stock layer through a wire, in both directions and passes."""
    dispatcher = layer.token_dispatcher
    dispatch, combine = dispatcher.token_dispatch, dispatcher.token_combine
    dispatcher.token_dispatch = lambda rows, probs: dispatch(_RoundTrip.apply(rows, wire), probs)
    dispatcher.token_combine = lambda rows: combine(_RoundTrip.apply(rows, wire))


def run_chunk_by_chunk(layer: MoELayer, bounds: Sequence[int]) -> None:
    """Call a stock layer for one chunk after another, which end before the rows ``bounds``."""
    forward = layer.forward

    def joined(hidden: Tensor, **nothing: None) -> tuple[Tensor, None]:
        return torch.cat([forward(rows, **nothing)[0] for rows in hidden.tensor_split(bounds[:-1])]), None

    layer.forward = joined


def condense(layer: MoELayer, *, threshold: float, bounds: Sequence[int]) -> None:
    """Condense the tokens of a stock layer within chunks, which end before the rows ``bounds``."""
    layer.forward = functools.partial(_forward, layer, threshold, tuple(bounds))
    # Every pass below sends a token to one expert.
    layer.token_dispatcher.config = copy.copy(layer.config)
    layer.token_dispatcher.config.moe_router_topk = 1


def _forward(
    layer: MoELayer, threshold: float, bounds: Sequence[int], hidden: Tensor, padding_mask: None = None
) -> tuple[Tensor, None]:
    probs, routing_map = layer.router(hidden)
    tokens = hidden.reshape(-1, hidden.shape[-1])
    dispatcher, total = layer.token_dispatcher, torch.zeros_like(tokens)
    for expert in range(probs.shape[1]):
        # Every token is sent to this expert, and only the results of those that stand for others are used.
        only = torch.zeros_like(routing_map)
        only[:, expert] = True
        sent, ones = dispatcher.dispatch_preprocess(hidden, only, torch.ones_like(probs) * only)
        received, ones = dispatcher.token_dispatch(sent, ones)
        received, per_expert, ones = dispatcher.dispatch_postprocess(received, ones)
        output, _ = layer.experts(received, per_expert, ones)
        output = dispatcher.combine_postprocess(
            dispatcher.token_combine(dispatcher.combine_preprocess(output))
        ).flatten(0, 1)
        taken = _representatives(
            tokens.detach(), routing_map[:, expert], threshold, bounds, batch=hidden.shape[1]
        )
        rows = torch.tensor([*taken], dtype=torch.int64, device=total.device)
        total = total.index_add(0, rows, output[[*taken.values()]] * probs[rows, expert, None])
    return total.view_as(hidden), None


def _representatives(
    tokens: Tensor, routed: Tensor, threshold: float, bounds: Sequence[int], *, batch: int
) -> dict[int, int]:
    """By routed token, the one whose result it takes: the plain greedy rule, in each chunk and sequence."""
    found: dict[int, int] = {}
    for begin, end in itertools.pairwise((0, *bounds)):
        for sequence in range(batch):
            sent: list[int] = []
            for token in range(begin * batch + sequence, end * batch, batch):
                if not routed[token]:
                    continue
                likeness = {one: torch.cosine_similarity(tokens[one], tokens[token], dim=0) for one in sent}
                found[token] = next((one for one in sent if likeness[one] >= threshold), token)
                if found[token] == token:
                    sent.append(token)
    return found


def count_without_padding(router: Any) -> None:
    """Repair the counts of the expert bias: Megatron 0.19.2 combines ``[T, E]`` with a mask ``[T]``."""

    def add(routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        if torch.is_grad_enabled():
            assert padding_mask is not None
            router.local_tokens_per_expert += (routing_map & ~padding_mask.unsqueeze(-1)).sum(dim=0)

    router._apply_expert_bias = add
