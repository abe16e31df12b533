"""How three papers choose a degree, and one of them what is kept, to compare with the simulator.

:func:`ampipe_time` is the closed form of AMPipe's appendix C, :class:`FsmoeLayer` the four cases of FSMoE
section 4.2, :class:`MPipeMoE` the range table of MPipeMoE's algorithm 1, :func:`mpipemoe_cost` its
equation 10. Each takes times or sizes as its
paper does. ``docs/planner.md`` says where they differ from the simulator. The planner uses none of
this to choose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from megatron_ampipe.plan.cluster import Cluster
from megatron_ampipe.plan.workload import Workload


def ampipe_time(attention: float, communication: float, experts: float, *, degree: int) -> float:
    """The time of a block by AMPipe's appendix C.

    ``A/p + max(A/p, C/p) (p - 1) + max(M/p, C/p) p + C/p``. Two things to know about it. At ``p = 1`` it
    gives ``A + max(M, C) + C``, not the ``A + 2 C + M`` that the paper itself states for a block without
    AMPipe: the last term but one overlaps the experts with a dispatch that they have to wait for. And it
    never grows with the degree, because cutting costs nothing in it: the larger degree is always the better.

    Args:
        attention: ``A``, of the whole sequence.
        communication: ``C``, of one of the two all-to-alls.
        experts: ``M``.
        degree: ``p``.
    """
    a, c, m = attention / degree, communication / degree, experts / degree
    return a + max(a, c) * (degree - 1) + max(m, c) * degree + c


def stock_time(attention: float, communication: float, experts: float, other: float = 0.0) -> float:
    """The time of a block without AMPipe, appendix C: ``A + 2 C + M + O``."""
    return attention + 2 * communication + experts + other


def ampipe_degree(attention: float, communication: float, experts: float, *, degrees: Iterable[int]) -> int:
    """The degree that the closed form prefers; of equals the smallest."""
    return min(
        sorted(degrees),
        key=lambda degree: ampipe_time(attention, communication, experts, degree=degree),
    )


def fsmoe_case(
    exchange: float, gather: float, scatter: float, experts: float, *, degree: int, reduction: float = 0.0
) -> int:
    """The case, 1 to 4, by the questions Q1 to Q7.

    Args:
        exchange: An all-to-all of a chunk between nodes; dispatch and combine are equal.
        gather: What brings a chunk from there to the ranks of its experts.
        scatter: What brings it back.
        experts: The experts of a chunk.
        degree: Number of chunks.
        reduction: ``t_gar``, the part of the gradient all-reduce that is placed in this layer; 0 forward.
    """
    inside = gather + scatter
    # What the experts have beyond the exchanges that can hide them.
    beyond = degree * experts - 2 * (degree - 1) * exchange
    if exchange > gather:
        if beyond > 0:
            return 1 if reduction > beyond + inside else 2
        return 1 if reduction > inside else 3
    if degree * experts > (degree - 1) * inside:
        return 1 if reduction > beyond + inside else 2
    return 1 if reduction > degree * inside - 2 * (degree - 1) * exchange else 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FsmoeLayer:
    """What FSMoE's algorithm 1 takes: for each operation the start-up time and the time of the whole.

    Each is ``(alpha, n * beta)``, so that a chunk of ``r`` takes ``alpha + n * beta / r`` (equation 1).

    Attributes:
        exchange: All-to-all between nodes; dispatch and combine are equal.
        gather: All-gather of an expert's tokens inside a node.
        scatter: Reduce-scatter inside a node.
        experts: All matrix products of the experts.
        reduction: ``t_gar``, the part of the gradient all-reduce that is placed in this layer; 0 forward.
    """

    exchange: tuple[float, float]
    gather: tuple[float, float]
    scatter: tuple[float, float]
    experts: tuple[float, float]
    reduction: float = 0.0

    def case(self, degree: int) -> int:
        """Which of the four cases of section 4.2 a degree falls into, by the questions Q1 to Q7."""
        return fsmoe_case(*self._parts(degree), degree=degree, reduction=self.reduction)

    def time(self, degree: int) -> float:
        """The time of the MoE layer in the case that the degree falls into."""
        exchange, gather, scatter, experts = self._parts(degree)
        return {
            1: 2 * degree * exchange + self.reduction,
            2: 2 * exchange + gather + scatter + degree * experts,
            3: 2 * degree * exchange + gather + scatter,
            4: 2 * exchange + degree * (gather + scatter),
        }[self.case(degree)]

    def degree(self, *, largest: int) -> int:
        """The best degree up to a largest one; of equals the smallest.

        The paper solves the four cases over real numbers by SLSQP. Degrees are whole and few, so all are
        tried; a test compares the result with SLSQP.
        """
        return min(range(1, largest + 1), key=self.time)

    def backward(self, *, reduction: float) -> FsmoeLayer:
        """The backward pass, section 4.4: twice the experts' work, and a part of the gradient all-reduce."""
        alpha, work = self.experts
        return replace(self, experts=(2 * alpha, 2 * work), reduction=reduction)

    @classmethod
    def of(cls, workload: Workload, cluster: Cluster) -> FsmoeLayer:
        """The layer of a workload, in microseconds, from a cluster file's figures.

        Sizes are those of the paper: of an exchange the whole buffer, a rank's own rows included; inside a
        node what is gathered.

        Raises:
            BadInput: the cluster has no figure for one of the operations.
        """
        rows = workload.rows * workload.batch * workload.topk * (workload.capacity or 1.0)
        size = rows * workload.hidden * workload.element_bytes
        exchange = cluster.collective("all_to_all", across_nodes=True)
        gather = cluster.collective("all_gather", across_nodes=False)
        scatter = cluster.collective("reduce_scatter", across_nodes=False)
        gemm = cluster.gemm(workload.dtype)
        products = 3 if workload.gated else 2
        flops = 2 * rows * workload.hidden * workload.ffn * products
        inside = size * workload.expert_tensor
        return cls(
            exchange=(exchange.alpha_us, 1e-6 * size * exchange.beta_us_per_mb),
            gather=(gather.alpha_us, 1e-6 * inside * gather.beta_us_per_mb),
            scatter=(scatter.alpha_us, 1e-6 * inside * scatter.beta_us_per_mb),
            experts=(products * gemm.alpha_us, 1e-9 * flops * gemm.beta_us_per_gflop),
        )

    def _parts(self, degree: int) -> tuple[float, float, float, float]:
        exchange, gather, scatter, experts = (
            alpha + work / degree for alpha, work in (self.exchange, self.gather, self.scatter, self.experts)
        )
        return exchange, gather, scatter, experts


class MPipeMoE:
    """MPipeMoE's algorithm 1: degrees by the number of tokens, tried once for each range.

    Supposes that the best degree does not fall when a batch grows. A size between two that had the same
    degree has it too; any other is tried.

    Args:
        search: Finds the best degree of a number of tokens by trying (``searchBestGran``).
    """

    def __init__(self, search: Callable[[int], int]) -> None:
        self._search = search
        self._ranges: dict[int, tuple[int, int]] = {}
        self._known: dict[int, int] = {}

    @property
    def ranges(self) -> dict[int, tuple[int, int]]:
        """By degree, the smallest and the largest number of tokens that has it."""
        return dict(self._ranges)

    def degree(self, tokens: int) -> int:
        """The degree for a number of tokens; tries only what no range holds."""
        if tokens not in self._known:
            found = self._find(tokens)
            if found is None:
                found = self._search(tokens)
                low, high = self._ranges.get(found, (tokens, tokens))
                self._ranges[found] = (min(tokens, low), max(tokens, high))
            self._known[tokens] = found
        return self._known[tokens]

    def _find(self, tokens: int) -> int | None:
        return next((degree for degree, (low, high) in self._ranges.items() if low <= tokens <= high), None)


MPIPEMOE_TABLE_II = {
    "none": ((2, 2, 0), (4, 2, 0)),
    "S1": ((2, 2, 5), (4, 2, 5)),
    "S2": ((2, 2, 4), (4, 3, 4)),
    "S3": ((2, 2, 1), (5, 2, 1)),
    "S4": ((2, 2, 0), (5, 3, 0)),
}
"""MPipeMoE's table II: how many products, transfers and copies a chunk has forward and backward.

A copy is of what arrived (T_DI); one of the inner tensors (T_M) counts as four. ``S4`` is AMPipe's
``redispatch``, and ``none`` its ``keep``; ``rebuild``, which the table lacks, would be (2, 2, 0), (5, 2, 0).
"""


def mpipemoe_cost(
    strategy: str, *, product: float, transfer: float, copy: float, mu: Mapping[str, float], eta: float = 1.0
) -> float:
    """The time of a chunk by MPipeMoE's equation 10: in each direction the stream that takes longest.

    The first line of the equation divides copies by ``mu``, the second by ``eta``; only the second makes
    sense.

    Args:
        strategy: One of :data:`MPIPEMOE_TABLE_II`.
        product: Time of one product, ``v_comp / W_comp``.
        transfer: Of one all-to-all, ``v_comm / W_comm``.
        copy: Of one copy, ``v_mem / W_mem``.
        mu: By ``comp`` and ``all``, the speed of transfers next to products alone, and next to copies too.
        eta: The speed of copies next to products and transfers.
    """
    copies = any(direction[2] for direction in MPIPEMOE_TABLE_II[strategy])
    speed = mu["all" if copies else "comp"]
    return sum(
        max(products * product, transfers * transfer / speed, moves * copy / eta)
        for products, transfers, moves in MPIPEMOE_TABLE_II[strategy]
    )
