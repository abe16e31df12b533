"""Predicts the times of single operations on one rank of a cluster: products, copies, attention, collectives.

:mod:`.stage_costs` adds them up to stages. Times are in microseconds. A matrix product with weights has one
product in the forward pass and two in the backward pass: for the gradient of the rows (dgrad), and for the
gradient of the weight (wgrad), which can be a separate stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megatron_ampipe.plan.block import Block, Rows
from megatron_ampipe.plan.cluster import Cluster, Dtype, Operation, TransferCost
from megatron_ampipe.schedule import BlockFeatures, Direction, NodeLayout

GRADIENT_BYTES = 4
"""Bytes of an element in the buffer that is reduced (Megatron's ``grad_reduce_in_fp32``, its default)."""
INDEX_BYTES = 8
"""Bytes of a number of a row, of which index arithmetic on the device consists."""
INDEX_OPERATION_US = 2.0
"""The assumed time of an operation on few numbers, in which a kernel starts and ends."""
_PASSES_OF_INDICES = 12
"""Operations of a stage with fixed rows that read and write a number for each row; others are smaller."""


class Pair(NamedTuple):
    """Microseconds of one stage in each direction. A tuple, because a search creates thousands."""

    forward: float
    backward: float

    def __add__(self, other: Pair) -> Pair:  # type: ignore[override]
        return Pair(self.forward + other.forward, self.backward + other.backward)

    @property
    def total(self) -> float:
        """Both directions."""
        return self.forward + self.backward

    def of(self, direction: Direction) -> float:
        """The time in one direction."""
        return self.forward if direction is Direction.FORWARD else self.backward


ZERO = Pair(0.0, 0.0)


class Product(NamedTuple):
    """``rows`` rows in total, each multiplied by one of ``matrices`` equal weights ``[n, k]``.

    Attributes:
        rows: Rows of all weights together.
        k: Size of a row.
        n: Size of a row of the result.
        calls: Number of launches: one for each weight, or one for all in a grouped product.
        matrices: Number of weights.
        adds_apart: Whether their gradients are added apart even if the block has products that accumulate
            them.
    """

    rows: float
    k: float
    n: float
    calls: int = 1
    matrices: int = 1
    adds_apart: bool = False


def qkv_products(work: Block, rows: int) -> list[Product]:
    """The projections to queries, keys and values, for ``rows`` of the residual stream of one rank."""
    gathered = rows * work.batch * work.tensor
    return [Product(gathered, k, n / work.tensor) for k, n in work.projections]


def attention_products(work: Block, rows: int) -> list[Product]:
    """The output projection."""
    return [Product(rows * work.batch * work.tensor, work.heads * work.value_size / work.tensor, work.hidden)]


def expert_products(work: Block, rows: int) -> list[Product]:
    """The linear layers of all experts of a rank, with the rows that they receive.

    With fixed rows there is one grouped product, which skips padding. In local layers it is torch's, which
    adds no gradients.
    """
    has_fixed_rows = work.rows_margin is not None
    calls = 1 if work.grouped or has_fixed_rows else work.local_experts
    adds_apart = has_fixed_rows and work.local
    return [
        product._replace(calls=calls, matrices=work.local_experts, adds_apart=adds_apart)
        for product in _mlp(work, work.received(rows), work.ffn / work.expert_tensor)
    ]


def shared_products(work: Block, rows: int) -> list[Product]:
    """The linear layers of shared experts."""
    assert work.shared_ffn is not None
    return _mlp(work, rows * work.batch * work.tensor, work.shared_ffn / work.tensor)


def mlp_products(work: Block, rows: int) -> list[Product]:
    """The linear layers of the MLP of a layer without experts."""
    assert work.dense_ffn is not None
    return _mlp(work, rows * work.batch * work.tensor, work.dense_ffn / work.tensor)


def _mlp(work: Block, rows: float, inner: float) -> list[Product]:
    up = Product(rows, work.hidden, (2 if work.gated else 1) * inner)
    return [up, Product(rows, inner, work.hidden)]


def weights_of(products: Iterable[Product], *, bias: bool = False) -> float:
    """Number of elements in a weight of each product, and in its bias."""
    return sum(product.k * product.n + product.n * bias for product in products)


def tensors_of(work: Block, *, dense: bool) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The sizes of a layer's tensors on one rank whose gradients are reduced: of experts, and of others."""
    products = [*qkv_products(work, 0), *attention_products(work, 0)]
    experts: list[Product] = []
    if dense:
        products += mlp_products(work, 0)
    else:
        products += [] if work.shared_ffn is None else shared_products(work, 0)
        experts = expert_products(work, 0) * (work.local_experts if work.expert_replicas > 1 else 0)
    others = products if work.replicas > 1 else []
    return tuple(product.k * product.n for product in experts), tuple(p.k * p.n for p in others)


class OperationTimes:
    """Times of the operations of one block on one cluster.

    Args:
        block: The block: sizes of its tensors, and its groups of ranks.
        cluster: The figures.
        features: The features of the block.
        stock: Whether it is Megatron's own layer, whose all-to-alls can be other operations.
        is_bound: Chunks have as much padding as they have at least, in whatever lengths the rows are cut.

    Raises:
        BadInput: the cluster lacks a figure that the block needs.
    """

    def __init__(
        self,
        block: Block,
        cluster: Cluster,
        features: BlockFeatures,
        *,
        stock: bool = False,
        is_bound: bool = False,
    ) -> None:
        self.block, self.cluster, self.features, self._stock = block, cluster, features, stock
        self._is_bound = is_bound
        self.has_fixed_rows = block.rows_margin is not None
        """Whether rows are sent up to a budget, with counts on the device."""
        self._gemm = cluster.figure("compute.gemm", cluster.compute.gemm, block.dtype)
        # Models in fp8 compute attention in bf16.
        dtype: Dtype = "bf16" if block.dtype == "fp8" else block.dtype
        self._attention = cluster.figure("compute.attention", cluster.compute.attention, dtype)
        self.nodes: NodeLayout | None = None
        """How the expert-parallel ranks are spread over nodes, if tokens are sent in two hops."""
        if block.exchange.has_two_hops:
            self.nodes = NodeLayout.of(block.settings, cluster.ranks_per_node)
            if self.nodes is None:
                rule = f"does not spread {block.expert} expert-parallel ranks equally over several nodes"
                remedy = f"The exchange {block.exchange} needs the cluster file of such a machine."
                cluster.refuse("ranks_per_node", rule, remedy)

    def tokens(self, rows: Rows) -> int:
        """Tokens of one rank in a chunk."""
        return rows.hidden * self.block.batch

    def padded(self, rows: Rows) -> float:
        """Number of rows of a chunk that the local experts get, padding of fixed rows included."""
        block = self.block
        if not self.has_fixed_rows:
            return block.received(rows.hidden)
        if not self._is_bound:
            # A transfer of several chunks has the budget of each.
            return rows.chunks * block.arriving(rows.hidden // rows.chunks)
        # Budgets grow slower than chunks, so that one chunk has the least; each is rounded up to a row.
        least = block.arriving(block.rows) - block.expert * block.expert_tensor
        return least * rows.hidden / block.rows

    def sent(self, rows: Rows) -> float:
        """Number of rows that a rank sends for a chunk."""
        if self.has_fixed_rows:
            # As the busiest rank receives, for which the transfer waits.
            return self.padded(rows) / self.block.expert_tensor
        places = self.block.rows_per_token
        if self.nodes is not None and not self.block.exchange.sends_every_copy:
            places = self.block.rows_to(self.nodes.num_nodes)
        return self.tokens(rows) * places * self.block.load

    def arriving(self, rows: Rows) -> float:
        """Number of rows of a chunk that the ranks of the experts receive."""
        if self.has_fixed_rows:
            return self.padded(rows) / self.block.expert_tensor
        return self.tokens(rows) * self.block.rows_per_token * self.block.load

    def key_sums(self, keys: float) -> Pair:
        """Time to add the gradients of the keys and values of a chunk to sums in fp32."""
        work = self.block
        seen = keys * work.batch * work.key_value_width / work.tensor
        return Pair(0.0, self.memory_us(seen * (8 + work.element_bytes)))

    def all_products(self, products: Iterable[Product], *, chunked: bool) -> Pair:
        """Time of several products one after the other."""
        return sum((self.products(product, chunked=chunked) for product in products), ZERO)

    def products(self, product: Product, *, chunked: bool) -> Pair:
        """Time of equal products; two each in the backward pass.

        The dgrad product takes as long as the forward product; the rest of the backward is for weights.
        """
        rows, k, n, calls, matrices, adds_apart = product
        time = self._gemm.time_us(rows, k, n, calls=calls, matrices=matrices)
        sums = 0.0
        if chunked and (adds_apart or not self.block.fused_gradients):
            # The weight gradients of the chunks are summed in fp32.
            sums = self.memory_us(matrices * k * n * (8 + self.block.element_bytes))
        return Pair(time, 2 * time + sums)

    def attend(self, gflops: float, merged: float) -> Pair:
        """Time of core attention, for so many GFLOP of the forward pass and ``merged`` elements to merge."""
        merge_mb = 1e-6 * merged * self.block.element_bytes
        # Five matrix products backward, two forward.
        return Pair(
            self._attention.forward.time_us(gflops, merge_mb),
            self._attention.backward.time_us(2.5 * gflops, merge_mb),
        )

    def pass_over(self, elements: float) -> Pair:
        """Time to read and write elements; the backward pass reads the gradient in addition to the input."""
        time = self.memory_us(elements * self.block.element_bytes)
        return Pair(time, 1.5 * time)

    def move(self, rows: float) -> Pair:
        """Time to permute rows."""
        time = self.cluster.compute.permute.time_us(2 * rows * self.block.hidden * self.block.element_bytes)
        return Pair(time, time)

    def index_us(self, rows: float, operations: int) -> float:
        """Time of index arithmetic on the device, for so many rows in so many operations."""
        size = 2 * INDEX_BYTES * min(operations, _PASSES_OF_INDICES) * rows
        return operations * INDEX_OPERATION_US + size * 1e-6 * self.cluster.compute.memory.beta_us_per_mb

    def gather(self, elements: float, ranks: int, *, wide: bool = False) -> Pair:
        """Time of an all-gather forward and a reduce-scatter backward; ``elements`` is one rank's part."""
        if ranks == 1:
            return ZERO
        size, apart = elements * self.block.element_bytes * (ranks - 1), self.block.tensor if wide else 1
        return Pair(
            self._ring_us("all_gather", size, ranks, apart=apart),
            self._ring_us("reduce_scatter", size, ranks, apart=apart),
        )

    def reduction_us(self, parameters: float, *, experts: bool) -> float:
        """Time to reduce the gradients of a bucket of so many parameters; 0 if no other rank has them.

        An all-reduce takes as long as two all-gathers of the same bytes.
        """
        work = self.block
        ranks, apart = work.replicas, work.tensor
        if experts:
            ranks, apart = work.expert_replicas, work.expert * work.expert_tensor
        if ranks == 1 or not parameters:
            return 0.0
        size = parameters * GRADIENT_BYTES * (ranks - 1) / ranks
        if work.shards_optimizer:
            return self._ring_us("reduce_scatter", size, ranks, apart=apart)
        return 2 * self._ring_us("all_gather", size, ranks, apart=apart)

    def _ring_us(self, operation: Operation, size: float, ranks: int, *, apart: int) -> float:
        """Time of an all-gather or reduce-scatter in which each rank sends ``size`` bytes to the next one.

        The group has every ``apart``-th rank. Between nodes it uses the adapters of its ranks in a node: all
        adapters, as the figure was measured, or some of them, each as fast as in an all-to-all.
        """
        time, ranks_per_node = (
            self.figure(operation, ranks * apart).time_us(size),
            self.cluster.ranks_per_node,
        )
        if ranks * apart <= ranks_per_node or apart == 1:
            return time
        through_one = self.cluster.collective("all_to_all", across_nodes=True)
        return max(time, through_one.time_us(size / max(1, ranks_per_node // apart)))

    def figure(self, operation: Operation, ranks: int) -> TransferCost:
        """The figure of a collective in a group spread over ``ranks`` ranks, maybe on several nodes."""
        return self.cluster.collective(operation, across_nodes=ranks > self.cluster.ranks_per_node)

    def flex_us(self, tokens: float) -> float:
        """Time to send ``tokens`` of a rank through DeepEP or HybridEP, which use both link classes at once.

        A token is sent once to each node, and there over NVLink to each rank with experts of it.
        """
        work = self.block
        ranks = work.expert * work.expert_tensor
        ranks_per_node = min(ranks, self.cluster.ranks_per_node)
        nodes = -(-ranks // ranks_per_node)
        links = [(False, ranks_per_node, work.rows_to(work.expert) * work.expert_tensor)] * (
            ranks_per_node > 1
        )
        links += [(True, nodes, work.rows_to(nodes))] * (nodes > 1)
        size = tokens * work.row_bytes(work.topk)
        return max(
            self.cluster.collective(work.dispatcher, across_nodes=across).time_us(  # type: ignore[arg-type]
                size * rows * (places - 1) / places
            )
            for across, places, rows in links
        )

    def links(self) -> list[tuple[TransferCost, float]]:
        """The figures of the links that an all-to-all uses, each with its share of the rows."""
        work, cluster = self.block, self.cluster
        if self.nodes is not None:
            nodes = self.nodes.num_nodes
            return [(cluster.collective("all_to_all", across_nodes=True), (nodes - 1) / nodes)]
        ranks_per_node = min(work.expert, max(1, cluster.ranks_per_node // work.expert_tensor))
        direct: Operation = "stock_all_to_all" if self._stock else "direct_all_to_all"
        if ranks_per_node < work.expert and direct in (cluster.inter or {}):
            # Measured with all ranks of all nodes, including the faster links.
            figure = cluster.collective(direct, across_nodes=True)
            return [(figure, (work.expert - ranks_per_node) / work.expert)]
        links = []
        for peers, across in ((ranks_per_node - 1, False), (work.expert - ranks_per_node, True)):
            own = self._stock and "stock_all_to_all" in ((cluster.inter if across else cluster.intra) or {})
            operation: Operation = "stock_all_to_all" if own else "all_to_all"
            if peers:
                links.append((cluster.collective(operation, across_nodes=across), peers / work.expert))
        return links

    def copy_us(self, size_bytes: float) -> float:
        """Time to copy bytes to host memory or back; raises BadInput if the cluster has no figure for it."""
        copy = self.cluster.figure("compute", {"copy": self.cluster.compute.copy}, "copy")
        return copy.time_us(size_bytes)

    def memory_us(self, size_bytes: float) -> float:
        """Time to read or write so many bytes."""
        return self.cluster.compute.memory.time_us(size_bytes)
