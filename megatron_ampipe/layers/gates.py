"""Routers other than Megatron's: those that AMPipe ships, and how a class of the user is found.

Each is a subclass of Megatron's ``TopKRouter`` and knows nothing of chunks. docs/gates.md says what a class
must promise.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping, router_gating_linear
from megatron.core.transformer.moe.router import InferenceTopKRouter, TopKRouter
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import normalize, softplus

from megatron_ampipe.block.named_values import ROUTER_FLAG as FLAG
from megatron_ampipe.block.named_values import class_path, import_class


def load_gate(name: str) -> type[TopKRouter]:
    """The class that ``--ampipe-router NAME`` names, which imports its module; or :class:`BadInput`."""
    return import_class(
        FLAG,
        name,
        class_path(name),
        fits=lambda found: issubclass(found, TopKRouter) and not issubclass(found, InferenceTopKRouter),
        rule="is not a subclass of megatron.core.transformer.moe.router.TopKRouter",
        remedy="Derive the class from TopKRouter and override gating or routing; see docs/gates.md.",
    )


# S sequence rows of this rank, R rows, B batch, T tokens, D hidden size, E experts, K experts per token.


class ScoredRouter(TopKRouter):
    """A router whose subclasses choose experts and their weights in :meth:`choose`.

    Losses, capacity and expert counts are Megatron's: this is ``TopKRouter.routing`` around another choice.
    It also takes the place of ``--moe-router-score-function softmax`` and ``--moe-router-pre-softmax``.
    """

    ignored_settings: ClassVar[tuple[str, ...]] = (
        "moe_router_num_groups",
        "moe_router_group_topk",
        "moe_router_topk_scaling_factor",
        "moe_router_enable_expert_bias",
    )
    """Settings of Megatron's own choice, which start-up refuses next to the class."""

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Experts and weights of each token.

        Args:
            logits: ``[T, E]``.

        Returns:
            ``probs [T, E]``, 0 where an expert is not chosen; ``routing_map [T, E]`` bool; ``scores [T, E]``,
            a distribution over experts for the load-balancing losses.
        """
        raise NotImplementedError

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``[R, B, E]`` to ``probs [R*B, E]`` and ``routing_map [R*B, E]``; as ``TopKRouter.routing``."""
        assert padding_mask is None, "padding masks are for inference"
        sequence_length, batch = logits.shape[:2]
        logits = self.apply_z_loss(logits.view(-1, self.config.num_moe_experts))
        probs, routing_map, scores = self.choose(logits)
        kept = routing_map
        if self.config.moe_expert_capacity_factor is not None:
            probs, kept = apply_router_token_dropping(
                probs,
                routing_map,
                router_topk=self.topk,
                capacity_factor=self.config.moe_expert_capacity_factor,
                drop_policy=self.config.moe_token_drop_policy,
                pad_to_capacity=self.config.moe_pad_expert_input_to_capacity,
            )
        if self.training and torch.is_grad_enabled() and self.is_aux_loss_enabled():
            probs = self._apply_aux_loss(probs, scores, routing_map)
            probs = self._apply_seq_aux_loss(probs, scores, routing_map, sequence_length, batch)
            probs = self._apply_global_aux_loss(probs, scores, routing_map)
        self._apply_expert_bias(kept)
        return probs, kept


class SigmoidRouter(ScoredRouter):
    """Each token takes the ``topk`` experts of the highest logits; their outputs are weighted by the sigmoid.

    The gate of BASE layers and StableMoE, without BASE's balanced assignment in training. Weights are not
    normalized over the chosen experts, unlike ``--moe-router-score-function sigmoid``.

    Sources: Lewis et al., BASE layers, 2021; Dai et al., StableMoE, 2022; FSMoE, section 3.
    """

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`ScoredRouter`."""
        sigmoids = torch.sigmoid(logits.float())
        best = logits.topk(self.topk, dim=-1).indices
        routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, best, True)
        scores = sigmoids / sigmoids.sum(dim=-1, keepdim=True)
        return (sigmoids * routing_map).type_as(logits), routing_map, scores


class ExpertChoiceRouter(ScoredRouter):
    """Each expert takes its ``topk * tokens / experts`` best tokens, rounded up: loads are always equal.

    A token may have any number of experts, also none; it then passes by the residual connection alone.

    Source: Zhou et al., Mixture-of-experts with expert choice routing, 2022.
    """

    needs_all_tokens: ClassVar[str] = (
        "each expert chooses among all tokens of a sequence, so a later token can take the place of an "
        "earlier one"
    )

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`ScoredRouter`."""
        num_tokens, num_experts = logits.shape
        scores = torch.softmax(logits, dim=-1, dtype=torch.float32)
        taken = min(-(-num_tokens * self.topk // num_experts), num_tokens)
        best = scores.topk(taken, dim=0).indices
        routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(0, best, True)
        return (scores * routing_map).type_as(logits), routing_map, scores


class CosineRouter(TopKRouter):
    """Scores an expert by the cosine between its embedding and a projection of the token, over a temperature.

    The parameters are ``projection`` ``[d, D]``, ``weight`` ``[E, d]`` (the embeddings) and ``temperature``
    ``[1]``. A subclass may set ``dimension`` and ``first_temperature``. Source: X-MoE, arXiv 2204.09179.
    """

    dimension: ClassVar[int | None] = None
    """Size ``d`` of embeddings; None for half the number of experts, and at least 2."""
    first_temperature: ClassVar[float] = 0.3
    """The learned temperature at the beginning of training."""
    lowest_temperature: ClassVar[float] = 0.01
    """Logits stay below its inverse, whatever is learned."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        size = self.dimension or max(self.config.num_moe_experts // 2, 2)
        dtype = self.weight.dtype
        self.projection = Parameter(torch.empty(size, self.config.hidden_size, dtype=torch.float32))
        self.temperature = Parameter(torch.tensor([self.first_temperature], dtype=torch.float32))
        # In place of Megatron's weight of a row of the hidden size for each expert.
        self.weight = Parameter(torch.empty(self.config.num_moe_experts, size, dtype=torch.float32))
        for parameter in (self.projection, self.temperature, self.weight):
            if self.config.perform_initialization and parameter is not self.temperature:
                self.config.init_method(parameter)
            parameter.data = parameter.data.to(dtype)
            # Each tensor-parallel rank sees some of the rows.
            parameter.sequence_parallel = self.config.sequence_parallel

    def gating(self, input: Tensor) -> Tensor:
        """``[R, B, D]`` to ``[R, B, E]``, in fp32 or the dtype of ``--moe-router-dtype``."""
        dtype = torch.float64 if self.config.moe_router_dtype == "fp64" else torch.float32
        token = normalize(router_gating_linear(input, self.projection, None, dtype), dim=-1)
        embedding = normalize(self.weight.to(dtype), dim=-1)
        temperature = self.temperature.to(dtype).clamp_min(self.lowest_temperature)
        return token @ embedding.t() / temperature


class NoisyTopKRouter(TopKRouter):
    """Megatron's router with normal noise on the logits in training; its size is learned for each token.

    ``logits = x W + normal * softplus(x W_noise)``. ``noise_weight`` ``[E, D]`` begins with zeros, so that
    the noise has a standard deviation of ``log 2`` at first. An evaluation adds no noise.

    Sources: Shazeer et al., Outrageously large neural networks, 2017, equations 3 to 5; GShard; FSMoE,
    section 3.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.noise_weight = Parameter(torch.zeros_like(self.weight))
        # Each tensor-parallel rank sees some of the rows, as for ``weight``.
        self.noise_weight.sequence_parallel = self.config.sequence_parallel

    def gating(self, input: Tensor) -> Tensor:
        """``[R, B, D]`` to ``[R, B, E]``."""
        logits: Tensor = super().gating(input)
        if not self.training:
            return logits
        deviation = softplus(router_gating_linear(input, self.noise_weight, None, logits.dtype))
        return logits + _normal_like(logits) * deviation


def _normal_like(tensor: Tensor) -> Tensor:
    """Normal numbers of the shape of ``tensor``.

    From uniform ones, which a CPU draws one by one: chunks continue the series of the whole sequence there.
    """
    uniform = torch.rand(tensor.shape, dtype=torch.float32, device=tensor.device)
    # Not 0, whose quantile is infinite.
    centered = 2 * uniform.clamp_min(torch.finfo(torch.float32).eps) - 1
    return (math.sqrt(2) * torch.erfinv(centered)).to(tensor.dtype)
