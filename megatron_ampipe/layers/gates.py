"""The routers that AMPipe ships, and the import of a user's router class.

Each is a subclass of Megatron's ``TopKRouter`` and knows nothing of chunks. docs/gates.md says what a class
must promise.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping, router_gating_linear
from megatron.core.transformer.moe.router import InferenceTopKRouter, TopKRouter
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.functional import normalize, softplus

from megatron_ampipe.block.settings import ROUTER_FLAG as FLAG
from megatron_ampipe.block.settings import SHIPPED_GATES, import_class


def load_gate(name: str) -> type[TopKRouter]:
    """Import the class that ``--ampipe-router NAME`` names; raises :class:`BadInput` if that fails."""
    return import_class(
        name,
        SHIPPED_GATES,
        flag=FLAG,
        fits=lambda gate: issubclass(gate, TopKRouter) and not issubclass(gate, InferenceTopKRouter),
        rule="is not a subclass of megatron.core.transformer.moe.router.TopKRouter",
        remedy="Derive the class from TopKRouter and override gating or routing; see docs/gates.md.",
    )


# S sequence rows of this rank, R rows, B batch, T tokens, D hidden size, E experts, K experts per token.


class ScoredRouter(TopKRouter):
    """A router whose subclasses choose experts and their weights in :meth:`choose`.

    Losses, capacity and expert counts are Megatron's: ``TopKRouter.routing`` with another choice of experts.
    The choice also replaces ``--moe-router-score-function softmax`` and ``--moe-router-pre-softmax``.
    """

    ignored_settings: ClassVar[tuple[str, ...]] = (
        "moe_router_num_groups",
        "moe_router_group_topk",
        "moe_router_topk_scaling_factor",
        "moe_router_enable_expert_bias",
    )
    """Settings of Megatron's own choice of experts; start-up refuses them together with the class."""

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choose the experts and weights of each token.

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

    A token may get any number of experts; with none, only the residual connection carries it.

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

    weight: Parameter
    dimension: ClassVar[int | None] = None
    """Size ``d`` of embeddings; None for half the number of experts, and at least 2."""
    first_temperature: ClassVar[float] = 0.3
    """The learned temperature at the beginning of training."""
    lowest_temperature: ClassVar[float] = 0.01
    """Lower bound of the learned temperature: the absolute value of a logit is at most its inverse."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        size = self.dimension or max(self.config.num_moe_experts // 2, 2)
        dtype = self.weight.dtype
        self.projection = Parameter(torch.empty(size, self.config.hidden_size, dtype=torch.float32))
        self.temperature = Parameter(torch.tensor([self.first_temperature], dtype=torch.float32))
        # Replaces Megatron's ``[E, D]`` weight.
        self.weight = Parameter(torch.empty(self.config.num_moe_experts, size, dtype=torch.float32))
        for parameter in (self.projection, self.temperature, self.weight):
            if self.config.perform_initialization and parameter is not self.temperature:
                self.config.init_method(parameter)
            parameter.data = parameter.data.to(dtype)
            # Each tensor-parallel rank sees only some of the rows.
            parameter.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]  # Megatron's

    def gating(self, input: Tensor) -> Tensor:
        """``[R, B, D]`` to ``[R, B, E]``, in fp32 or the dtype of ``--moe-router-dtype``."""
        dtype = torch.float64 if self.config.moe_router_dtype == "fp64" else torch.float32
        token = normalize(router_gating_linear(input, self.projection, None, dtype), dim=-1)
        embedding = normalize(self.weight.to(dtype), dim=-1)
        temperature = self.temperature.to(dtype).clamp_min(self.lowest_temperature)
        return token @ embedding.t() / temperature


class NoisyTopKRouter(TopKRouter):
    """Megatron's router with normal noise on the logits in training, whose size is learned per token.

    ``logits = x W + normal * softplus(x W_noise)``. ``noise_weight`` ``[E, D]`` begins with zeros, so that
    the noise has a standard deviation of ``log 2`` at first. An evaluation adds no noise.

    Sources: Shazeer et al., Outrageously large neural networks, 2017, equations 3 to 5; GShard; FSMoE,
    section 3.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.noise_weight = Parameter(torch.zeros_like(self.weight))
        # Each tensor-parallel rank sees only some of the rows, as for ``weight``.
        self.noise_weight.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]  # Megatron's

    def gating(self, input: Tensor) -> Tensor:
        """``[R, B, D]`` to ``[R, B, E]``."""
        logits: Tensor = super().gating(input)
        if not self.training:
            return logits
        deviation = softplus(router_gating_linear(input, self.noise_weight, None, logits.dtype))
        return logits + _normal_like(logits) * deviation


def _normal_like(tensor: Tensor) -> Tensor:
    """Normally distributed numbers of the shape of ``tensor``.

    Computed from uniform numbers, which a CPU draws one by one, so that chunks get the whole's numbers there.
    """
    uniform = torch.rand(tensor.shape, dtype=torch.float32, device=tensor.device)
    # Not 0, whose quantile is infinite.
    centered = 2 * uniform.clamp_min(torch.finfo(torch.float32).eps) - 1
    return (math.sqrt(2) * torch.erfinv(centered)).to(tensor.dtype)


class TokenIds:
    """The token ids of the micro-batch that a model, or a virtual pipeline stage of it, runs at present.

    A recompute reads them in the backward pass, when the model has run other micro-batches since. So a hook
    on the gradient of the model's output, where each backward pass begins, sets the ids of that output again.
    """

    def __init__(self, vocabulary: int | None = None) -> None:
        self.vocabulary = vocabulary
        """The size of the vocabulary; None if unknown."""
        self._current: Tensor | None = None

    def keep(self, ids: Tensor | None) -> None:
        """Set the ids ``[B, S]`` of the micro-batch that runs now; if packed, ``[1, B * S]``."""
        self._current = ids

    def watch(self, model: Module) -> None:
        """Keep the ``input_ids`` of every call of Megatron's GPT or hybrid model, without its wrappers."""
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.register_forward_hook(self._after)

    def _before(self, model: Module, inputs: tuple[Tensor, ...], options: dict[str, Tensor | None]) -> None:
        self.keep(inputs[0] if inputs else options.get("input_ids"))

    def _after(self, model: Module, inputs: tuple[Tensor, ...], output: object) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            ids = self._current
            output.register_hook(lambda gradient: self.keep(ids))

    def rows(self, num_rows: int, batch: int, *, ranks: int = 1) -> Tensor:
        """The ids ``[num_rows * ranks, B]``, int64, of the rows that tensor-parallel ranks hold.

        ``batch`` is the second dimension of the hidden states.
        """
        ids = self._current
        assert ids is not None, "a router reads the ids of tokens, and the model was called without input_ids"
        assert ids.numel() == num_rows * ranks * batch, (
            f"{tuple(ids.shape)} ids of {num_rows} rows on {ranks} ranks, {batch} sequences"
        )
        if ids.shape[0] == batch:
            return ids.t()
        # Packed: TransformerLayer._maybe_unflatten_for_moe cuts the rows of a rank into sequences.
        return ids.view(ranks, batch, num_rows).transpose(1, 2).reshape(-1, batch)


class TokenIdRouter(TopKRouter):
    """A router that reads ``self.token_ids``. List it before other bases, such as ``ScoredRouter``."""

    token_ids: Tensor | None = None
    """``[R, B]`` int64, the ids of the rows that ``forward`` routes; None outside of ``forward``."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.id_source = TokenIds()
        """The ids of the model; without any until :func:`give_token_ids` connects it."""

    def forward(self, input: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """As in Megatron for ``[R, B, D]``, with ``token_ids`` set; ``ChunkRouting`` sets a chunk's."""
        routed: tuple[Tensor, Tensor]
        if self.token_ids is not None:
            routed = super().forward(input, *args, **kwargs)
            return routed
        is_spread = self.config.sequence_parallel
        ranks, rank = (self.tp_group.size(), self.tp_group.rank()) if is_spread else (1, 0)
        num_rows, batch = input.shape[:2]
        self.token_ids = self.id_source.rows(num_rows, batch, ranks=ranks)[rank * num_rows :][:num_rows]
        try:
            routed = super().forward(input, *args, **kwargs)
        finally:
            self.token_ids = None
        return routed


def give_token_ids(model: Module) -> TokenIds:
    """Give all routers that read ids, in a model or in some of its layers, one shared source of ids."""
    source = TokenIds(getattr(model, "vocab_size", None))
    for module in model.modules():
        if isinstance(module, TokenIdRouter):
            module.id_source = source
    return source


class HashRouter(TokenIdRouter, ScoredRouter):
    """Sends each token to ``topk`` different experts, given by hashes of its id, with equal weights.

    It has no parameters, so nothing is learned or saved in a checkpoint. The hashes differ between layers. A
    subclass may set ``seed``, and must keep it when a training is continued.
    """

    seed: ClassVar[int] = 0
    """Seed of the hashes; independent of Megatron's ``--seed``."""
    ignored_settings: ClassVar[tuple[str, ...]] = (
        *ScoredRouter.ignored_settings,
        "moe_aux_loss_coeff",
        "moe_z_loss_coeff",
        "moe_input_jitter_eps",
        "moe_router_force_load_balancing",
        "moe_router_force_biased",
        "moe_enable_routing_replay",
    )

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.weight = self.bias = None
        # Not a registered buffer: it follows from the class, and the vocabulary is only known later.
        self._table: Tensor | None = None

    def gating(self, input: Tensor) -> Tensor:
        """The weights ``[R, B, E]``, 0 or ``1 / K``; reads only shape and dtype of ``[R, B, D]``."""
        assert self.token_ids is not None
        dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(self.config.moe_router_dtype, input.dtype)
        weights = input.new_zeros((*input.shape[:2], self.config.num_moe_experts), dtype=dtype)
        return weights.scatter_(-1, self.experts_of(self.token_ids), 1 / self.topk)

    def experts_of(self, ids: Tensor) -> Tensor:
        """The ``K`` different experts of each token, from ids ``[...]`` int64 to ``[..., K]`` int64."""
        num_experts, topk, vocabulary = self.config.num_moe_experts, self.topk, self.id_source.vocabulary
        if vocabulary is None:
            return hashed_experts(ids, num_experts, topk, salt=self._salt)
        if self._table is None:
            # A table, because hashing takes many small operations.
            every_id = torch.arange(vocabulary, device=ids.device)
            self._table = hashed_experts(every_id, num_experts, topk, salt=self._salt).int()
        return self._table[ids].long()

    @property
    def _salt(self) -> int:
        return _mixed(_mixed(self.seed) + (self.layer_number or 0))

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`ScoredRouter`."""
        return logits, logits > 0, logits


def hashed_experts(ids: Tensor, num_experts: int, topk: int, *, salt: int) -> Tensor:
    """``topk`` different experts of each id, ``[...]`` to ``[..., topk]`` int64, uniform over all experts."""
    mixed, experts = _mixed(ids), ids.new_empty((*ids.shape, 0))
    for index in range(topk):
        expert = _mixed(mixed ^ _mixed(salt + index)) % (num_experts - index)
        # It is an index among the experts that are left: step over those that were taken.
        for taken in experts.sort(dim=-1).values.unbind(-1):
            expert = expert + (expert >= taken)
        experts = torch.cat([experts, expert.unsqueeze(-1)], dim=-1)
    return experts


def _mixed[Integer: (int, Tensor)](value: Integer) -> Integer:
    """Hash the low 32 bits of a number, or of each number of a tensor; a bijection on 32 bits."""
    value = value & 0xFFFFFFFF
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        value = ((value ^ (value >> shift)) * factor) & 0xFFFFFFFF
    return value ^ (value >> 15)
