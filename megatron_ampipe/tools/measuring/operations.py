"""What ``ampipe profile`` times on every rank, and how: computation, collectives, and a real block.

**Computation** (:class:`Computation`): matrix products, core attention, passes over memory, permutation, in
the sizes of a block's stages, whole and cut into up to 16 chunks. All ranks measure at the same time, as they
compute in training, or those that share a core in turns.

**Collectives** (:class:`Traffic`), by the functions that training calls, and how they and computation slow
each other. Sizes are what one rank sends to the others of its group. Within a node, that is all of its ranks.
Between nodes, AMPipe's all-to-all is between the ranks of one place in all nodes, as in the first of two
hops. The other collectives there are between all ranks of all nodes, and the size of an all-to-all is then
what leaves the node. Every rank measures the same things in the same order.

**A real block** (:func:`block_times`), stage by stage and as a whole, and Megatron's own: what they take
beyond their operations. It is built, and its stages run alone, as in ``ampipe bench``.

All operations are timed once in each round, so that a disturbance of some seconds hits a few rounds of all of
them, which the medians ignore, and not all rounds of a few.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ampipe.attention.kernels import KERNELS
from megatron_ampipe.runtime.collectives import all_gather_rows, exchange_rows
from megatron_ampipe.runtime.executors import SequentialExecutor
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.saved_tensors import HostCopies
from megatron_ampipe.schedule import Direction, Span
from megatron_ampipe.tools.measuring.bench_job import Cut, Variant
from megatron_ampipe.tools.measuring.blocks import DTYPES, BlockFactory
from megatron_ampipe.tools.measuring.cluster_fit import Sample
from megatron_ampipe.tools.measuring.grid import Case
from megatron_ampipe.tools.measuring.meters import stage_times
from megatron_ampipe.tools.measuring.ranks import Rank
from megatron_ampipe.tools.measuring.timed_passes import Passes

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


def measure(rank: Rank[Any], case: Case, *, repeats: int, ranks_per_node: int, turns: int) -> dict[str, Any]:
    """Measure around one block, on a rank that has started Megatron; a message ``progress`` after each step.

    Args:
        rank: This rank.
        case: Whose sizes are measured.
        repeats: Timed calls of each operation.
        ranks_per_node: Ranks on one node.
        turns: In how many turns ranks time their computation: as many as share a core.

    Returns:
        ``samples``, ``slowdowns``, ``block`` (:func:`block_times`), ``kernel`` and ``fused_gradients``.
    """
    job = rank.job
    watch = Stopwatch(repeats=repeats, on_cuda=job.on_cuda, alive=lambda: rank.say("alive"))
    factory = BlockFactory(
        case, rank=rank.number, num_ranks=job.num_ranks, on_cuda=job.on_cuda, seed=job.seed
    )
    compute = Computation(case, kernel=factory.kernel, on_cuda=job.on_cuda)
    traffic = Traffic(case, watch=watch)
    links = link_groups(ranks_per_node)
    samples = []
    for turn in range(turns):
        watch.meet()
        if rank.number % turns == turn:
            # Ranks that share a core would be timed together or alone by chance. What sharing costs is in the
            # stages of the block, which all ranks run at the same time.
            samples = watch.samples(list(compute.probes()))
    watch.meet()
    rank.progress()
    samples += watch.samples(list(traffic.probes(links)))
    rank.progress()
    # On the links where the longest transfers are.
    slowdowns = traffic.slowdowns(links[-1].exchange)
    rank.progress()
    return {
        "samples": [asdict(sample) for sample in samples],
        "slowdowns": slowdowns,
        "block": block_times(rank, case, factory, watch=watch),
        "kernel": factory.kernel,
        "fused_gradients": factory.fused_gradients,
    }


@dataclass(frozen=True, slots=True)
class Probe:
    """An operation of one size to be timed.

    Attributes:
        family: As in :class:`~.samples.Sample`.
        columns: Likewise.
        operation: What is timed.
        count: How many such operations it is; the time is divided by that.
        together: It is a collective: ranks meet before each call, so that no wait for a late one counts.
    """

    family: str
    columns: Mapping[str, float]
    operation: Callable[[], object]
    count: int = 1
    together: bool = False


class Stopwatch:
    """Medians of repeated calls.

    Args:
        repeats: How often each operation is timed.
        on_cuda: Whether it runs on the device, whose events then time it.
        alive: Called after a call, but at most once a second: signs of life must not slow short calls down.
    """

    def __init__(self, *, repeats: int, on_cuda: bool, alive: Callable[[], None]) -> None:
        self.repeats, self.on_cuda = repeats, on_cuda
        self._alive, self._last_sign = alive, time.monotonic()

    def samples(self, probes: Sequence[Probe]) -> list[Sample]:
        """The typical time of each operation, all of them timed in turns.

        Of a computation that is the median. Of a collective it is the lower quartile: on a host, a thread of
        the backend that has to wait for the scheduler's next tick adds 4 ms to whatever the transfer takes,
        sometimes to more than half of the calls (docs/log).
        """
        for _ in range(WARMUP):
            for probe in probes:
                probe.operation()
                self.give_sign()
        times_us: list[list[float]] = [[] for _ in probes]
        for _ in range(self.repeats):
            for times, probe in zip(times_us, probes, strict=True):
                times.append(self._once(probe) / probe.count)
                self.give_sign()
        return [
            Sample(
                probe.family,
                probe.columns,
                sorted(times)[len(times) // 4] if probe.together else statistics.median(times),
            )
            for times, probe in zip(times_us, probes, strict=True)
        ]

    def since(self, begin: float) -> float:
        """Microseconds since a moment of ``time.perf_counter``, all issued work included."""
        if self.on_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e6

    def give_sign(self) -> None:
        """Say that something has ended, unless that was said less than a second ago."""
        now = time.monotonic()
        if now - self._last_sign >= _SIGN_S:
            self._last_sign = now
            self._alive()

    def meet(self) -> None:
        """Until every rank is here and idle."""
        if self.on_cuda:
            torch.cuda.synchronize()
        dist.barrier()
        if self.on_cuda:
            torch.cuda.synchronize()

    def _once(self, probe: Probe) -> float:
        if probe.together:
            self.meet()
        if not self.on_cuda:
            begin = time.perf_counter()
            probe.operation()
            return self.since(begin)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        probe.operation()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e3


class Computation:
    """The computation of a block on this rank.

    Args:
        case: The block.
        kernel: Name of the attention kernel.
        on_cuda: Where it runs.
    """

    def __init__(self, case: Case, *, kernel: str, on_cuda: bool) -> None:
        self._case = case
        self._kernel = KERNELS[kernel]
        self._device, self._dtype = "cuda" if on_cuda else "cpu", DTYPES[case.dtype]
        self._head_size = case.head_size or case.hidden // case.heads
        self._groups = case.query_groups or case.heads

    def probes(self) -> Iterator[Probe]:
        """Everything to be timed."""
        width = (self._case.heads + 2 * self._groups) * self._head_size
        up = self._case.ffn * (2 if self._case.activation == "swiglu" else 1)
        shapes = {
            (self._case.hidden, width),
            (self._case.heads * self._head_size, self._case.hidden),
            (self._case.hidden, up),
            (self._case.ffn, self._case.hidden),
        }
        for rows in self._rows():
            for k, n in sorted(shapes):
                yield from self._product(rows, k, n)
            yield self._pass_over_memory(rows)
            yield self._permutation(rows)
            yield self._copy(rows)
        length = self._case.sequence_length
        for cut in CUTS:
            rows = length // cut
            # At the front, in the middle and at the end of the sequence.
            for start in sorted({0, (cut // 2) * rows, (cut - 1) * rows}):
                if rows:
                    yield from self._attention(start, start + rows)

    def _product(self, rows: int, k: int, n: int) -> Iterator[Probe]:
        """Forward, and the two of the backward pass."""
        inputs, weight, gradient = self._random(rows, k), self._random(n, k), self._random(rows, n)
        columns = {
            "alpha_us": 1.0,
            "beta_us_per_gflop": 2e-9 * rows * k * n,
            "weights_us_per_million": 1e-6 * k * n,
        }
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

        output = attend()
        gradient = torch.randn_like(output)
        pairs = end * (end + 1) // 2 - start * (start + 1) // 2
        gflops = 4e-9 * pairs * batch * heads * size
        columns = {
            "alpha_us": 1.0,
            "beta_us_per_gflop": gflops,
            "merge_us_per_mb": 1e-6 * output.nbytes if start else 0.0,
        }
        yield Probe("attention.forward", columns, attend)
        yield Probe(
            "attention.backward",
            # Five products instead of two.
            {**columns, "beta_us_per_gflop": 2.5 * gflops},
            lambda: torch.autograd.grad(output, (query, key, value), gradient, retain_graph=True),
        )

    def _pass_over_memory(self, rows: int) -> Probe:
        """Adding two tensors into a third, as a residual is added."""
        left, right = (self._random(rows, self._case.hidden) for _ in range(2))
        return _of_bytes("memory", 3 * left.nbytes, lambda: left + right)

    def _copy(self, rows: int) -> Probe:
        """What arrives for the experts to host memory and back, as the lane ``copy`` copies."""
        tokens = self._random(rows * self._case.topk, self._case.hidden)

        def copy() -> None:
            copies = HostCopies([tokens])
            copies.store(lambda: None).wait()
            copies.load().wait()

        return _of_bytes("copy", tokens.nbytes, copy, count=2)

    def _permutation(self, rows: int) -> Probe:
        """Rows into another order and back."""
        tokens = self._random(rows * self._case.topk, self._case.hidden)
        order = torch.randperm(len(tokens)).to(tokens.device)
        return _of_bytes(
            "permute",
            2 * tokens.nbytes,
            lambda: (
                tokens.index_select(0, order),
                torch.zeros_like(tokens).index_add_(0, order, tokens),
            ),
            count=2,
        )

    def _rows(self) -> list[int]:
        tokens = self._case.sequence_length * self._case.batch
        return sorted({tokens // cut for cut in CUTS if tokens >= cut})

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._device, dtype=self._dtype)


@dataclass(frozen=True, slots=True)
class LinkGroups:
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


class Traffic:
    """The collectives of a block.

    Args:
        case: The block.
        watch: Times.
    """

    def __init__(self, case: Case, *, watch: Stopwatch) -> None:
        self._case, self._watch = case, watch
        self._on_cuda = watch.on_cuda
        self._device = "cuda" if watch.on_cuda else "cpu"
        self._dtype = DTYPES[case.dtype]

    def probes(self, links: Sequence[LinkGroups]) -> Iterator[Probe]:
        """Every collective over every class of links, to be timed.

        Args:
            links: Of this rank.
        """
        for link in links:
            name, group = link.name, link.all
            for rows in self._rows(link.exchange.size()):
                yield self._exchange(f"{name}.all_to_all", link.exchange, rows)
            if link.near > 1:
                for rows in self._rows(group.size()):
                    yield self._exchange(f"{name}.direct_all_to_all", group, rows, near=link.near)
            if not self._on_cuda:
                # With NCCL, both call the same. Megatron's layer sends whole blocks: of half as many tokens
                # as this one, up to twice as many.
                half = self._rows(group.size())[-2]
                for multiple in (1, 2, 3, 4):
                    yield self._stock_exchange(name, group, multiple * half, near=link.near)
            for rows in (1, *(rows // group.size() for rows in self._rows(group.size()))):
                yield from self._gathers(name, group, rows)

    def _exchange(self, family: str, group: dist.ProcessGroup, rows: int, *, near: int = 1) -> Probe:
        """AMPipe's all-to-all of tokens and their probabilities, equally many to each rank.

        Its size is what goes to others than ``near`` ranks.
        """
        tensors, splits, sent = self._tokens(group, rows, near=near)
        return _of_bytes(
            family,
            sent,
            lambda: exchange_rows(tensors, send=splits, receive=splits, group=group).wait(),
            together=True,
        )

    def _stock_exchange(self, name: str, group: dist.ProcessGroup, rows: int, *, near: int) -> Probe:
        """Likewise, as Megatron's layer does it."""
        tensors, splits, sent = self._tokens(group, rows, near=near)

        def exchange() -> None:
            for tensor in tensors:
                dist.all_to_all_single(torch.empty_like(tensor), tensor, splits, splits, group=group)

        return _of_bytes(f"{name}.stock_all_to_all", sent, exchange, together=True)

    def _tokens(
        self, group: dist.ProcessGroup, rows: int, *, near: int = 1
    ) -> tuple[list[Tensor], list[int], float]:
        """Tokens and probabilities, how many go to each rank, and bytes to others than the ``near`` ranks."""
        ranks = group.size()
        tensors = [self._random(rows), torch.zeros(rows, device=self._device)]
        return tensors, [rows // ranks] * ranks, sum(t.nbytes for t in tensors) * (ranks - near) / ranks

    def _gathers(self, name: str, group: dist.ProcessGroup, rows: int) -> Iterator[Probe]:
        part = self._random(rows)
        whole = self._random(rows * group.size())
        sent = part.nbytes * (group.size() - 1)
        yield _of_bytes(
            f"{name}.all_gather",
            sent,
            lambda: all_gather_rows([part], group=group).wait(),
            together=True,
        )
        yield _of_bytes(
            f"{name}.reduce_scatter",
            sent,
            lambda: dist.reduce_scatter_tensor(torch.empty_like(part), whole, group=group),
            together=True,
        )

    def slowdowns(self, group: dist.ProcessGroup) -> dict[str, float]:
        """How much longer computation and an all-to-all take while the other runs.

        Returns:
            ``compute`` and ``communication``, factors of at least 1 on computation and on time on the wire;
            ``latency_us``, what every all-to-all takes longer, whatever its size.
        """
        sizes = self._rows(group.size())
        (small_mb, small_us, small_concurrent_us, _), (large_mb, large_us, large_concurrent_us, compute) = (
            self._with_products(group, rows) for rows in (sizes[0], sizes[-2])
        )
        alone = max(0.0, (large_us - small_us) / (large_mb - small_mb))
        concurrent = max(0.0, (large_concurrent_us - small_concurrent_us) / (large_mb - small_mb))
        slowdown = max(1.0, concurrent / alone) if alone else 1.0
        return {
            "compute": compute,
            "communication": slowdown,
            "latency_us": max(0.0, small_concurrent_us - small_us - small_mb * alone * (slowdown - 1.0)),
        }

    def _with_products(self, group: dist.ProcessGroup, rows: int) -> tuple[float, float, float, float]:
        """An all-to-all of ``rows`` rows concurrent with matrix products.

        Returns:
            Its size in MB, its microseconds alone and with the products, and the products' slowdown.
        """
        ranks = group.size()
        tokens = self._random(rows)
        splits = [rows // ranks] * ranks
        left = self._random(self._rows(ranks)[-2])
        weight = torch.randn(self._case.hidden, self._case.ffn, device=self._device, dtype=self._dtype)

        def exchange() -> None:
            exchange_rows([tokens], send=splits, receive=splits, group=group).wait()

        def compute() -> Tensor:
            return left @ weight

        alone = self._watch.samples([Probe("", {}, exchange, together=True), Probe("", {}, compute)])
        exchange_us, compute_us = (sample.us for sample in alone)
        # Every rank must exchange equally often, whatever its clock says.
        slowest = torch.tensor([exchange_us], dtype=torch.float64, device=self._device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        rounds = max(_MINIMUM_ROUNDS, min(_MAXIMUM_ROUNDS, int(OVERLAP_US / float(slowest))))
        self._watch.meet()
        run_both = self._concurrent_on_streams if self._watch.on_cuda else self._concurrent_on_threads
        computing_us, communicating_us = run_both(exchange, compute, rounds, exchange_us / compute_us)
        megabytes = 1e-6 * tokens.nbytes * (ranks - 1) / ranks
        return megabytes, exchange_us, communicating_us, max(1.0, computing_us / compute_us)

    def _concurrent_on_threads(
        self, exchange: Callable[[], object], compute: Callable[[], object], rounds: int, ratio: float
    ) -> tuple[float, float]:
        """Microseconds of one computation and of one exchange."""
        took_us = 0.0

        def communicate() -> None:
            nonlocal took_us
            begin = time.perf_counter()
            for _ in range(rounds):
                exchange()
            took_us = self._watch.since(begin)

        thread = threading.Thread(target=communicate)
        begin, calls = time.perf_counter(), 0
        thread.start()
        while thread.is_alive():
            compute()
            calls += 1
            self._watch.give_sign()
        computing_us = self._watch.since(begin) / calls
        thread.join()
        return computing_us, took_us / rounds

    def _concurrent_on_streams(
        self, exchange: Callable[[], object], compute: Callable[[], object], rounds: int, ratio: float
    ) -> tuple[float, float]:
        """Likewise on the device; as many computations as take about as long as the exchanges."""
        calls = max(1, int(rounds * ratio))
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            marks[0].record()
            for _ in range(rounds):
                exchange()
            marks[1].record()
        marks[2].record()
        for _ in range(calls):
            compute()
        marks[3].record()
        torch.cuda.synchronize()
        return (
            float(marks[2].elapsed_time(marks[3])) * 1e3 / calls,
            float(marks[0].elapsed_time(marks[1])) * 1e3 / rounds,
        )

    def _rows(self, ranks: int) -> list[int]:
        """Rows that are exchanged for the block's tokens and their parts; each rank gets equally many."""
        tokens = self._case.sequence_length * self._case.batch * self._case.topk
        return sorted({max(1, tokens // cut // ranks) * ranks for cut in CUTS})

    def _random(self, rows: int) -> Tensor:
        return torch.randn(rows, self._case.hidden, device=self._device, dtype=self._dtype)


def _of_bytes(
    family: str, size: float, operation: Callable[[], object], *, count: int = 1, together: bool = False
) -> Probe:
    columns = {"alpha_us": 1.0, "beta_us_per_mb": 1e-6 * size}
    return Probe(family, columns, operation, count=count, together=together)


def link_groups(ranks_per_node: int) -> list[LinkGroups]:
    """What to measure on this rank: links within its node, if it has several ranks, then those between."""
    world, rank = dist.get_world_size(), dist.get_rank()
    nodes = [list(range(first, first + ranks_per_node)) for first in range(0, world, ranks_per_node)]
    links = []
    if ranks_per_node > 1:
        node = dist.new_subgroups_by_enumeration(nodes)[0]
        links.append(LinkGroups("intra", node, node))
    if len(nodes) > 1:
        counterparts = [list(range(place, world, ranks_per_node)) for place in range(ranks_per_node)]
        everyone = dist.group.WORLD
        assert everyone is not None
        between = dist.new_subgroups_by_enumeration(counterparts)[0]
        links.append(LinkGroups("inter", between, everyone, near=ranks_per_node))
    assert all(dist.get_rank(link.exchange) >= 0 for link in links), rank
    return links


def block_times(rank: Rank[Any], case: Case, factory: BlockFactory, *, watch: Stopwatch) -> dict[str, Any]:
    """Microseconds of a block's parts on this rank.

    Returns:
        ``stages``: by degree, direction and stage, the median of the stage alone; ``around``: by degree and
        direction, of what a pass spends outside its stages; ``stock``: by direction, of Megatron's own layer;
        ``issue``: of the host to issue one stage (0 where the host computes); ``issue_of``: by direction and
        kind, of the host to issue a stage while the device is busy (empty where the host computes).
    """
    rounds = WARMUP + watch.repeats
    passes = Passes(rank, case, progress=watch.give_sign)
    variants = {degree: Variant("ampipe", Cut.of(degree)) for degree in DEGREES}
    alone = {degree: factory.build_timed(of, num_passes=rounds) for degree, of in variants.items()}
    in_order = {degree: Recorder(num_iterations=rounds) for degree in DEGREES}
    layers = {
        degree: factory.build(variants[degree], recorder=recorder, executor=SequentialExecutor())
        for degree, recorder in in_order.items()
    }
    usual = factory.build(variants[max(DEGREES)])
    stock: list[dict[Direction, float]] = []
    whole: dict[int, list[dict[Direction, float]]] = {degree: [] for degree in DEGREES}
    issued_us = []
    for number in range(rounds):
        stock.append(passes.run(factory.stock).by_direction_us)
        for degree, timed in alone.items():
            timed.recorder.start_iteration(number)
            passes.run(timed.layers)
            in_order[degree].start_iteration(number)
            whole[degree].append(passes.run(layers[degree]).by_direction_us)
        if watch.on_cuda:
            issued_us.append(passes.run(usual).issued_s * 1e6)
        rank.progress()
    stages = {str(degree): _medians(stage_times(timed.recorder)) for degree, timed in alone.items()}
    num_stages = len(stages[str(max(DEGREES))]["forward"])
    return {
        "stock": {way: statistics.median(times[way] for times in stock[WARMUP:]) for way in Direction},
        "stages": stages,
        "around": {str(degree): _outside(whole[degree], in_order[degree]) for degree in DEGREES},
        "issue": statistics.median(issued_us[WARMUP:]) / num_stages if issued_us else 0.0,
        "issue_of": alone[max(DEGREES)].timer.queue.issued_us(),
    }


def _medians(times: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    return {
        direction: {stage: statistics.median(passes[WARMUP:]) for stage, passes in stages.items()}
        for direction, stages in times.items()
    }


def _outside(whole: Sequence[dict[Direction, float]], recorder: Recorder) -> dict[str, float]:
    """The median of what passes took beyond the sum of their stages."""
    times = stage_times(recorder)
    found = {}
    for way in Direction:
        in_stages = map(sum, zip(*times[way.value].values(), strict=True))
        beyond = [took[way] - inside for took, inside in zip(whole, in_stages, strict=True)]
        found[way.value] = max(0.0, statistics.median(beyond[WARMUP:]))
    return found
