"""The time of each kind of stage alone, and the number of calls that the host makes to issue it.

There is one function for each kind, with the decorator :class:`CostOf`; a new kind needs nothing else. It
adds up the stage's operations, forward and backward, from :mod:`.operation_times`. Times are in
microseconds, without the overheads that a prediction adds.

The host needs some time for every call, independent of the size of the tensors, so above some degree the
device waits for the host. Calls were counted on real blocks, and ``tests/streams/test_stream_order.py``
compares them: torch operations, collectives, and waits and records of events, with Megatron's local layers.
With fixed rows, calls take the place of the host's wait for counts.
Fused kernels need fewer calls; it is assumed that they reduce all stages in the same proportion.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass, replace

from megatron_ampipe.plan.block import Block, Rows
from megatron_ampipe.plan.cluster import Host
from megatron_ampipe.plan.operation_times import (
    ZERO,
    OperationTimes,
    Pair,
    Product,
    attention_products,
    expert_products,
    mlp_products,
    qkv_products,
    shared_products,
    tensors_of,
    weights_of,
)
from megatron_ampipe.plan.saved import expert_bytes
from megatron_ampipe.schedule import Direction, StageKind, kinds

COUNT_BYTES = 8
MEAN_CALLS = Pair(8.0, 11.4)
"""Average number of calls of a stage, in a block with one local expert and without optional stages."""
_FIXED_ROUTE, _FIXED_SORT = 19, 33
"""Operations of index arithmetic with fixed rows: of ``route``, and of ``expert``."""
_SORTED_BYTES = 40
"""Bytes that a stable sort of marks of one byte reads and writes for each: marks and places, twice."""


@dataclass(frozen=True, slots=True)
class Work:
    """The input of one stage: rows of a chunk, or of the whole sequence if not ``chunked``."""

    rows: Rows
    chunked: bool = True


CostFunction = Callable[[OperationTimes, Work], Pair]
"""Computes the time of a stage alone, forward and backward, without its overhead. The first of the two counts
if the kind runs in one direction only."""


@dataclass(frozen=True, slots=True)
class CostOf:
    """Decorates the cost function of a kind, with further facts for the planner.

    Attributes:
        kind: The kind. The cost of a weight gradient belongs to the kind that has the weights.
        calls: Number of host calls for a stage of any chunk but the first, forward and backward;
            :data:`MEAN_CALLS` if None.
        fixed_calls: The same with fixed rows; None if they are as many.
        part_of: The kind that includes this work, and its calls, in blocks without this kind.
        products: The products with weights, for a number of rows of one rank. Their weight gradients can be a
            separate stage.
        measured_as: The kind whose overhead is used, because profiles do not measure this kind.
        by_position: Whether the time depends on the position of the chunk, not only on its length.
    """

    kind: StageKind
    _: KW_ONLY
    calls: tuple[float, float] | Callable[[Block], tuple[float, float]] | None = None
    fixed_calls: tuple[float, float] | Callable[[Block], tuple[float, float]] | None = None
    part_of: StageKind | None = None
    products: Callable[[Block, int], Sequence[Product]] | None = None
    measured_as: StageKind | None = None
    by_position: bool = False

    def __call__(self, function: CostFunction) -> CostFunction:
        COSTS[self.kind], FACTS[self.kind] = function, self
        return function


COSTS: dict[StageKind, CostFunction] = {}
FACTS: dict[StageKind, CostOf] = {}
"""The function of every kind, and its decorator."""


def facts_of(kind: StageKind) -> CostOf:
    """The facts about a kind, with defaults for kinds without a cost function."""
    return FACTS.get(kind.row) or CostOf(kind)


# Attention.


@CostOf(kinds.INPUT_NORM, calls=(6, 17), part_of=kinds.QKV, measured_as=kinds.MERGE)
def input_norm(times: OperationTimes, work: Work) -> Pair:
    return times.pass_over(2 * times.tokens(work.rows) * times.block.hidden)


@CostOf(kinds.GATHER_ROWS, calls=(3, 3))
@CostOf(kinds.REGATHER_ROWS, calls=(0, 3))
def gather_rows(times: OperationTimes, work: Work) -> Pair:
    """All-gather of rows over tensor-parallel ranks; backward, a reduce-scatter."""
    return times.gather(times.tokens(work.rows) * times.block.hidden, times.block.tensor)


@CostOf(kinds.QKV, calls=(10, 20), products=qkv_products)
def qkv(times: OperationTimes, work: Work) -> Pair:
    """The projection to queries, keys and values, with all that is not a separate stage before it."""
    sizes, tokens = times.block, times.tokens(work.rows)
    written = 2 * tokens * sizes.tensor * (sum(n for _, n in sizes.projections) // sizes.tensor)
    total = times.pass_over(written)
    total += times.all_products(qkv_products(sizes, work.rows.hidden), chunked=work.chunked)
    if work.chunked:
        # Queries, keys and values are copied into the buffers of the whole sequence.
        total += times.pass_over(written)
    if sizes.context > 1 and not sizes.ring:
        total += times.gather(tokens * sizes.key_value_width / sizes.tensor, sizes.context, wide=True)
    if times.features.gathers_rows:
        return total
    return total + input_norm(times, work) + gather_rows(times, work)


@CostOf(kinds.ATTEND, measured_as=kinds.ATTENTION)
def attend(times: OperationTimes, work: Work) -> Pair:
    """Attention to the keys of one context-parallel rank: every row to half of them, or half to all."""
    sizes = times.block
    queries = times.tokens(work.rows) * sizes.heads
    keys = sizes.sequence_length / sizes.context
    gflops = 2e-9 * queries * keys / 2 * (sizes.head_size + sizes.value_size)
    return times.attend(gflops, queries * sizes.value_size) + times.key_sums(keys)


@CostOf(kinds.RING)
@CostOf(kinds.RERING)
def ring(times: OperationTimes, work: Work) -> Pair:
    """Keys and values, or their gradients, sent to the next rank."""
    sizes = times.block
    rows = sizes.sequence_length / sizes.context * sizes.batch
    size = rows * sizes.key_value_width / sizes.tensor * sizes.element_bytes
    time = times.figure("all_to_all", sizes.context * sizes.tensor).time_us(size)
    return Pair(time, time)


@CostOf(kinds.ATTENTION, calls=(17, 29), products=attention_products, by_position=True)
def attention(times: OperationTimes, work: Work) -> Pair:
    """Core attention and output projection, with all that is not a separate stage after it."""
    sizes, rows = times.block, work.rows
    total = times.all_products(attention_products(sizes, rows.hidden), chunked=work.chunked)
    if not sizes.ring:
        heads = sizes.batch * sizes.heads / sizes.tensor
        gflops = 2e-9 * rows.pairs * heads * (sizes.head_size + sizes.value_size)
        total += times.attend(gflops, rows.merged * heads * sizes.value_size if work.chunked else 0)
        if work.chunked:
            total += times.key_sums(rows.keys)
    if times.features.row_links:
        return total
    return total + scatter_rows(times, work) + add_norm(times, work)


@CostOf(kinds.SCATTER_ROWS, calls=(3, 3))
def scatter_rows(times: OperationTimes, work: Work) -> Pair:
    """Reduce-scatter of the projection over tensor-parallel ranks; backward, an all-gather."""
    gathered = gather_rows(times, work)
    return Pair(gathered.backward, gathered.forward)


@CostOf(kinds.ADD_NORM, calls=(7, 15), part_of=kinds.ATTENTION, measured_as=kinds.MERGE)
def add_norm(times: OperationTimes, work: Work) -> Pair:
    return times.pass_over(5 * times.tokens(work.rows) * times.block.hidden)


# Routing.


@CostOf(kinds.LOSSES, calls=(16, 7))
def losses(times: OperationTimes, work: Work) -> Pair:
    # Router scores are fp32 in any dtype.
    sizes = times.block
    return times.pass_over(4 * times.tokens(work.rows) * sizes.experts * 4 / sizes.element_bytes)


@CostOf(kinds.CHOOSE)
def choose(times: OperationTimes, work: Work) -> Pair:
    """The router, without its load balancing."""
    sizes, tokens = times.block, times.tokens(work.rows)
    products = times.products(Product(tokens, sizes.hidden, sizes.experts), chunked=False)
    return losses(times, work) + products


@CostOf(kinds.REPERMUTE)
@CostOf(kinds.CONDENSE)
@CostOf(kinds.EXPAND)
def permute(times: OperationTimes, work: Work) -> Pair:
    # The flex dispatcher takes tokens in their original order, and adds returned rows itself.
    return ZERO if times.block.flex else times.move(times.sent(work.rows))


@CostOf(kinds.ROUTE, calls=(17, 12), fixed_calls=(34, 12))
def route(times: OperationTimes, work: Work) -> Pair:
    """The router, unless it is a separate stage, and the permutation."""
    moved = permute(times, work)
    if times.has_fixed_rows and not times.block.flex:
        moved += _sort_tokens(times, work)
    return moved if times.block.chooses else choose(times, work) + moved


def _sort_tokens(times: OperationTimes, work: Work) -> Pair:
    """Which token is in which row: a sort of a mark for each token and expert, and more operations."""
    marks = times.tokens(work.rows) * times.block.experts
    indices_us = times.index_us(times.sent(work.rows), _FIXED_ROUTE)
    return Pair(times.memory_us(_SORTED_BYTES * marks) + indices_us, 0.0)


@CostOf(kinds.MERGE, calls=(4, 1), fixed_calls=(4, 2))
def merge(times: OperationTimes, work: Work) -> Pair:
    return permute(times, work) + times.pass_over(3 * times.tokens(work.rows) * times.block.hidden)


# The exchange of tokens with the experts.


@CostOf(kinds.COUNTS, calls=(5, 0), fixed_calls=(2, 0))
def counts(times: OperationTimes, work: Work) -> Pair:
    sizes = times.block
    ranks = sizes.expert * sizes.expert_tensor
    if ranks == 1:
        return ZERO
    return Pair(times.figure("all_gather", ranks).time_us(COUNT_BYTES * sizes.experts * (ranks - 1)), 0.0)


@CostOf(kinds.DISPATCH, calls=(4, 4))
@CostOf(kinds.COMBINE, calls=(2, 2))
@CostOf(kinds.REDISPATCH)
def exchange(times: OperationTimes, work: Work) -> Pair:
    """The forward and the backward pass send the same number of bytes."""
    sizes = times.block
    if sizes.expert == 1:
        return ZERO
    if sizes.dispatcher == "allgather":
        elements = times.tokens(work.rows) * sizes.hidden
        time = times.gather(elements, sizes.expert * sizes.expert_tensor).forward
        return Pair(time, time)
    if sizes.flex:
        time = times.flex_us(times.tokens(work.rows) * sizes.load)
        return Pair(time, time)
    # A row is sent with a probability for each possible expert.
    ranks_per_node = 1 if times.nodes is None else times.nodes.ranks_per_node
    probabilities = 1 if sizes.exchange.sends_every_copy else ranks_per_node * sizes.local_experts
    sent = times.sent(work.rows) * sizes.row_bytes(probabilities)
    # Links within a node and between nodes transfer at the same time.
    time = max(figure.time_us(sent * share) for figure, share in times.links())
    return Pair(time, time)


@CostOf(kinds.SPREAD)
@CostOf(kinds.COLLECT)
@CostOf(kinds.RESPREAD)
def hop(times: OperationTimes, work: Work) -> Pair:
    """A hop within nodes, with the copies, sums or sorting there; the same bytes in both directions."""
    assert times.nodes is not None
    ranks_per_node, copies = times.nodes.ranks_per_node, times.arriving(work.rows)
    size = (
        copies
        * (ranks_per_node - 1)
        / ranks_per_node
        * times.block.row_bytes(times.block.arriving_probabilities)
    )
    time = times.figure("all_to_all", 1).time_us(size) + times.move(copies).forward
    return Pair(time, time)


def _over_shares(times: OperationTimes, work: Work, probabilities: int) -> Pair:
    sizes = times.block
    elements = times.arriving(work.rows) * sizes.row_bytes(probabilities) / sizes.element_bytes
    return times.gather(elements, sizes.expert_tensor)


@CostOf(kinds.GATHER, calls=(6, 10))
@CostOf(kinds.REGATHER)
def gather(times: OperationTimes, work: Work) -> Pair:
    """All-gather of rows and probabilities over the ranks that share an expert; backward a reduce-scatter."""
    return _over_shares(times, work, times.block.arriving_probabilities)


@CostOf(kinds.SCATTER, calls=(5, 3))
def scatter(times: OperationTimes, work: Work) -> Pair:
    """Reduce-scatter of expert outputs over the ranks that share an expert; backward an all-gather."""
    gathered = _over_shares(times, work, 0)
    return Pair(gathered.backward, gathered.forward)


# Experts, and layers without them.


@CostOf(kinds.RESORT)
def arrange(times: OperationTimes, work: Work) -> Pair:
    """Rows sorted by expert, or copied for the experts; or the inverse, which adds copies."""
    sizes = times.block
    if times.has_fixed_rows and not sizes.flex:
        # Padding goes after the rows of all experts, also of one.
        return times.move(times.padded(work.rows))
    # HybridEP's exchange sorts them.
    sorts = sizes.dispatcher in ("alltoall", "deepep")
    if not sorts or (sizes.local_experts == 1 and sizes.sends_every_copy):
        return ZERO
    return times.move(sizes.received(work.rows.hidden))


@CostOf(kinds.REBUILD)
def until_activation(times: OperationTimes, work: Work) -> Pair:
    """Sorting, first linear layer and activation of the experts."""
    sizes = times.block
    up, _ = expert_products(sizes, work.rows.hidden)
    total = times.products(up, chunked=work.chunked)
    rows = times.padded(work.rows) if times.has_fixed_rows else up.rows
    total += times.pass_over(rows * (up.n + sizes.ffn / sizes.expert_tensor))
    return total + arrange(times, work)


def _expert_calls(block: Block) -> tuple[float, float]:
    """Calls for each local expert, or for one grouped GEMM; and for sorting if there are several experts."""
    products = 1 if block.grouped else block.local_experts
    around = 1 if block.local_experts == 1 else 1 + 4
    return around + 4 * products, around + 10.75 * products


def _fixed_expert_calls(block: Block) -> tuple[float, float]:
    """The same with fixed rows: sorting is index arithmetic, and there is one grouped product."""
    return 37.5, 13 + 2 * block.local_experts


@CostOf(kinds.EXPERT, calls=_expert_calls, fixed_calls=_fixed_expert_calls, products=expert_products)
def expert(times: OperationTimes, work: Work) -> Pair:
    """The local experts: the work that ``rebuild`` repeats, the last linear layer, and unsorting."""
    _, down = expert_products(times.block, work.rows.hidden)
    last = times.products(down, chunked=work.chunked)
    total = until_activation(times, work) + last + arrange(times, work)
    if times.has_fixed_rows:
        total += ZERO if times.block.flex else _sort_rows(times, work)
        total += _stack_weights(times, work) if times.block.local else ZERO
    return total


def _sort_rows(times: OperationTimes, work: Work) -> Pair:
    """The order of received rows by expert."""
    return Pair(times.index_us(times.padded(work.rows), _FIXED_SORT), 0.0)


def _stack_weights(times: OperationTimes, work: Work) -> Pair:
    """A chunk's share of copying the weights of a rank's experts side by side, once in each pass."""
    sizes = times.block
    weights = weights_of(expert_products(sizes, work.rows.hidden)) * sizes.local_experts
    copied_us = times.memory_us(2 * weights * sizes.element_bytes) * work.rows.hidden / sizes.rows
    return Pair(copied_us, copied_us)


def _gated(times: OperationTimes, work: Work, products: Sequence[Product]) -> Pair:
    """Two products with an activation between them, over tensor-parallel ranks."""
    up, down = products
    total = times.all_products(products, chunked=work.chunked) + times.pass_over(up.rows * (up.n + down.k))
    both = gather_rows(times, work)
    return total + both + both


@CostOf(kinds.SHARED, calls=(3, 7), products=shared_products)
def shared(times: OperationTimes, work: Work) -> Pair:
    return _gated(times, work, shared_products(times.block, work.rows.hidden))


@CostOf(kinds.MLP, products=mlp_products)
def mlp(times: OperationTimes, work: Work) -> Pair:
    passed = times.pass_over(2 * times.tokens(work.rows) * times.block.hidden)
    return _gated(times, work, mlp_products(times.block, work.rows.hidden)) + passed


# Copies to host memory, and gradients of parameters.


@CostOf(kinds.STORE)
@CostOf(kinds.LOAD)
def copy_all(times: OperationTimes, work: Work) -> Pair:
    """All saved activations of the experts."""
    local = times.cluster.trains_on_host
    size = expert_bytes(times.block, work.rows.hidden, local=local, inner=True)
    return Pair(times.copy_us(size), 0.0)


@CostOf(kinds.STORE_TOKENS)
@CostOf(kinds.LOAD_TOKENS)
def copy_tokens(times: OperationTimes, work: Work) -> Pair:
    """Received tokens."""
    sizes, local = times.block, times.cluster.trains_on_host
    size = expert_bytes(sizes, work.rows.hidden, local=local, inner=False)
    # With all-to-alls, rows are gathered after the copy.
    return Pair(times.copy_us(size / (sizes.expert_tensor if sizes.dispatcher == "alltoall" else 1)), 0.0)


@CostOf(kinds.REDUCE)
def reduce(times: OperationTimes, work: Work) -> Pair:
    _, others = tensors_of(times.block, dense=times.features.dense)
    return Pair(times.reduction_us(sum(others), experts=False), 0.0)


@CostOf(kinds.REDUCE_EXPERTS)
def reduce_experts(times: OperationTimes, work: Work) -> Pair:
    experts, _ = tensors_of(times.block, dense=False)
    return Pair(times.reduction_us(sum(experts), experts=True), 0.0)


# The host's part.


def host_calls(
    kind: StageKind, direction: Direction, block: Block, *, others: Collection[StageKind] = ()
) -> float:
    """Number of host calls to issue one stage of one chunk; ``others`` are the kinds of its block."""
    facts = facts_of(kind)
    calls = facts.calls or MEAN_CALLS
    if block.rows_margin is not None:
        calls = facts.fixed_calls or calls
    own = Pair(*(calls(block) if callable(calls) else calls)).of(direction)
    parts = (part for part in others if facts_of(part).part_of == kind)
    return own - sum(host_calls(part, direction, block) for part in parts)


def issued_parts(kind: StageKind, direction: Direction, block: Block) -> float:
    """Factor by which issuing a stage takes longer than with one local expert."""
    calls_alone = host_calls(kind, direction, replace(block, experts=block.expert, rows_margin=None))
    if not calls_alone:
        # The backward pass has no such stage, as of counts.
        return 1.0
    return host_calls(kind, direction, block) / calls_alone


def issue_us(
    kind: StageKind, direction: Direction, block: Block, host: Host, *, others: Collection[StageKind] = ()
) -> float:
    """The host's time to issue one stage of one chunk; ``others`` are the kinds of its block.

    As measured for the kind (``host.issue_of``), or else its share of the mean time of a stage.
    """
    measured = {str(name): figure for name, figure in (host.issue_of or {}).items()}
    if (figure := measured.get(kind.name)) is not None:
        return figure.of(direction) * issued_parts(kind, direction, block)
    mean = host.issue.of(direction)
    return mean * host_calls(kind, direction, block, others=others) / MEAN_CALLS.of(direction)
