"""Hash layers: experts are a fixed function of the token's id.

Source: Roller et al., Hash layers for large sparse models, 2021 (arXiv 2106.04426).
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_ampipe.layers.gates.id_router import TokenIdRouter
from megatron_ampipe.layers.gates.scored import ScoredRouter

# R rows, B batch, E experts, K experts per token.


class HashRouter(TokenIdRouter, ScoredRouter):
    """Each token goes to ``topk`` different experts by as many hashes of its id, with equal weights.

    Has no parameters: nothing is learned, and a checkpoint holds nothing. The hashes of two layers differ. A
    subclass may set ``seed`` and ``frequencies``, and must keep both when a training is continued.
    """

    seed: ClassVar[int] = 0
    """Chooses the hashes; independent of Megatron's ``--seed``."""
    frequencies: ClassVar[Sequence[float] | None] = None
    """How often each id occurs in the training data. If set, a table takes the place of the hashes: the
    paper's balanced assignment, of the most frequent ids first, each to the experts with the least so far."""

    ignored_settings: ClassVar[tuple[str, ...]] = (
        *ScoredRouter.ignored_settings,
        "moe_aux_loss_coeff",
        "moe_z_loss_coeff",
        "moe_input_jitter_eps",
        "moe_router_force_load_balancing",
        "moe_router_force_biased",
        "moe_enable_routing_replay",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weight = self.bias = None
        # No buffer: it follows from the class, and is made when the vocabulary is known.
        self._table: Tensor | None = None

    def gating(self, input: Tensor) -> Tensor:
        """``[R, B, D]``, of which the shape and dtype are read, to the weights ``[R, B, E]``, 0 or ``1 / K``.

        In the dtype of ``input``, or that of ``--moe-router-dtype``.
        """
        assert self.token_ids is not None
        dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(self.config.moe_router_dtype, input.dtype)
        weights = input.new_zeros((*input.shape[:2], self.config.num_moe_experts), dtype=dtype)
        return weights.scatter_(-1, self.experts_of(self.token_ids), 1 / self.topk)

    def experts_of(self, ids: Tensor) -> Tensor:
        """The experts of tokens: ids ``[...]`` int64 to ``[..., K]`` int64, all different.

        Looked up in a table of the vocabulary, which is made once: hashing takes many small operations.
        """
        num_experts, topk, vocabulary = self.config.num_moe_experts, self.topk, self.id_source.vocabulary
        if self.frequencies is None and vocabulary is None:
            return hashed_experts(ids, num_experts, topk, salt=self._salt)
        if self._table is None:
            if self.frequencies is not None:
                table = balanced_table(tuple(self.frequencies), num_experts, topk)
            else:
                table = hashed_experts(torch.arange(vocabulary), num_experts, topk, salt=self._salt)
            self._table = table.to(ids.device, torch.int32)
        return self._table[ids].long()

    @property
    def _salt(self) -> int:
        return _mixed(_mixed(self.seed) + (self.layer_number or 0))

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`ScoredRouter`; weights, experts and scores are all what :meth:`gating` gives."""
        return logits, logits > 0, logits


def hashed_experts(ids: Tensor, num_experts: int, topk: int, *, salt: int) -> Tensor:
    """``topk`` different experts of each id, each uniform over those that are left.

    Args:
        ids: ``[...]`` int64.
        num_experts: Number of experts.
        topk: At most ``num_experts``.
        salt: Chooses the hashes.

    Returns:
        ``[..., topk]`` int64. The same on every device.
    """
    mixed, found = _mixed(ids), ids.new_empty((*ids.shape, 0))
    for index in range(topk):
        expert = _mixed(mixed ^ _mixed(salt + index)) % (num_experts - index)
        # A number among the experts that are left, counted without those that were taken.
        for taken in found.sort(dim=-1).values.unbind(-1):
            expert = expert + (expert >= taken)
        found = torch.cat([found, expert.unsqueeze(-1)], dim=-1)
    return found


@functools.lru_cache(maxsize=4)
def balanced_table(frequencies: tuple[float, ...], num_experts: int, topk: int) -> Tensor:
    """The experts of each id such that experts get tokens equally often, as far as single ids allow.

    Args:
        frequencies: Of each id, from 0 on.
        num_experts: Number of experts.
        topk: Experts of an id, at most ``num_experts``.

    Returns:
        ``[ids, topk]`` int64.
    """
    table = torch.empty((len(frequencies), topk), dtype=torch.int64)
    loads = [(0.0, expert) for expert in range(num_experts)]
    for found in sorted(range(len(frequencies)), key=lambda index: (-frequencies[index], index)):
        emptiest = [heapq.heappop(loads) for _ in range(topk)]
        table[found] = torch.tensor([expert for _, expert in emptiest])
        for load, expert in emptiest:
            heapq.heappush(loads, (load + frequencies[found], expert))
    return table


def _mixed[Integer: (int, Tensor)](value: Integer) -> Integer:
    """The low 32 bit of a number, or of each of a tensor, mixed one to one so that each depends on all.

    Two rounds of shift and multiplication; both factors are below 2**31, so a product fits into int64.
    """
    value = value & 0xFFFFFFFF
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        value = ((value ^ (value >> shift)) * factor) & 0xFFFFFFFF
    return value ^ (value >> 15)
