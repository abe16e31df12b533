"""The measurements of ``ampipe profile`` on every rank: computation, collectives, and a real block.

**Computation**: matrix products, core attention, passes over memory, permutation, in the sizes of a block's
stages, whole and cut into up to 16 chunks. All ranks measure at the same time, as they compute in training.

**Collectives**, by the functions that training calls, and how much they and computation slow each other. A
size is the number of bytes that a rank sends to the others of its group. Between nodes, AMPipe's all-to-all
connects the ranks with the same local rank, as the first of two hops does; the other collectives connect all
ranks, and the size of an all-to-all counts only the bytes that leave the node.

**A real block**, stage by stage and as a whole, and Megatron's block, as ``ampipe bench`` measures them: they
show the time that is not in the operations.

All operations are timed once in each round: a disturbance of some seconds then changes a few rounds of all
operations, and the medians ignore it.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ampipe.attention.kernels import KERNELS
from megatron_ampipe.runtime.collectives import exchange_rows
from megatron_ampipe.runtime.executors import CudaExecutor, ThreadExecutor
from megatron_ampipe.runtime.host_copies import HostCopies
from megatron_ampipe.schedule import Direction, Span
from megatron_ampipe.schedule.stage_kind import COMM, COMPUTE
from megatron_ampipe.tools.measuring import timed_passes
from megatron_ampipe.tools.measuring.bench_job import STOCK, BenchJob, Variant
from megatron_ampipe.tools.measuring.blocks import DTYPES
from megatron_ampipe.tools.measuring.grid import Case
from megatron_ampipe.tools.measuring.meters import Clock, barrier, run_lanes
from megatron_ampipe.tools.measuring.ranks import Rank
from megatron_ampipe.tools.measuring.reports import (
    BlockTimes,
    OperationsReport,
    PassTimes,
    Sample,
    VariantReport,
)

CUTS = (1, 2, 4, 8, 16)
"""Into how many parts the rows of a block are cut, to get smaller sizes."""
EXCHANGES = 20
"""Number of exchanges that run while products are computed."""
DEGREES = (2, 4, 8)
VARIANTS = (Variant(STOCK), *(Variant.of("ampipe", degree) for degree in DEGREES))
"""The variants of the real block."""


def measure(rank: Rank[BenchJob]) -> OperationsReport:
    """Measure the operations and the block of a job, on a rank that has started Megatron."""
    job = rank.job
    block = timed_passes.measure(rank, job.cases[0], VARIANTS)
    operations = Operations(rank, kernel=block["kernel"])
    links = links_of(job.ranks_per_node or job.num_ranks)
    samples = timed(rank, list(operations.computation()))
    barrier(on_cuda=job.on_cuda)
    samples += timed(rank, [probe for link in links for probe in operations.traffic(*link)])
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory if job.on_cuda else 0
    return {
        "samples": samples,
        # On the links that have the longest transfers.
        "slowdowns": operations.slowdowns(links[-1][1]),
        "block": block_times(block["variants"]),
        "issue_of": block["variants"][-1]["issued_us"] or {},
        "kernel": block["kernel"],
        "fused_gradients": block["fused_gradients"],
        "device_memory_gib": round(memory / 2**30, 1) or None,
    }


def block_times(variants: Sequence[VariantReport]) -> BlockTimes:
    """The times of a block's parts, from the measurements of :data:`VARIANTS`."""

    def passes_us(passes: PassTimes, way: Direction) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        wall_us = 1e6 * np.array(passes["wall_s"])
        backward_us = 1e6 * np.array(passes["backward_s"])
        return backward_us if way is Direction.BACKWARD else wall_us - backward_us

    stock, *pipelined = variants
    alone, stages, apart_s = pipelined[0]["alone"], pipelined[0]["stages"], pipelined[0]["apart_s"]
    assert alone is not None and stages is not None and apart_s is not None, "it is no layer of Megatron"
    around = {}
    for way in Direction:
        inside_us = np.sum([*stages[way].values()], axis=0) + 1e6 * np.array(apart_s[way])
        around[way.value] = float(np.median(passes_us(alone, way) - inside_us))
    return {
        "stock": {way.value: float(np.median(passes_us(stock, way))) for way in Direction},
        "stages": {
            str(degree): _medians(variant["stages"])
            for degree, variant in zip(DEGREES, pipelined, strict=True)
        },
        "around": around,
    }


def _medians(stages: Mapping[str, Mapping[str, Sequence[float]]] | None) -> dict[str, dict[str, float]]:
    """By direction and stage, the median over passes."""
    assert stages is not None, "it is no layer of Megatron"
    return {
        way.value: {stage: statistics.median(passes_us) for stage, passes_us in stages[way].items()}
        for way in Direction
    }


@dataclass(frozen=True, slots=True)
class Probe:
    """An operation of one size to be timed; ``family`` and ``columns`` as in :class:`.Sample`.

    Before each call of a collective (``together``) ranks meet, so that no wait for a late rank counts.
    """

    family: str
    columns: Mapping[str, float]
    operation: Callable[[], object]
    together: bool = False


def timed(rank: Rank[BenchJob], probes: Sequence[Probe]) -> list[Sample]:
    """The typical time of each operation, from calls of all operations in turns.

    It is the median for a computation, and the lower quartile for a collective: on a host, a thread of the
    backend that waits for the scheduler's next tick adds 4 ms to a transfer, sometimes in more than half of
    the calls (docs/log).
    """
    times_us: list[list[float]] = [[] for _ in probes]
    job = rank.job
    for number in range(job.warmup + job.repeats):
        for times, probe in zip(times_us, probes, strict=True):
            if probe.together:
                barrier(on_cuda=job.on_cuda)
            clock = Clock(on_cuda=job.on_cuda)
            probe.operation()
            times += [clock.passed_s() * 1e6] * (number >= job.warmup)
        # Few messages, so that they do not slow short calls down.
        rank.progress()
    return [
        Sample(
            probe.family,
            probe.columns,
            sorted(times)[len(times) // 4] if probe.together else statistics.median(times),
        )
        for times, probe in zip(times_us, probes, strict=True)
    ]


LinkRanks = tuple[str, dist.ProcessGroup, dist.ProcessGroup, int]
"""``intra`` or ``inter``; the ranks of AMPipe's all-to-all, and of all other collectives; how many of these
are reached over other links, this rank included."""


def links_of(ranks_per_node: int) -> list[LinkRanks]:
    """The links to measure on this rank: within its node, if it has several ranks, then between nodes."""
    world = list(range(dist.get_world_size()))
    nodes = [world[first : first + ranks_per_node] for first in world[::ranks_per_node]]
    links: list[LinkRanks] = []
    if ranks_per_node > 1:
        node = _subgroup(nodes)
        links.append(("intra", node, node, 1))
    if len(nodes) > 1:
        between = _subgroup([world[place::ranks_per_node] for place in nodes[0]])
        everyone = dist.group.WORLD
        assert everyone is not None
        links.append(("inter", between, everyone, ranks_per_node))
    return links


def _subgroup(ranks_of_groups: list[list[int]]) -> dist.ProcessGroup:
    """Makes these groups on all ranks; returns the one that has this rank."""
    group, _ = dist.new_subgroups_by_enumeration(ranks_of_groups)
    assert isinstance(group, dist.ProcessGroup)
    return group


class Operations:
    """The operations of a block on this rank, to be timed."""

    def __init__(self, rank: Rank[BenchJob], *, kernel: str) -> None:
        case: Case = rank.job.cases[0]
        self._rank, self._case, self._kernel = rank, case, KERNELS[kernel]
        self._device, self._dtype = rank.job.device, DTYPES[case.dtype]
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
        """The matrix product of the forward pass, and the two of the backward pass."""
        inputs, weight, gradient = self._random(rows, k), self._random(n, k), self._random(rows, n)
        gflops, weights = 2e-9 * rows * k * n, 1e-6 * k * n
        columns = {"alpha_us": 1.0, "beta_us_per_gflop": gflops, "weights_us_per_million": weights}
        twice = {name: 2 * count for name, count in columns.items()}
        yield Probe("gemm", columns, lambda: inputs @ weight.t())
        yield Probe("gemm", twice, lambda: (gradient @ weight, gradient.t() @ inputs))

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
        """Adding a residual; reordering rows; copying received tokens to host memory and back."""
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

    def traffic(
        self, name: str, exchange: dist.ProcessGroup, everyone: dist.ProcessGroup, ranks_per_node: int
    ) -> Iterator[Probe]:
        for rows in self._rows(exchange):
            yield self._exchange(f"{name}.all_to_all", exchange, rows)
        sizes, ranks = self._rows(everyone), everyone.size()
        for rows in sizes if ranks_per_node > 1 else ():
            yield self._exchange(f"{name}.direct_all_to_all", everyone, rows, ranks_per_node=ranks_per_node)
        for rows in (1, *(rows // ranks for rows in sizes)):
            part = self._random(rows, self._case.hidden)
            whole, sent = part.repeat(ranks, 1), part.nbytes * (ranks - 1)

            def gather(part: Tensor = part, whole: Tensor = whole) -> None:
                dist.all_gather_into_tensor(torch.empty_like(whole), part, group=everyone)

            def reduce(part: Tensor = part, whole: Tensor = whole) -> None:
                dist.reduce_scatter_tensor(torch.empty_like(part), whole, group=everyone)

            yield _of_bytes(f"{name}.all_gather", sent, gather, together=True)
            yield _of_bytes(f"{name}.reduce_scatter", sent, reduce, together=True)

    def _exchange(
        self, family: str, group: dist.ProcessGroup, rows: int, *, ranks_per_node: int = 1
    ) -> Probe:
        """An all-to-all of tokens and probabilities; its size is the bytes that leave the node."""
        ranks = group.size()
        tensors = [self._random(rows, self._case.hidden), torch.zeros(rows, device=self._device)]
        splits = [rows // ranks] * ranks

        def exchange() -> None:
            exchange_rows(tensors, send=splits, receive=splits, group=group).wait()

        sent = sum(tensor.nbytes for tensor in tensors) * (ranks - ranks_per_node) / ranks
        return _of_bytes(family, sent, exchange, together=True)

    def slowdowns(self, group: dist.ProcessGroup) -> dict[str, float]:
        """How much computation and an all-to-all slow each other, as in a cluster file."""
        sizes, hidden = self._rows(group), self._case.hidden
        left, weight = self._random(sizes[-2], hidden), self._random(hidden, self._case.ffn)
        product = Probe("", {}, lambda: left @ weight)
        executor = CudaExecutor() if self._rank.job.on_cuda else ThreadExecutor()
        figures = []
        for rows in (sizes[0], sizes[-2]):
            exchange = self._exchange("", group, rows)
            alone = timed(self._rank, [exchange, product])
            exchange_us, product_us = (sample.us for sample in alone)
            # As many products as take about as long as the exchanges.
            products = max(1, round(EXCHANGES * exchange_us / product_us))
            spans = run_lanes(
                executor,
                functools.partial(_done, exchange),
                product.operation,
                exchanges=EXCHANGES,
                products=products,
            )
            exchanged = [span for span in spans if span.lane == COMM]
            begin_us, end_us = exchanged[0].begin_us, exchanged[-1].end_us
            computed = [span for span in spans if span.lane == COMPUTE and span.begin_us <= end_us]
            slowed_us = statistics.fmean(span.end_us - span.begin_us for span in computed)
            mb, together_us = exchange.columns["beta_us_per_mb"], (end_us - begin_us) / EXCHANGES
            figures.append((mb, exchange_us, together_us, slowed_us / product_us))
        (small_mb, small_us, small_together_us, _), (mb, us, together_us, compute_slowdown) = figures
        alone_us = max(0.0, (us - small_us) / (mb - small_mb))
        slowed_us = max(0.0, (together_us - small_together_us) / (mb - small_mb))
        slowdown = max(1.0, slowed_us / alone_us) if alone_us else 1.0
        return {
            "compute_slowdown": max(1.0, compute_slowdown),
            "communication_slowdown": slowdown,
            "latency_us": max(0.0, small_together_us - small_us - small_mb * alone_us * (slowdown - 1.0)),
        }

    def _rows(self, group: dist.ProcessGroup) -> list[int]:
        """Rows that are exchanged for parts of the block's tokens; each rank gets equally many."""
        ranks, tokens = group.size(), self._case.sequence_length * self._case.batch * self._case.topk
        return sorted({max(1, tokens // cut // ranks) * ranks for cut in CUTS})

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._device, dtype=self._dtype)


def _done(probe: Probe) -> None:
    """Run an operation to its end."""
    probe.operation()


def _of_bytes(
    family: str, size: float, operation: Callable[[], object], *, count: int = 1, together: bool = False
) -> Probe:
    """A probe of ``count`` operations, each of ``size`` bytes."""
    columns = {"alpha_us": float(count), "beta_us_per_mb": 1e-6 * size * count}
    return Probe(family, columns, operation, together)
