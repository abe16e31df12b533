"""The sizes of a layer's tensors on one rank, in bytes: what it saves for its backward, and what it sends.

Saved activations depend on the modules: Megatron's local modules save more than Transformer Engine's, which
fuse operations.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ampipe.plan.block import PROBABILITY_BYTES, Block
from megatron_ampipe.plan.operation_times import (
    Product,
    attention_products,
    expert_products,
    qkv_products,
    weights_of,
)


@dataclass(frozen=True, slots=True)
class Modules:
    """Numbers of tensors that are saved per row of a block, of 4 or else of ``Block.element_bytes`` bytes.

    ``norms``: tensors of the hidden size for both norms and the residual stream; ``norms_wide``: those with 4
    bytes. ``inner_gated`` and ``inner``: tensors of an expert's width, with and without a gate; ``weighted``
    of them exist only because of the probability, and not in the MLP of a dense layer. ``routing_bytes``: per
    expert, and per expert of a token. ``combined``: combined rows are saved for the gradient of their
    probabilities. ``gradient_bytes``: gradients inside an expert that exist at the same time, less released
    tensors, per unit of its width, without and with a gate. ``key_sum_bytes``: of an element of the sums of
    the gradients of keys and values within a kernel, 0 for a kernel that takes all queries at once. In 16
    bit, local modules multiply by the probability in fp32.
    """

    norms_wide: int
    norms: int
    inner_gated: int
    inner: int
    weighted: int
    routing_bytes: tuple[int, int]
    combined: bool
    gradient_bytes: tuple[int, int]
    key_sum_bytes: int


FUSED = Modules(0, 4, 3, 2, 0, (2, 0), combined=True, gradient_bytes=(4, 8), key_sum_bytes=0)
"""Transformer Engine's modules, from reading their code."""
LOCAL = {
    4: Modules(0, 6, 6, 3, 1, (13, 20), combined=False, gradient_bytes=(8, 8), key_sum_bytes=4),
    2: Modules(4, 2, 6, 3, 1, (13, 20), combined=False, gradient_bytes=(12, 12), key_sum_bytes=4),
}
"""Megatron's local modules by bytes of an element, counted tensor by tensor (docs/memory.md)."""

_INDEX_BYTES_SENT = 8 + 8
"""With fixed rows, of a row that is sent: its token and its choice."""
_INDEX_BYTES_ARRIVING = 8 + 8
"""Of a row that arrives: its place in the order of the experts, and back."""


_PERMUTATION_BYTES = 8
"""What the index of Megatron's own permutation has for each token and expert; fixed rows have no such."""


def modules_of(block: Block, *, local: bool) -> Modules:
    """Megatron's local modules, or Transformer Engine's."""
    return LOCAL[block.element_bytes] if local else FUSED


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of the tensors of one layer on one rank, over the whole sequence.

    Attributes:
        hidden: Rows of the residual stream.
        first_norm: What the norm before attention, and ``second_norm`` what the one before the router saves;
            ``norm_again``: what of it is computed again in the backward pass.
        attended: Queries and the output of core attention; ``keys``: keys and values.
        routing: What the router and the permutations save.
        shared: What the backward of shared experts needs, and ``saves_shared`` whether they save it.
        moved: Rows of tokens that a rank receives in one hop, before the gather of ranks that share an
            expert; ``arrived`` after it.
        expert_rows: Number of rows that experts get; with fixed rows, padding included.
        row_probabilities: Their probabilities.
        copies: Rows in the order of the experts, one for each expert of a token.
        sorts: Whether ``copies`` are other tensors than ``arrived``.
        inner: What experts save between their linear layers; ``recomputed`` of it by selective recompute.
    """

    hidden: float
    first_norm: float
    second_norm: float
    norm_again: float
    attended: float
    keys: float
    routing: float
    shared: float
    saves_shared: bool
    moved: float
    arrived: float
    expert_rows: float
    row_probabilities: float
    copies: float
    sorts: bool
    inner: float
    recomputed: float

    @property
    def saved_outside_experts(self) -> float:
        """All that is saved, but for the experts."""
        norms = self.first_norm + self.second_norm
        return norms + self.attended + self.keys + self.routing + self.shared * self.saves_shared

    @classmethod
    def of(cls, block: Block, modules: Modules, *, chunks: int) -> Sizes:
        """The sizes of a block that consists of these modules, in so many chunks."""
        tokens, element = block.rows * block.batch, block.element_bytes
        hidden = tokens * block.hidden * element
        norm = _norm_bytes(block, modules)
        recomputes_norms = "layernorm" in block.recompute_modules
        second_norm = hidden if recomputes_norms else norm
        routing_per_row: float = modules.routing_bytes[0] * block.experts
        routing_per_row += modules.routing_bytes[1] * block.topk
        if modules.combined:
            routing_per_row += block.rows_per_token * block.hidden * element
        routing = tokens * routing_per_row
        expert_rows = block.arriving(block.rows)
        moved = hidden * block.rows_per_token * block.load
        if block.rows_margin is not None:
            expert_rows = chunks * block.arriving(block.rows / chunks)
            moved = expert_rows / block.expert_tensor * block.hidden * element
            routing += _index_bytes(block, modules, chunks, expert_rows)
        arrived = moved * block.expert_tensor
        gathers_all = block.dispatcher == "allgather"
        if gathers_all:
            moved = arrived = hidden * block.expert * block.expert_tensor
        sorts = block.local_experts > 1 or gathers_all or not block.sends_every_copy
        inner = _inner_bytes(block, modules, expert_rows)
        return cls(
            hidden=hidden,
            first_norm=_norms_bytes(block, modules) - second_norm,
            second_norm=second_norm,
            norm_again=norm - second_norm,
            attended=_attended_bytes(block),
            keys=number_of_keys(block) * element,
            routing=routing,
            shared=_shared_bytes(block, modules),
            saves_shared={"moe", "shared_experts"}.isdisjoint(block.recompute_modules),
            moved=moved,
            arrived=arrived,
            expert_rows=expert_rows,
            row_probabilities=expert_rows * PROBABILITY_BYTES,
            copies=expert_rows * block.hidden * element,
            sorts=sorts or block.rows_margin is not None,
            inner=inner,
            recomputed=inner * _recomputed_share(block, modules),
        )


def expert_bytes(block: Block, rows: int, *, local: bool, inner: bool) -> float:
    """Bytes that experts save of a chunk with ``rows`` rows: received tokens, with ``inner`` more tensors."""
    arriving = block.arriving(rows)
    inner_bytes = _inner_bytes(block, modules_of(block, local=local), arriving)
    return arriving * block.row_bytes(1) + inner_bytes * inner


def saved_without_experts(block: Block, modules: Modules) -> float:
    """Bytes that a layer with an MLP in place of experts saves."""
    assert block.dense_ffn is not None
    count = (modules.inner_gated if block.gated else modules.inner) - modules.weighted
    count *= "mlp" not in block.recompute_modules
    mlp = block.rows * block.batch * count * block.dense_ffn * block.element_bytes
    keys = number_of_keys(block) * block.element_bytes
    return _norms_bytes(block, modules) + _attended_bytes(block) + keys + mlp


def _index_bytes(block: Block, modules: Modules, chunks: int, expert_rows: float) -> float:
    """Bytes of the index tensors of fixed rows, less those of the permutation of exact rows."""
    sent = chunks * block.sent(block.rows / chunks)
    added = sent * _INDEX_BYTES_SENT + expert_rows * _INDEX_BYTES_ARRIVING
    if modules == FUSED:
        return added
    return added - block.rows * block.batch * block.experts * _PERMUTATION_BYTES


def number_of_keys(block: Block) -> float:
    """Number of elements in the keys and values that a block saves."""
    rows = block.sequence_length / (block.context if block.ring else 1)
    return rows * block.batch * block.key_value_width / block.tensor


def attention_weights(block: Block) -> list[Product]:
    """The linear layers of attention."""
    return [*qkv_products(block, 0), *attention_products(block, 0)]


def number_of_expert_weights(block: Block) -> float:
    """Number of elements in the weights of all experts of a rank."""
    return block.local_experts * weights_of(expert_products(block, 0))


def _recomputed_share(block: Block, modules: Modules) -> float:
    """The share of the experts' inner tensors that Megatron's selective recompute recomputes."""
    if "moe" in block.recompute_modules:
        return 1.0
    if "moe_act" not in block.recompute_modules:
        return 0.0
    # All but the result of the first product.
    return 1 - 2 / modules.inner_gated if block.gated else 1 - 1 / modules.inner


def _inner_bytes(block: Block, modules: Modules, rows: float) -> float:
    """Bytes that experts save of so many rows between their linear layers."""
    count = modules.inner_gated if block.gated else modules.inner
    return rows * count * block.ffn / block.expert_tensor * block.element_bytes


def _norms_bytes(block: Block, modules: Modules) -> float:
    """Bytes saved by both norms and the residual stream."""
    # A recomputed norm saves its input. Transformer Engine fuses the first norm with the projection, which
    # saves its output, except in latent attention.
    norms_again = int("layernorm" in block.recompute_modules)
    if "mla_up_proj" in block.recompute_modules or (norms_again and (block.latent or modules != FUSED)):
        norms_again += 1
    hidden = block.rows * block.batch * block.hidden * block.element_bytes
    return _norm_bytes(block, modules) * (2 - norms_again) + hidden * norms_again


def _norm_bytes(block: Block, modules: Modules) -> float:
    """Bytes saved by a norm and its input."""
    per_number = (modules.norms * block.element_bytes + modules.norms_wide * 4) / 2
    return block.rows * block.batch * block.hidden * per_number


def _attended_bytes(block: Block) -> float:
    """Bytes of queries, the output of core attention, and the log-sum-exp of each head."""
    tokens = block.rows * block.batch
    width = (block.heads * (block.head_size + block.value_size)) / block.tensor
    return tokens * block.tensor * (width * block.element_bytes + 4 * block.heads / block.tensor)


def _shared_bytes(block: Block, modules: Modules) -> float:
    """Bytes that the backward of shared experts needs saved."""
    if block.shared_ffn is None:
        return 0.0
    count = modules.inner_gated if block.gated else modules.inner
    # With sequence parallelism, each rank has a part of their width, and the rows of all ranks.
    return block.rows * block.batch * count * block.shared_ffn * block.element_bytes
