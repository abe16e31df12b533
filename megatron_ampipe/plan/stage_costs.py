"""How long each kind of stage takes alone: one function for each. :mod:`.cost_table` says which is whose.

Each adds up what ``layers/attention_stages.py`` or ``layers/moe_stages.py`` computes and copies in the stage,
forward and backward, from :mod:`.operation_times`. Pure arithmetic; times are in microseconds. Called by
:mod:`.cost`, mostly through that table.
"""

from __future__ import annotations

from megatron_ampipe.plan import linear_products
from megatron_ampipe.plan.chunk_rows import Rows
from megatron_ampipe.plan.linear_products import Product
from megatron_ampipe.plan.memory import expert_bytes
from megatron_ampipe.plan.operation_times import ZERO, OperationTimes, Pair
from megatron_ampipe.schedule import BlockFeatures

COUNT_BYTES = 8
PROBABILITY_BYTES = 4


class StageCosts:
    """The stages of one block on one cluster, each as a function of its rows.

    Args:
        times: Of the operations, with the workload.
        features: Of the block.
    """

    def __init__(self, times: OperationTimes, features: BlockFeatures) -> None:
        self.workload, self._times = times.workload, times
        self._scatters_rows, self._gathers_rows = features.scatters_rows, features.gathers_rows

    def input_norm(self, rows: int) -> Pair:
        """Input norm."""
        return self._times.pass_over(2 * rows * self.workload.batch * self.workload.hidden)

    def gather_rows(self, rows: int) -> Pair:
        """What attention is given, of all tensor-parallel ranks; backward, gradients added and scattered."""
        return self._times.gather(rows * self.workload.batch * self.workload.hidden, self.workload.tensor)

    def regather_rows(self, rows: int) -> Pair:
        """The same once more, in the backward pass."""
        return Pair(0.0, self.gather_rows(rows).forward)

    def from_norm(self, rows: int, *, chunked: bool) -> Pair:
        """What is one stage from the input norm to queries, keys and values."""
        found = self.qkv(rows, chunked=chunked)
        if self._gathers_rows:
            return found
        return found + self.input_norm(rows) + self.gather_rows(rows)

    def qkv(self, rows: int, *, chunked: bool) -> Pair:
        """Queries, keys and values of this rank's heads."""
        work = self.workload
        tokens = rows * work.batch
        gathered = tokens * work.tensor
        width = sum(n for _, n in work.projections) // work.tensor
        total = self._times.pass_over(2 * gathered * width)
        total += self._times.all_products(linear_products.qkv(work, rows), chunked=chunked)
        if chunked:
            # Queries, keys and values are copied into the buffers of the whole sequence.
            total += self._times.pass_over(2 * gathered * width)
        if work.context > 1 and not work.ring:
            total += self._times.gather(tokens * work.key_value_width / work.tensor, work.context, wide=True)
        return total

    def attend(self, rows: int) -> Pair:
        """Attention to the keys of one context-parallel rank: every row to half of them, or half to all."""
        work = self.workload
        queries = rows * work.batch * work.heads
        keys = work.sequence_length / work.context
        gflops = 2e-9 * queries * keys / 2 * (work.head_size + work.value_size)
        return self._times.attend(gflops, queries * work.value_size) + self._key_sums(keys)

    def ring(self) -> Pair:
        """Keys and values of one rank to the next; backward, their gradients."""
        work = self.workload
        rows = work.sequence_length / work.context * work.batch
        figure = self._times.ring_figure()
        time = figure.time_us(rows * work.key_value_width / work.tensor * work.element_bytes)
        return Pair(time, time)

    def rering(self) -> Pair:
        """Keys and values of one rank once more, in the backward pass."""
        return Pair(0.0, self.ring().forward)

    def attention(self, rows: Rows, *, chunked: bool) -> Pair:
        """Core attention and output projection, of this rank's heads."""
        work = self.workload
        total = ZERO if work.ring else self._core(rows, chunked=chunked)
        return total + self._times.all_products(linear_products.attention(work, rows.hidden), chunked=chunked)

    def scatter_rows(self, rows: int) -> Pair:
        """The projection added over tensor-parallel ranks, and scattered; backward, gradients to all."""
        work = self.workload
        found = self._times.gather(rows * work.batch * work.hidden, work.tensor)
        return Pair(found.backward, found.forward)

    def add_norm(self, rows: int) -> Pair:
        """Residual and norm."""
        return self._times.pass_over(5 * rows * self.workload.batch * self.workload.hidden)

    def until_norm(self, rows: Rows, *, chunked: bool) -> Pair:
        """All of attention that is one stage."""
        found = self.attention(rows, chunked=chunked)
        if self._scatters_rows:
            return found
        return found + self.scatter_rows(rows.hidden) + self.add_norm(rows.hidden)

    def _core(self, rows: Rows, *, chunked: bool) -> Pair:
        """Core attention to all keys."""
        work = self.workload
        pairs = rows.pairs * work.batch * work.heads / work.tensor
        merged = rows.merged * work.batch * work.heads * work.value_size / work.tensor if chunked else 0
        total = self._times.attend(2e-9 * pairs * (work.head_size + work.value_size), merged)
        return total + (self._key_sums(rows.keys) if chunked else ZERO)

    def _key_sums(self, keys: float) -> Pair:
        """The gradients of the keys and values that a chunk attended to are added to sums in fp32."""
        seen = keys * self.workload.batch * self.workload.key_value_width / self.workload.tensor
        return Pair(0.0, self._times.memory_us(seen * (8 + self.workload.element_bytes)))

    def choose(self, rows: int) -> Pair:
        """The router; how it balances is not counted."""
        work = self.workload
        tokens = rows * work.batch
        # Router scores are fp32 in any dtype.
        scores = self._times.pass_over(4 * tokens * work.experts * 4 / work.element_bytes)
        return scores + self._times.products(tokens, work.hidden, work.experts, 1, chunked=False)

    def route(self, rows: int, *, load: float) -> Pair:
        """The router, unless it is a separate stage, and the permutation."""
        moved = self._times.move(self._sent(rows * self.workload.batch) * load)
        return moved if self.workload.chooses else self.choose(rows) + moved

    def counts(self) -> Pair:
        work = self.workload
        ranks = work.expert * work.expert_tensor
        if ranks == 1:
            return ZERO
        return Pair(self._times.counts_figure().time_us(COUNT_BYTES * work.experts * (ranks - 1)), 0.0)

    def exchange(self, rows: int, *, stock: bool = False) -> Pair:
        """A dispatch or a combine; the forward and the backward pass send the same number of bytes."""
        work = self.workload
        if work.expert == 1:
            return ZERO
        tokens = rows * work.batch
        if work.dispatcher == "allgather":
            time = self._times.gather(tokens * work.hidden, work.expert * work.expert_tensor).forward
            return Pair(time, time)
        sent = self._sent(tokens) * self.load(padded=stock and work.padded) * self._kept
        sent *= self._row_bytes(self._probabilities)
        # Links within a node and between nodes transfer at the same time.
        time = max(figure.time_us(sent * share) for figure, share in self._times.links(stock=stock))
        return Pair(time, time)

    def hop(self, rows: int) -> Pair:
        """A hop within nodes, and the copies, sums or order there; the same bytes in both directions."""
        assert self._times.nodes is not None
        near = self._times.nodes.ranks_per_node
        copies = self._arriving(rows * self.workload.batch) * self.load() * self._kept
        probabilities = 1 if self.workload.exchange.sends_every_copy else self.workload.local_experts
        sent = copies * (near - 1) / near * self._row_bytes(probabilities)
        time = self._times.node_figure().time_us(sent) + self._times.move(copies).forward
        return Pair(time, time)

    def respread(self, rows: int) -> Pair:
        """The first of these hops once more, in the backward pass."""
        return Pair(0.0, self.hop(rows).forward)

    def gather(self, rows: int) -> Pair:
        """Rows and probabilities to all ranks that share an expert; backward, their gradients added."""
        probabilities = 1 if self.workload.exchange.sends_every_copy else self.workload.local_experts
        return self._over_shares(rows, probabilities)

    def scatter(self, rows: int) -> Pair:
        """Expert outputs added over the ranks that share an expert; backward, gradients to all of them."""
        found = self._over_shares(rows, 0)
        return Pair(found.backward, found.forward)

    def regather(self, rows: int) -> Pair:
        """A gather once more, in the backward pass."""
        return Pair(0.0, self.gather(rows).forward)

    def _over_shares(self, rows: int, probabilities: int) -> Pair:
        work = self.workload
        arriving = self._arriving(rows * work.batch) * self.load() * self._kept
        elements = arriving * self._row_bytes(probabilities) / work.element_bytes
        return self._times.gather(elements, work.expert_tensor)

    def expert(self, rows: int, *, load: float, chunked: bool) -> Pair:
        """The local experts: what :meth:`rebuild` repeats, and the last product and the rows' way back."""
        work = self.workload
        total = self._until_activation(rows, load=load, chunked=chunked)
        _, down = linear_products.expert(work, self._received(rows, load))
        total += self._times.products(*down, chunked=chunked)
        return total + self._arranged(rows, load=load)

    def rebuild(self, rows: int, *, load: float) -> Pair:
        """First product and activation of the experts once more, in the backward pass."""
        return Pair(0.0, self._until_activation(rows, load=load, chunked=False).forward)

    def repermute(self, rows: int, *, load: float) -> Pair:
        """Permutation of the tokens once more, in the backward pass."""
        return Pair(0.0, self._times.move(self._sent(rows * self.workload.batch) * load).forward)

    def redispatch(self, rows: int) -> Pair:
        """A dispatch once more, in the backward pass."""
        return Pair(0.0, self.exchange(rows).forward)

    def resort(self, rows: int, *, load: float) -> Pair:
        """Sorting of what arrives once more, in the backward pass."""
        return Pair(0.0, self._arranged(rows, load=load).forward)

    def copy(self, rows: int, *, inner: bool, back: bool) -> Pair:
        """A copy of what arrived, or of all that the experts keep, to host memory or back."""
        local = not self._times.cluster.host.issue.forward_us
        size = expert_bytes(self.workload, rows, local=local, inner=inner)
        if not inner and self.workload.dispatcher == "alltoall":
            # Rows are gathered after the copy.
            size /= self.workload.expert_tensor
        time = self._times.copy_us(size)
        return Pair(0.0, time) if back else Pair(time, 0.0)

    def _until_activation(self, rows: int, *, load: float, chunked: bool) -> Pair:
        work = self.workload
        received = self._received(rows, load)
        up, _ = linear_products.expert(work, received)
        total = self._times.products(*up, chunked=chunked)
        passed = received * (up.n + work.ffn / work.expert_tensor)
        return total + self._times.pass_over(passed) + self._arranged(rows, load=load)

    def _arranged(self, rows: int, *, load: float) -> Pair:
        """Rows sorted by expert, or copied for the experts.

        Or the way back, where copies are added.
        """
        work = self.workload
        if work.dispatcher != "alltoall":
            return ZERO
        if work.local_experts > 1 or not work.exchange.sends_every_copy:
            return self._times.move(self._received(rows, load))
        return ZERO

    def _received(self, rows: int, load: float) -> float:
        """Rows that the local experts compute."""
        return self._copies(rows * self.workload.batch) * load * self.workload.expert_tensor * self._kept

    def expert_products(self, rows: int) -> list[Product]:
        """The products of the local experts."""
        return linear_products.expert(self.workload, self._received(rows, self.load()))

    def condense(self, rows: int, *, load: float) -> Pair:
        """Similarity of the rows that go to one expert, each with each, and a copy of those that are sent."""
        sent = self._sent(rows * self.workload.batch) * load
        experts, of_expert = self.workload.experts, sent / self.workload.experts
        similar = self._times.products(of_expert, self.workload.hidden, of_expert, experts, chunked=False)
        return Pair(similar.forward, 0.0) + self._times.move(sent)

    def expand(self, rows: int, *, load: float) -> Pair:
        """Rows for all tokens from those that were sent, weighted."""
        sent = self._sent(rows * self.workload.batch) * load
        return self._times.move(sent) + self._times.pass_over(sent * self.workload.hidden)

    def merge(self, rows: int, *, load: float) -> Pair:
        tokens = rows * self.workload.batch
        return self._times.move(self._sent(tokens) * load) + self._times.pass_over(
            3 * tokens * self.workload.hidden
        )

    def shared(self, rows: int, *, chunked: bool) -> Pair:
        work = self.workload
        assert work.shared_ffn is not None
        return self._gated(rows, work.shared_ffn, chunked=chunked)

    def _gated(self, rows: int, ffn: int, *, chunked: bool) -> Pair:
        """Two products with an activation between them, over tensor-parallel ranks."""
        work = self.workload
        gathered = rows * work.batch * work.tensor
        inner = ffn / work.tensor
        up = (2 if work.gated else 1) * inner
        total = self._times.all_products(linear_products.gated(work, rows, ffn), chunked=chunked)
        both = self._times.gather(rows * work.batch * work.hidden, work.tensor)
        return total + self._times.pass_over(gathered * (up + inner)) + both + both

    def mlp(self, rows: int, *, chunked: bool) -> Pair:
        work = self.workload
        assert work.dense_ffn is not None
        return self._gated(rows, work.dense_ffn, chunked=chunked) + self._times.pass_over(
            2 * rows * work.batch * work.hidden
        )

    def losses(self) -> Pair:
        tokens = self.workload.rows * self.workload.batch
        return self._times.pass_over(4 * tokens * self.workload.experts * 4 / self.workload.element_bytes)

    def _copies(self, tokens: float) -> float:
        """Pairs of one of so many tokens and an expert, if experts are balanced."""
        return tokens * self.workload.topk

    def _sent(self, tokens: float) -> float:
        """Rows that their rank sends for this number of tokens, likewise."""
        if self._times.nodes is None or self.workload.exchange.sends_every_copy:
            return self._arriving(tokens)
        return tokens * self.workload.rows_to(self._times.nodes.num_nodes)

    def _arriving(self, tokens: float) -> float:
        """Rows that arrive at the ranks of the experts, likewise."""
        return tokens * self.workload.rows_per_token

    @property
    def _kept(self) -> float:
        """Share of the rows that are sent where similar tokens go once."""
        return 1 - self.workload.condensed

    @property
    def _probabilities(self) -> int:
        """Probabilities that leave a rank with a row: one for each expert that it may be for."""
        if self.workload.exchange.sends_every_copy:
            return 1
        ranks = 1 if self._times.nodes is None else self._times.nodes.ranks_per_node
        return ranks * self.workload.local_experts

    def _row_bytes(self, probabilities: int) -> int:
        return self.workload.hidden * self.workload.element_bytes + PROBABILITY_BYTES * probabilities

    def load(self, *, padded: bool = False) -> float:
        """Rows of the rank with the most, divided by the mean; padding fills every expert's capacity."""
        capacity = self.workload.capacity
        if capacity is None:
            return self.workload.imbalance
        return capacity if padded else min(capacity, self.workload.imbalance)
