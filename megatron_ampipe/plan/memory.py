"""Estimates the peak memory of a pass through consecutive blocks, in bytes, by degree and memory strategy.

The last block that has experts decides: when it runs, all blocks before it have their saved activations
(:meth:`_Layer.kept`). Of that block, everything is counted that is alive at one moment (:class:`Alive`), for
each moment at which memory can peak: in the forward pass while its experts run, in the backward pass while
its experts rebuild or differentiate, and while attention does. Which moments there are, and how many rows are
on their way between ranks at each, follows from the schedule (:mod:`.moments`). Megatron's own layer, which
has no schedule, has three (:class:`_MegatronLayer`). The sizes of tensors are those of :mod:`.saved`.

Not counted: weights, the optimizer, rounding by the allocator, and, unless ``gathers``, parameter gradients,
which Megatron has as well.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_ampipe.plan.block import Block
from megatron_ampipe.plan.moments import Moment, moments
from megatron_ampipe.plan.operation_times import (
    Product,
    attention_products,
    mlp_products,
    qkv_products,
    weights_of,
)
from megatron_ampipe.plan.saved import (
    FUSED,
    Modules,
    Sizes,
    attention_weights,
    modules_of,
    number_of_expert_weights,
    number_of_keys,
    saved_without_experts,
)
from megatron_ampipe.schedule import (
    KEEP,
    STRATEGIES,
    WEIGHTS,
    Direction,
    Exchange,
    Pipeline,
    chunk_strategies,
    kinds,
)
from megatron_ampipe.schedule.dataflow import AHEAD
from megatron_ampipe.schedule.kinds import SUM_BYTES
from megatron_ampipe.schedule.saved import ExpertsSaved, Saved
from megatron_ampipe.schedule.stage_kind import StageKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """Bytes of one layer at one moment.

    Attributes:
        outside: What is saved for the backward of everything but the experts.
        experts: What is saved for the backward of the experts, or has been restored for it.
        rows: Rows of tokens that one stage has given and the next one has not taken.
        hidden: The output of the layer, and gradients of the residual stream that are collected.
        sums: Sums of the gradients of parameters, and of keys and values.
        waiting: Operands of weight gradients that are computed later.
        running: What the running stage has for itself, at its worst.
    """

    outside: float
    experts: float
    rows: float
    hidden: float
    sums: float
    waiting: float = 0.0
    running: float

    @property
    def total(self) -> float:
        """All of it."""
        saved = self.outside + self.experts + self.waiting
        return saved + self.rows + self.hidden + self.sums + self.running


def peak_bytes(
    block: Block,
    pipeline: Pipeline,
    *,
    num_layers: int = 1,
    dense_layers: Collection[int] = (),
    local: bool = False,
    gathers: bool = False,
) -> float:
    """Peak of the activations of consecutive blocks.

    Args:
        block: One of the blocks.
        pipeline: How they run; its exchange is the exchange of the block.
        num_layers: Number of blocks of a forward pass before the first backward.
        dense_layers: Indices of the blocks without experts, from 0.
        local: Whether blocks consist of Megatron's local modules instead of Transformer Engine's.
        gathers: Parameter gradients stay until the end of the pass, and the caller has the input and the
            gradient of the output, as in ``ampipe bench``.
    """
    modules = modules_of(block, local=local)
    overlaps = pipeline.overlaps or pipeline.partner is not None
    is_stock = not overlaps and block.exchange is Exchange.ROWS and pipeline.memory == KEEP
    if is_stock:
        block = replace(block, rows_margin=None)
    kind = _MegatronLayer if is_stock else _PipelinedLayer
    layer = kind(block, modules, pipeline, shares_schedule=pipeline.stack_of(num_layers) > 1)
    one_layer = max(alive.total for alive in layer.moments())
    kept_dense = saved_without_experts(block, modules) if dense_layers else 0.0
    peak = before = 0.0
    for index in range(num_layers):
        if index in dense_layers:
            before += kept_dense
        else:
            peak = max(peak, before + one_layer)
            before += layer.kept()
    if gathers:
        peak = max(peak, one_layer + _gathered_gradients(block, num_layers, len(dense_layers)))
        peak -= layer.sizes.hidden
    return peak


def stage_bytes(
    block: Block,
    pipeline: Pipeline,
    *,
    num_layers: int,
    dense_layers: Collection[int] = (),
    passes: int = 1,
    ahead: bool = False,
    local: bool = False,
) -> float:
    """Peak of the activations of the layers of a pipeline stage, over the micro-batches in flight.

    Args:
        block: One of the layers.
        pipeline: How they run.
        num_layers: Number of layers of a pass.
        dense_layers: Indices of the layers without experts, from 0.
        passes: Number of micro-batches that wait for their backward pass.
        ahead: With a partner, the forward pass saves a layer before the backward pass has released one.
        local: As of :func:`peak_bytes`.
    """
    if block.captures_passes and not ahead:
        return passes * _captured_bytes(block, pipeline, num_layers, dense_layers, local=local)
    dense = {num_layers * index + layer for index in range(passes) for layer in dense_layers}
    return peak_bytes(
        block, pipeline, num_layers=num_layers * passes + ahead, dense_layers=dense, local=local
    )


def _captured_bytes(
    block: Block, pipeline: Pipeline, num_layers: int, dense_layers: Collection[int], *, local: bool
) -> float:
    """What the graphs of whole passes hold for a micro-batch in flight, all of them at the same time.

    The pool of each stack is as large as a pass without graphs at its peak, which frees nothing for others,
    with the gradients of its weights. Static inputs are those of both passes.
    """
    size = pipeline.stack_of(num_layers)
    hidden = block.rows * block.batch * block.hidden * block.element_bytes
    total = 0.0
    for first in range(0, num_layers, size):
        layers = range(first, min(first + size, num_layers))
        dense = [layer - first for layer in layers if layer in dense_layers]
        pool = peak_bytes(
            block, pipeline, num_layers=len(layers), dense_layers=dense, local=local, gathers=True
        )
        # The output and the gradient of the input are in the pool, its inputs are not.
        total += pool + 2 * hidden
    return total


def _gathered_gradients(block: Block, num_layers: int, num_dense: int) -> float:
    """Bytes of the gradients of all layers but one."""
    if block.fused_gradients:
        return 0.0
    count = number_of_expert_weights(block) * (num_layers - 1 - num_dense)
    count += weights_of(attention_weights(block)) * (num_layers - 1)
    if num_dense:
        count += weights_of(mlp_products(block, 0)) * num_dense
    return block.element_bytes * count


class StackedBytes(NamedTuple):
    """Copies of the experts' weights for all chunks of a pass, while the experts of one run backward."""

    beginning: float
    within: float
    """After the last linear layer."""
    ending: float


_NO_STACK = StackedBytes(0.0, 0.0, 0.0)


class _Layer(ABC):
    """What both kinds of layers have; the methods give bytes.

    Args:
        block: The block.
        modules: What it consists of.
        pipeline: How it runs.
        shares_schedule: Whether it shares a schedule with other layers.
    """

    def __init__(self, block: Block, modules: Modules, pipeline: Pipeline, *, shares_schedule: bool) -> None:
        self.block, self.modules, self.pipeline = block, modules, pipeline
        self.sizes = Sizes.of(block, modules, chunks=pipeline.num_chunks)
        self.shares_schedule = shares_schedule
        self.has_fixed_rows = block.rows_margin is not None
        self.expert_gradients = self.attention_gradients = self.projection_gradients = 0.0
        if not block.fused_gradients:
            element = block.element_bytes
            self.expert_gradients = number_of_expert_weights(block) * element
            self.attention_gradients = weights_of(attention_weights(block)) * element
            self.projection_gradients = weights_of(attention_products(block, 0)) * element
        self.calls = 1 if block.grouped or self.has_fixed_rows else block.local_experts
        """Number of products in which the experts of a rank compute one linear layer."""
        # Transformer Engine's products with device offsets take the weights as they are.
        copies_weights = self.has_fixed_rows and modules != FUSED
        self.stacked = number_of_expert_weights(block) * block.element_bytes * copies_weights
        """A copy of the weights of all local experts (``layers.fixed_experts``)."""

    @abstractmethod
    def kept(self) -> float:
        """What it keeps from its forward to its backward pass."""

    @abstractmethod
    def moments(self) -> Iterator[Alive]:
        """What is alive at each moment at which memory can peak."""

    def _computing_experts(self) -> float:
        """In the forward pass, after the last product: outputs of single experts and all of them, or all in
        the order of the experts and in that of their arrival."""
        joins = self.sizes.sorts or self.calls > 1
        return self.sizes.copies * (1 + joins)

    def _beginning_experts(self) -> float:
        """In the backward pass, before the first product: gradients as they have arrived, and sorted."""
        return self.sizes.arrived + self.sizes.copies * self.sizes.sorts

    def _within_an_expert(self, share: float, before: int) -> float:
        """In the backward pass of a share of the rows, within an expert after so many others.

        Alive are sorted gradients, gradients of the rows and weights of the others, whose inner tensors are
        released, and of this one gradients inside it and that of its last weight (or the input of this
        product, which waits).
        """
        block, width = self.block, self.block.ffn / self.block.expert_tensor
        rows = self.sizes.expert_rows * share
        others = before / self.calls
        inside = rows * self.modules.gradient_bytes[block.gated] * width / self.calls
        if self.pipeline.splits_weights:
            released = rows * width * block.element_bytes / self.calls
            return self.sizes.copies * share * (1 + others) + inside + released
        weights = self.expert_gradients * (others + 1 / self.calls / (3 if block.gated else 2))
        rows_and_inner = self.sizes.copies * (1 + others) - self.sizes.inner * others
        return rows_and_inner * share + inside + weights

    def _computing_gradients_of_experts(self, share: float, stacked: StackedBytes = _NO_STACK) -> float:
        """The most of all moments in the backward pass of a share of the rows."""
        if self.has_fixed_rows:
            within = self._within_all_experts(share) + stacked.within
        else:
            within = max(self._within_an_expert(share, 0), self._within_an_expert(share, self.calls - 1))
        beginning = self._beginning_experts() * share + stacked.beginning
        return max(beginning, within, self._ending_experts(share) + stacked.ending)

    def _within_all_experts(self, share: float) -> float:
        """In the backward pass of a share of the rows, between products of all experts at once: after the
        first of them, or in the activation, when sorted gradients are released unless they wait."""
        block, rows = self.block, self.sizes.expert_rows * share
        width = block.ffn / block.expert_tensor
        inside = rows * width * self.modules.gradient_bytes[block.gated]
        inner_gradient = rows * width * block.element_bytes
        sorted_gradient = self.sizes.copies * share
        if self.pipeline.splits_weights:
            return sorted_gradient + inside + inner_gradient
        weights = self.expert_gradients * (1 - self._first_layers_share)
        return max(sorted_gradient + inner_gradient, inside) + weights

    @property
    def _first_layers_share(self) -> float:
        """The part of the experts' weights that their first linear layers have."""
        return 2 / 3 if self.block.gated else 1 / 2

    def _ending_experts(self, share: float) -> float:
        """In the backward pass of a share of the rows, after the last product: gradients of the rows twice,
        as in the forward pass, and those of all weights; without the tensors inside the experts, which are
        released one expert after the other."""
        weights = 0.0 if self.pipeline.splits_weights else self.expert_gradients
        return (self._computing_experts() - self.sizes.inner) * share + weights


class _MegatronLayer(_Layer):
    """Megatron's own layer.

    The local variables of ``MoELayer.forward`` keep what is sent and what has arrived until it returns.
    """

    def kept(self) -> float:
        sizes = self.sizes
        experts = sizes.copies + sizes.row_probabilities + sizes.inner - sizes.recomputed
        return sizes.saved_outside_experts + experts

    def moments(self) -> Iterator[Alive]:
        yield self._combining()
        yield self._differentiating_experts()
        yield self._differentiating_attention()

    def _combining(self) -> Alive:
        sizes = self.sizes
        sent_and_arrived = sizes.moved + sizes.arrived * sizes.sorts
        # Expert outputs are sent while they are received.
        running = max(self._computing_experts(), 2 * sizes.moved)
        return self._alive(outside=sizes.saved_outside_experts, running=sent_and_arrived + running)

    def _differentiating_experts(self) -> Alive:
        worst = self._computing_gradients_of_experts(1.0)
        sizes, again = self.sizes, self.sizes.recomputed
        if not sizes.saves_shared:
            again += sizes.shared
        return self._alive(outside=sizes.saved_outside_experts, hidden=sizes.hidden, running=worst + again)

    def _differentiating_attention(self) -> Alive:
        sizes = self.sizes
        keys = number_of_keys(self.block) * (self.modules.key_sum_bytes + self.block.element_bytes)
        return Alive(
            outside=sizes.first_norm + sizes.attended + sizes.keys,
            experts=0.0,
            rows=0.0,
            hidden=sizes.hidden,
            sums=self.expert_gradients + self.attention_gradients,
            # Gradients of the residual stream and of the queries.
            running=2 * sizes.hidden + keys,
        )

    def _alive(self, *, outside: float, running: float, hidden: float = 0.0) -> Alive:
        experts = self.kept() - self.sizes.saved_outside_experts
        return Alive(outside=outside, experts=experts, rows=0.0, hidden=hidden, sums=0.0, running=running)


class _PipelinedLayer(_Layer):
    """A layer that runs a schedule, by the moments of the schedule."""

    def kept(self) -> float:
        chunks = self.pipeline.backward_degree
        experts = sum(self._saved_by_experts(chunk, chunks) for chunk in range(chunks))
        return self.sizes.saved_outside_experts + experts

    def moments(self) -> Iterator[Alive]:
        features = self.block.features_of(shares_schedule=self.shares_schedule)
        for moment in moments(self.pipeline, features, Direction.FORWARD):
            if moment.kind == kinds.EXPERT.name:
                yield self._forward(moment)
        for moment in moments(self.pipeline, features, Direction.BACKWARD):
            yield self._backward(moment)

    def _forward(self, moment: Moment) -> Alive:
        """While the experts of a chunk run in the forward pass."""
        sizes, chunks = self.sizes, self.pipeline.degree
        assert moment.chunk is not None
        experts = 0.0
        for chunk in range(chunks):
            if moment.has_ended(kinds.EXPERT, chunk):
                experts += self._saved_by_experts(chunk, chunks)
                if chunk > moment.chunk - AHEAD:
                    experts += self._being_stored(chunk, chunks)
        # What has arrived, sorted, and what it is computed from.
        running = self._computing_experts() + sizes.copies + sizes.arrived * sizes.sorts
        if self._policy(moment.chunk, chunks).inner is not Saved.RECOMPUTE:
            running += sizes.inner - sizes.recomputed
        # The last chunk releases the copy of the weights.
        is_last = moment.number_ended(kinds.EXPERT) == chunks - 1
        return Alive(
            outside=sizes.saved_outside_experts,
            experts=experts,
            rows=self._rows(moment, chunks),
            hidden=0.0,
            sums=0.0 if is_last else self.stacked,
            running=running / chunks,
        )

    def _backward(self, moment: Moment) -> Alive:
        """While a stage of the backward pass runs."""
        chunks = self.pipeline.backward_degree
        experts = sum(self._for_experts(moment, chunk) for chunk in range(chunks))
        return Alive(
            outside=sum(self._saved_outside(moment, chunk) for chunk in range(chunks)),
            experts=experts + self._loaded_for_the_layer_below(moment),
            rows=self._rows(moment, chunks),
            hidden=self.sizes.hidden + self._collected(moment),
            sums=self._sums(moment) + self._stacked_between(moment),
            waiting=self._waiting(moment),
            running=self._running(moment),
        )

    def _policy(self, chunk: int, chunks: int) -> ExpertsSaved:
        """What the experts of one of so many chunks save."""
        names = chunk_strategies(self.pipeline.memory)
        return STRATEGIES[names[chunk * len(names) // chunks]]

    def _saved_by_experts(self, chunk: int, chunks: int) -> float:
        """What the experts save of a chunk for the backward pass, on the device."""
        sizes, policy = self.sizes, self._policy(chunk, chunks)
        saved = 0.0
        if policy == ExpertsSaved():
            saved = sizes.copies + sizes.row_probabilities + sizes.inner - sizes.recomputed
        elif policy.only_recomputes:
            saved = sizes.arrived + sizes.row_probabilities
        return saved / chunks

    def _being_stored(self, chunk: int, chunks: int) -> float:
        """What has not been copied to host memory yet when the experts of the next chunk run."""
        sizes, policy = self.sizes, self._policy(chunk, chunks)
        stored = 0.0
        if policy.inner is Saved.HOST:
            stored += sizes.inner + sizes.copies * (policy.tokens is not Saved.RESEND)
        if policy.stores_tokens:
            stored += sizes.arrived
        return stored / chunks

    def _for_experts(self, moment: Moment, chunk: int) -> float:
        """What the experts of a chunk still need for their backward, saved or restored."""
        if moment.has_ended(kinds.EXPERT, chunk):
            return 0.0
        chunks, sizes = self.pipeline.backward_degree, self.sizes
        policy = self._policy(chunk, chunks)
        saved = self._saved_by_experts(chunk, chunks)
        if policy == ExpertsSaved():
            return saved
        restorer, sorter = kinds.REBUILD, kinds.REBUILD
        if policy.inner is Saved.HOST:
            restorer = kinds.LOAD
            sorter = kinds.RESORT if policy.tokens is Saved.RESEND else kinds.LOAD
        if sizes.sorts and moment.has_ended(kinds.REBUILD, chunk):
            # They are needed as they have arrived only to be sorted.
            saved = sizes.row_probabilities / chunks
        again = sizes.inner * _has_begun(moment, restorer, chunk)
        if sizes.sorts or not policy.only_recomputes:
            again += sizes.copies * _has_begun(moment, sorter, chunk)
        return saved + again / chunks

    def _loaded_for_the_layer_below(self, moment: Moment) -> float:
        """What copies from host memory have brought for the layer below, which keeps pace with this one."""
        if not self.shares_schedule:
            return 0.0
        chunks = self.pipeline.backward_degree
        count = moment.number_ended(kinds.EXPERT) + AHEAD - chunks
        return sum(self._being_stored(chunk, chunks) for chunk in range(chunks - max(0, count), chunks))

    def _saved_outside(self, moment: Moment, chunk: int) -> float:
        """What is still saved of a chunk for everything but the experts; keys are of use for all chunks."""
        sizes = self.sizes
        saved = 0.0
        if not moment.has_ended(kinds.ROUTE, chunk):
            saved += sizes.routing
        if not moment.has_ended(kinds.SHARED, chunk):
            saved += sizes.shared * (sizes.saves_shared or _is(moment, kinds.SHARED, chunk))
        if not moment.has_ended(kinds.ATTENTION, chunk):
            saved += sizes.attended
            if not _is(moment, kinds.ATTENTION, chunk):
                saved += sizes.second_norm
            users = (kinds.REPERMUTE, kinds.SHARED, kinds.ROUTE)
            saved += sizes.norm_again * any(_has_begun(moment, user, chunk) for user in users)
        if not moment.has_ended(kinds.QKV, chunk):
            saved += sizes.first_norm
        if not moment.has_ended(kinds.QKV, 0):
            saved += sizes.keys
        return saved / self.pipeline.backward_degree

    def _rows(self, moment: Moment, chunks: int) -> float:
        """Rows of tokens between two stages."""
        return (moment.rows * self.sizes.moved + moment.gathered * self.sizes.arrived) / chunks

    def _collected(self, moment: Moment) -> float:
        """Gradients of the residual stream: the first chunk allocates them for all."""
        first = kinds.MERGE if self.pipeline.whole_attention else kinds.QKV
        return self.sizes.hidden * (moment.number_ended(first) > 0)

    def _sums(self, moment: Moment) -> float:
        """Sums of gradients: those of the second chunk make them wide."""
        projection = self.projection_gradients
        gradients = {
            kinds.EXPERT: self.expert_gradients,
            kinds.ATTENTION: projection,
            kinds.QKV: self.attention_gradients - projection,
        }
        sums = 0.0
        for kind, one_gradient in gradients.items():
            stage = WEIGHTS[kind] if self.pipeline.splits_weights else kind
            sums += one_gradient * self._wide(moment, stage)
        begun = moment.number_ended(kinds.ATTENTION) > 0 or moment.kind == kinds.ATTENTION.name
        if begun and not moment.has_ended(kinds.QKV, 0):
            keys = number_of_keys(self.block)
            sums += keys * SUM_BYTES
            if self.block.ring:
                # Keys of the next step and gradients of the last step, which have been received.
                sums += keys * (SUM_BYTES + self.block.element_bytes)
        return sums

    def _wide(self, moment: Moment, kind: StageKind) -> float:
        """The size of a sum over the stages of this kind that have ended, next to that of one gradient."""
        ended = moment.number_ended(kind)
        return min(1, ended) if ended < 2 else SUM_BYTES / self.block.element_bytes

    def _waiting(self, moment: Moment) -> float:
        """Operands (input and gradient) of the products for weights that are separate stages."""
        if not self.pipeline.splits_weights:
            return 0.0
        block, chunks = self.block, self.pipeline.backward_degree
        width = block.ffn / block.expert_tensor
        per_expert_row = 2 * block.hidden + (2 + block.gated) * width
        operands = {
            kinds.EXPERT: self.sizes.expert_rows * block.element_bytes * per_expert_row,
            kinds.ATTENTION: self._operands(attention_products(block, 0)),
            kinds.QKV: self._operands(qkv_products(block, 0)),
        }
        waiting = 0.0
        for kind, of_all_chunks in operands.items():
            for chunk in range(chunks):
                if moment.has_ended(kind, chunk) and not moment.has_ended(WEIGHTS[kind], chunk):
                    waiting += of_all_chunks / chunks
        return waiting

    def _operands(self, products: Sequence[Product]) -> float:
        """Inputs and gradients of the outputs of linear layers of attention."""
        block = self.block
        widths = sum(product.k + product.n for product in products)
        return block.rows * block.batch * block.element_bytes * widths

    def _running(self, moment: Moment) -> float:
        """What the running stage itself needs at its worst, in addition to what others have."""
        if moment.kind == kinds.EXPERT.name:
            return self._differentiating_experts(moment)
        if moment.kind in (kinds.REBUILD.name, kinds.RESORT.name):
            return self._sorting_again(moment)
        if moment.kind == kinds.ATTENTION.name:
            return self._differentiating_attention(moment)
        if moment.kind == kinds.QKV.name:
            return self._differentiating_projection(moment)
        return 0.0

    def _differentiating_experts(self, moment: Moment) -> float:
        share = 1 / self.pipeline.backward_degree
        worst = self._computing_gradients_of_experts(share, self._stacked_in_experts(moment))
        return worst + self.sizes.recomputed * share

    def _stacked_in_experts(self, moment: Moment) -> StackedBytes:
        """The copies of the weights while the experts of a chunk run backward."""
        ended = moment.number_ended(kinds.EXPERT)
        first, last = self._stacked_layers
        first_before = first if ended or moment.number_ended(kinds.REBUILD) else 0.0
        last_before = last if ended else 0.0
        beginning = first_before + last_before
        # The last chunk releases each copy after its product.
        if ended == self.pipeline.backward_degree - 1:
            return StackedBytes(beginning, first_before, 0.0)
        return StackedBytes(beginning, first_before + last, first + last)

    def _stacked_between(self, moment: Moment) -> float:
        """The same while other stages run."""
        ended = moment.number_ended(kinds.EXPERT)
        if moment.kind == kinds.EXPERT.name or ended == self.pipeline.backward_degree:
            return 0.0
        first, last = self._stacked_layers
        runs_again = moment.kind == kinds.REBUILD.name or moment.number_ended(kinds.REBUILD) > 0
        return first + last if ended else first * runs_again

    @property
    def _stacked_layers(self) -> tuple[float, float]:
        """The copies of the weights of the experts' first and last linear layers."""
        first = self.stacked * self._first_layers_share
        return first, self.stacked - first

    def _sorting_again(self, moment: Moment) -> float:
        """Rows that have been brought back as they had arrived; saved ones are counted as such."""
        assert moment.chunk is not None
        chunks = self.pipeline.backward_degree
        policy = self._policy(moment.chunk, chunks)
        brings_back = policy.tokens is Saved.RESEND or policy.stores_tokens
        return self.sizes.arrived / chunks if brings_back and self.sizes.sorts else 0.0

    def _differentiating_attention(self, moment: Moment) -> float:
        """Gradients of residual, norm, projection and queries of the chunk, and of keys up to its last."""
        share = self._share(moment)
        seen = share if moment.chunk is None else (moment.chunk + 1) * share
        weights = 0.0 if self.pipeline.splits_weights else self.projection_gradients
        return 4 * self.sizes.hidden * share + self.sizes.keys * seen + weights

    def _differentiating_projection(self, moment: Moment) -> float:
        """Gradients of queries, keys and values, joined; and those of the norm before."""
        weights = 0.0
        if not self.pipeline.splits_weights:
            weights = self.attention_gradients - self.projection_gradients
        return (4 * self.sizes.hidden + self.sizes.keys) * self._share(moment) + weights

    def _share(self, moment: Moment) -> float:
        """The share of the sequence that the running stage covers."""
        return 1.0 if moment.chunk is None else 1 / self.pipeline.backward_degree


def _is(moment: Moment, kind: StageKind, chunk: int) -> bool:
    """Whether the stage of this kind runs, of the chunk or of the whole sequence."""
    return moment.kind == kind.name and moment.chunk in (None, chunk)


def _has_begun(moment: Moment, kind: StageKind, chunk: int) -> bool:
    """Whether the stage of this kind runs or has ended."""
    return _is(moment, kind, chunk) or moment.has_ended(kind, chunk)
