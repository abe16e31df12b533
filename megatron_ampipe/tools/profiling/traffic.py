"""Collectives to be timed, by the functions that training calls; how they and computation slow each other.

Sizes are what one rank sends to the others of its group. Within a node, that is all of its ranks. Between
nodes, AMPipe's all-to-all is between the ranks of one place in all nodes, as in the first of two hops. The
other collectives there are between all ranks of all nodes, and the size of an all-to-all is then what leaves
the node. Called by :mod:`.measure`; every rank measures the same things in the same order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ampipe.runtime.collectives import all_gather_rows, exchange_rows
from megatron_ampipe.tools.measuring.blocks import DTYPES
from megatron_ampipe.tools.measuring.grid import Case
from megatron_ampipe.tools.profiling.compute import CUTS
from megatron_ampipe.tools.profiling.timing import Probe, Stopwatch

OVERLAP_US = 300e3
"""For about how long computation and communication run concurrently."""
_MINIMUM_ROUNDS, _MAXIMUM_ROUNDS = 3, 100


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
        )

    def _stock_exchange(self, name: str, group: dist.ProcessGroup, rows: int, *, near: int) -> Probe:
        """Likewise, as Megatron's layer does it."""
        tensors, splits, sent = self._tokens(group, rows, near=near)

        def exchange() -> None:
            for tensor in tensors:
                dist.all_to_all_single(torch.empty_like(tensor), tensor, splits, splits, group=group)

        return _of_bytes(f"{name}.stock_all_to_all", sent, exchange)

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
        yield _of_bytes(f"{name}.all_gather", sent, lambda: all_gather_rows([part], group=group).wait())
        yield _of_bytes(
            f"{name}.reduce_scatter",
            sent,
            lambda: dist.reduce_scatter_tensor(torch.empty_like(part), whole, group=group),
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


def _of_bytes(family: str, size: float, operation: Callable[[], object]) -> Probe:
    columns = {"alpha_us": 1.0, "beta_us_per_mb": 1e-6 * size}
    return Probe(family, columns, operation, together=True)


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
