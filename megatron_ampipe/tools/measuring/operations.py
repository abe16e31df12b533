"""What ``ampipe profile`` times on every rank, and how: computation, collectives, and a real block.

**Computation**: matrix products, core attention, passes over memory, permutation, in the sizes of a block's
stages, whole and cut into up to 16 chunks. All ranks measure at the same time, as they compute in training.

**Collectives**, by the functions that training calls, and how they and computation slow each other. Sizes are
what one rank sends to the others of its group. Between nodes, AMPipe's all-to-all is between the ranks of one
place in all nodes, as in the first of two hops; the other collectives there are between all ranks, and the
size of an all-to-all is then what leaves the node.

**A real block** (:func:`block_times`), stage by stage and as a whole, and Megatron's own: what they take
beyond their operations. It is built, and its stages run alone, as in ``ampipe bench``.

All operations are timed once in each round, so that a disturbance of some seconds hits a few rounds of all of
them, which the medians ignore.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ampipe.attention.kernels import KERNELS
from megatron_ampipe.runtime.collectives import exchange_rows
from megatron_ampipe.runtime.executors import CudaExecutor, SequentialExecutor, ThreadExecutor
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.saved_tensors import HostCopies
from megatron_ampipe.schedule import Direction, Span
from megatron_ampipe.schedule.stage_kind import COMM, COMPUTE
from megatron_ampipe.tools.measuring.bench_job import Variant
from megatron_ampipe.tools.measuring.blocks import DTYPES, BlockFactory
from megatron_ampipe.tools.measuring.cluster_fit import Sample
from megatron_ampipe.tools.measuring.grid import Case
from megatron_ampipe.tools.measuring.meters import meet, run_lanes, stage_times
from megatron_ampipe.tools.measuring.ranks import Rank
from megatron_ampipe.tools.measuring.timed_passes import Clock, Passes

WARMUP = 2
"""Rounds that do not count."""
CUTS = (1, 2, 4, 8, 16)
"""Into how many parts the rows of a block are cut, to get smaller sizes."""
OVERLAP_US = 300e3
"""For about how long computation and communication run concurrently."""
DEGREES = (2, 4, 8)
"""Of the real block."""
_SIGN_S = 1.0
_MINIMUM_ROUNDS, _MAXIMUM_ROUNDS = 3, 100


def measure(rank: Rank[Any], case: Case, *, repeats: int, ranks_per_node: int) -> dict[str, Any]:
    """Measure around one block, on a rank that has started Megatron; a message ``progress`` after each step.

    Returns:
        ``samples``, ``slowdowns``, ``block`` and ``issue_of`` (:func:`block_times`), ``kernel``,
        ``fused_gradients`` and ``device_memory_gib`` (None on a CPU).
    """
    job = rank.job
    factory = BlockFactory(
        case, rank=rank.number, num_ranks=job.num_ranks, on_cuda=job.on_cuda, seed=job.seed
    )
    operations = Operations(rank, case, repeats=repeats, kernel=factory.kernel)
    links = link_groups(ranks_per_node)
    meet(on_cuda=job.on_cuda)
    samples = timed(rank, list(operations.computation()), repeats=repeats)
    meet(on_cuda=job.on_cuda)
    rank.progress()
    samples += timed(rank, [each for link in links for each in operations.traffic(link)], repeats=repeats)
    rank.progress()
    # On the links where the longest transfers are.
    slowdowns = operations.slowdowns(links[-1].exchange)
    rank.progress()
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory if job.on_cuda else 0
    return {
        "samples": samples,
        "slowdowns": slowdowns,
        **block_times(rank, case, factory, repeats=repeats),
        "kernel": factory.kernel,
        "fused_gradients": factory.fused_gradients,
        "device_memory_gib": round(memory / 2**30, 1) or None,
    }


@dataclass(frozen=True, slots=True)
class Probe:
    """An operation of one size to be timed; ``family`` and ``columns`` as in :class:`.Sample`.

    Attributes:
        count: How many such operations it is; the time is divided by that.
        together: It is a collective: ranks meet before each call, so that no wait for a late one counts.
    """

    family: str
    columns: Mapping[str, float]
    operation: Callable[[], object]
    count: int = 1
    together: bool = False


def timed(rank: Rank[Any], probes: Sequence[Probe], *, repeats: int) -> list[Sample]:
    """The typical time of each operation over so many calls, all of them timed in turns.

    Of a computation that is the median. Of a collective it is the lower quartile: on a host, a thread of
    the backend that has to wait for the scheduler's next tick adds 4 ms to whatever the transfer takes,
    sometimes to more than half of the calls (docs/log).
    """
    times_us: list[list[float]] = [[] for _ in probes]
    for number in range(WARMUP + repeats):
        for times, probe in zip(times_us, probes, strict=True):
            if probe.together:
                meet(on_cuda=rank.job.on_cuda)
            clock = Clock(on_cuda=rank.job.on_cuda)
            probe.operation()
            took_s = clock.passed_s()
            times += [took_s * 1e6 / probe.count] * (number >= WARMUP)
            if took_s > _SIGN_S:
                rank.say("alive")
        # Rarely: messages must not slow short calls down.
        rank.say("alive")
    return [
        Sample(
            probe.family,
            probe.columns,
            sorted(times)[len(times) // 4] if probe.together else statistics.median(times),
        )
        for times, probe in zip(times_us, probes, strict=True)
    ]


class LinkGroups(NamedTuple):
    """The ranks over which one class of links is measured.

    Attributes:
        name: ``intra`` or ``inter``, as in a cluster file.
        exchange: Of AMPipe's all-to-all.
        all: Of the other collectives.
        near: How many of those are reached over other links, this rank included.
    """

    name: str
    exchange: dist.ProcessGroup
    all: dist.ProcessGroup
    near: int = 1


def link_groups(ranks_per_node: int) -> list[LinkGroups]:
    """What to measure on this rank: links within its node, if it has several ranks, then those between."""
    world = list(range(dist.get_world_size()))
    nodes = [world[first : first + ranks_per_node] for first in world[::ranks_per_node]]
    links = []
    if ranks_per_node > 1:
        node = dist.new_subgroups_by_enumeration(nodes)[0]
        links.append(LinkGroups("intra", node, node))
    if len(nodes) > 1:
        between = dist.new_subgroups_by_enumeration([world[place::ranks_per_node] for place in nodes[0]])[0]
        everyone = dist.group.WORLD
        assert everyone is not None
        links.append(LinkGroups("inter", between, everyone, near=ranks_per_node))
    return links


class Operations:
    """The operations of a block on this rank, to be timed."""

    def __init__(self, rank: Rank[Any], case: Case, *, repeats: int, kernel: str) -> None:
        self._rank, self._repeats, self._on_cuda = rank, repeats, rank.job.on_cuda
        self._case, self._kernel = case, KERNELS[kernel]
        self._device, self._dtype = rank.job.device, DTYPES[case.dtype]
        self._executor = CudaExecutor() if self._on_cuda else ThreadExecutor()
        self._head_size = case.head_size or case.hidden // case.heads
        self._groups = case.query_groups or case.heads

    def computation(self) -> Iterator[Probe]:
        case, tokens = self._case, self._case.sequence_length * self._case.batch
        shapes = {
            (case.hidden, (case.heads + 2 * self._groups) * self._head_size),
            (case.heads * self._head_size, case.hidden),
            (case.hidden, case.ffn * (2 if case.activation == "swiglu" else 1)),
            (case.ffn, case.hidden),
        }
        for rows in sorted({tokens // cut for cut in CUTS if tokens >= cut}):
            for k, n in sorted(shapes):
                yield from self._product(rows, k, n)
            yield from self._passes_over_memory(rows)
        for cut in CUTS:
            rows = case.sequence_length // cut
            # At the front, in the middle and at the end of the sequence.
            for start in sorted({0, (cut // 2) * rows, (cut - 1) * rows}):
                if rows:
                    yield from self._attention(start, start + rows)

    def _product(self, rows: int, k: int, n: int) -> Iterator[Probe]:
        """Forward, and the two of the backward pass."""
        inputs, weight, gradient = self._random(rows, k), self._random(n, k), self._random(rows, n)
        gflops, weights = 2e-9 * rows * k * n, 1e-6 * k * n
        columns = {"alpha_us": 1.0, "beta_us_per_gflop": gflops, "weights_us_per_million": weights}
        yield Probe("gemm", columns, lambda: inputs @ weight.t())
        yield Probe("gemm", columns, lambda: (gradient @ weight, gradient.t() @ inputs), count=2)

    def _attention(self, start: int, end: int) -> Iterator[Probe]:
        """Rows ``[start, end)`` with all keys up to them, forward and backward."""
        batch, heads, size = self._case.batch, self._case.heads, self._head_size
        query = self._random(end - start, batch, heads, size).requires_grad_()
        key, value = (self._random(end, batch, self._groups, size).requires_grad_() for _ in range(2))
        spans = (Span(0, end - start, start),)

        def attend() -> Tensor:
            return self._kernel(query, key, value, spans=spans, scale=size**-0.5)

        def differentiate() -> object:
            return torch.autograd.grad(output, (query, key, value), gradient, retain_graph=True)

        output = attend()
        gradient = torch.randn_like(output)
        pairs = end * (end + 1) // 2 - start * (start + 1) // 2
        gflops = 4e-9 * pairs * batch * heads * size
        columns = {"alpha_us": 1.0, "merge_us_per_mb": 1e-6 * output.nbytes if start else 0.0}
        yield Probe("attention.forward", {**columns, "beta_us_per_gflop": gflops}, attend)
        # Five products instead of two.
        yield Probe("attention.backward", {**columns, "beta_us_per_gflop": 2.5 * gflops}, differentiate)

    def _passes_over_memory(self, rows: int) -> Iterator[Probe]:
        """A residual is added; rows are put into another order and back; what arrives for the experts is
        copied to host memory and back, as the lane ``copy`` does."""
        left, right = (self._random(rows, self._case.hidden) for _ in range(2))
        tokens = self._random(rows * self._case.topk, self._case.hidden)
        order = torch.randperm(len(tokens)).to(tokens.device)

        def permute() -> None:
            tokens.index_select(0, order)
            torch.zeros_like(tokens).index_add_(0, order, tokens)

        def copy() -> None:
            copies = HostCopies([tokens])
            copies.store(lambda: None).wait()
            copies.load().wait()

        yield _of_bytes("memory", 3 * left.nbytes, lambda: left + right)
        yield _of_bytes("permute", 2 * tokens.nbytes, permute, count=2)
        yield _of_bytes("copy", tokens.nbytes, copy, count=2)

    def traffic(self, link: LinkGroups) -> Iterator[Probe]:
        for rows in self._rows(link.exchange):
            yield self._exchange(f"{link.name}.all_to_all", link.exchange, rows)
        sizes = self._rows(link.all)
        if link.near > 1:
            for rows in sizes:
                yield self._exchange(f"{link.name}.direct_all_to_all", link.all, rows, near=link.near)
        ranks = link.all.size()
        for rows in (1, *(rows // ranks for rows in sizes)):
            part = self._random(rows, self._case.hidden)
            whole, sent = part.repeat(ranks, 1), part.nbytes * (ranks - 1)

            def gather(part: Tensor = part, whole: Tensor = whole) -> None:
                dist.all_gather_into_tensor(torch.empty_like(whole), part, group=link.all)

            def reduce(part: Tensor = part, whole: Tensor = whole) -> None:
                dist.reduce_scatter_tensor(torch.empty_like(part), whole, group=link.all)

            yield _of_bytes(f"{link.name}.all_gather", sent, gather, together=True)
            yield _of_bytes(f"{link.name}.reduce_scatter", sent, reduce, together=True)

    def _exchange(self, family: str, group: dist.ProcessGroup, rows: int, *, near: int = 1) -> Probe:
        """An all-to-all of tokens and probabilities; its size is what goes to others than ``near`` ranks."""
        ranks = group.size()
        tensors = [self._random(rows, self._case.hidden), torch.zeros(rows, device=self._device)]
        splits = [rows // ranks] * ranks

        def exchange() -> None:
            exchange_rows(tensors, send=splits, receive=splits, group=group).wait()

        sent = sum(tensor.nbytes for tensor in tensors) * (ranks - near) / ranks
        return _of_bytes(family, sent, exchange, together=True)

    def slowdowns(self, group: dist.ProcessGroup) -> dict[str, float]:
        """How much longer computation and an all-to-all take while the other runs.

        Returns:
            As in a cluster file: factors of at least 1 on computation and on time on the wire, and what every
            all-to-all takes longer, whatever its size.
        """
        sizes = self._rows(group)
        (small_mb, small_us, small_concurrent_us, _), (large_mb, large_us, large_concurrent_us, compute) = (
            self._with_products(group, rows, left_rows=sizes[-2]) for rows in (sizes[0], sizes[-2])
        )
        alone = max(0.0, (large_us - small_us) / (large_mb - small_mb))
        concurrent = max(0.0, (large_concurrent_us - small_concurrent_us) / (large_mb - small_mb))
        slowdown = max(1.0, concurrent / alone) if alone else 1.0
        return {
            "compute_slowdown": compute,
            "communication_slowdown": slowdown,
            "latency_us": max(0.0, small_concurrent_us - small_us - small_mb * alone * (slowdown - 1.0)),
        }

    def _with_products(
        self, group: dist.ProcessGroup, rows: int, *, left_rows: int
    ) -> tuple[float, float, float, float]:
        """An all-to-all of ``rows`` rows concurrent with matrix products.

        Returns:
            Its size in MB, its microseconds alone and with the products, and the products' slowdown.
        """
        ranks, hidden = group.size(), self._case.hidden
        tokens, left = self._random(rows, hidden), self._random(left_rows, hidden)
        weight, splits = self._random(hidden, self._case.ffn), [rows // ranks] * ranks

        def exchange() -> None:
            exchange_rows([tokens], send=splits, receive=splits, group=group).wait()

        def compute() -> Tensor:
            return left @ weight

        probes = [Probe("", {}, exchange, together=True), Probe("", {}, compute)]
        exchange_us, compute_us = (sample.us for sample in timed(self._rank, probes, repeats=self._repeats))
        # Every rank must exchange equally often, whatever its clock says.
        slowest = torch.tensor([exchange_us], dtype=torch.float64, device=self._device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        rounds = max(_MINIMUM_ROUNDS, min(_MAXIMUM_ROUNDS, int(OVERLAP_US / float(slowest))))
        # As many computations as take about as long as the exchanges.
        products = max(1, round(rounds * exchange_us / compute_us))
        spans = run_lanes(self._executor, exchange, compute, exchanges=rounds, products=products)
        exchanged = [span for span in spans if span.lane == COMM]
        end_us = max(span.end_us for span in exchanged)
        communicating_us = (end_us - min(span.begin_us for span in exchanged)) / rounds
        computing_us = statistics.fmean(
            span.end_us - span.begin_us for span in spans if span.lane == COMPUTE and span.begin_us <= end_us
        )
        megabytes = 1e-6 * tokens.nbytes * (ranks - 1) / ranks
        return megabytes, exchange_us, communicating_us, max(1.0, computing_us / compute_us)

    def _rows(self, group: dist.ProcessGroup) -> list[int]:
        """Rows that are exchanged for parts of the block's tokens; each rank gets equally many."""
        ranks, tokens = group.size(), self._case.sequence_length * self._case.batch * self._case.topk
        return sorted({max(1, tokens // cut // ranks) * ranks for cut in CUTS})

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._device, dtype=self._dtype)


def _of_bytes(
    family: str, size: float, operation: Callable[[], object], *, count: int = 1, together: bool = False
) -> Probe:
    columns = {"alpha_us": 1.0, "beta_us_per_mb": 1e-6 * size}
    return Probe(family, columns, operation, count=count, together=together)


def block_times(rank: Rank[Any], case: Case, factory: BlockFactory, *, repeats: int) -> dict[str, Any]:
    """Microseconds of a block's parts on this rank.

    Returns:
        ``block``: ``stages``: by degree, direction and stage, the median of the stage alone; ``around``: by
        degree and direction, of what a pass spends outside its stages; ``stock``: by direction, of Megatron's
        own layer; ``issue``: of the host to issue a stage, in the mean. ``issue_of``: the same by direction
        and kind, while the device is busy (empty where the host computes, and ``issue`` is 0).
    """
    rounds = WARMUP + repeats
    passes = Passes(rank, case)
    alone, in_order, layers = {}, {}, {}
    for degree in DEGREES:
        variant = Variant.of("ampipe", degree)
        alone[degree] = factory.build_timed(variant, num_passes=rounds)
        in_order[degree] = Recorder(num_iterations=rounds)
        layers[degree] = factory.build(variant, recorder=in_order[degree], executor=SequentialExecutor())
    stock: list[dict[Direction, float]] = []
    whole: dict[int, list[dict[Direction, float]]] = {degree: [] for degree in DEGREES}
    for number in range(rounds):
        stock.append(passes.run(factory.stock).by_direction_us)
        for degree, timer in alone.items():
            timer.recorder.start_iteration(number)
            passes.run(timer.layers)
            in_order[degree].start_iteration(number)
            whole[degree].append(passes.run(layers[degree]).by_direction_us)
    stages = {
        str(degree): {
            way: {stage: statistics.median(us[WARMUP:]) for stage, us in of_stages.items()}
            for way, of_stages in stage_times(timer.recorder).items()
        }
        for degree, timer in alone.items()
    }
    issue_of = alone[DEGREES[-1]].timer.issued_us()
    block = {
        "stock": {way: statistics.median(times[way] for times in stock[WARMUP:]) for way in Direction},
        "stages": stages,
        "around": {str(degree): _outside(whole[degree], in_order[degree]) for degree in DEGREES},
        "issue": statistics.fmean(issue_of["forward"].values()) if "forward" in issue_of else 0.0,
    }
    return {"block": block, "issue_of": issue_of}


def _outside(whole: Sequence[dict[Direction, float]], recorder: Recorder) -> dict[str, float]:
    """The median of what passes took beyond the sum of their stages."""
    times, found = stage_times(recorder), {}
    for way in Direction:
        in_stages = map(sum, zip(*times[way.value].values(), strict=True))
        beyond = [took[way] - inside for took, inside in zip(whole, in_stages, strict=True)]
        found[way.value] = max(0.0, statistics.median(beyond[WARMUP:]))
    return found
