"""Makes a cluster file from the ranks' measurements: a line for each operation, and the overhead of stages.

The time of an operation is the maximum over ranks of the medians over repeats: a collective ends when its
slowest rank ends, and a block waits for the slowest computation. Lines are fitted by non-negative least
squares of relative errors: so small sizes count too, and do not bend the line away from large ones, and no
figure is negative, with which a small operation would take no time. Samples that no line fits are refused.
The overheads are the rest of a real block's stages after subtracting the operations that the cost model
counts in them. Needs scipy, and no torch.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import get_args

import numpy as np

from megatron_ampipe.errors import RunFailed
from megatron_ampipe.plan.block import Block
from megatron_ampipe.plan.cluster import (
    Attention,
    AttentionLine,
    Cluster,
    Compute,
    Gemm,
    Host,
    IssuedKind,
    Operation,
    Overhead,
    OverheadKind,
    Overlap,
    StageOverhead,
    TransferCost,
)
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.stage_costs import issued_parts
from megatron_ampipe.schedule import MOE_BLOCK, Direction, even_chunks
from megatron_ampipe.tools.measuring.grid import Case, block_of_case
from megatron_ampipe.tools.measuring.reports import BlockTimes, OperationsReport, Sample

LEAST_R_SQUARED = 0.9
"""A line that explains a smaller part of the spread of the times is refused."""
TOLERATED = 0.25
"""If all relative errors are this small the line is accepted: if size hardly matters, r^2 says nothing."""
PRICE_OF_A_FACTOR = 0.02
"""The small penalty of a factor in :func:`factor_and_rest`, which decides between a factor and a time."""
HOST_NOISE_US = 200.0
"""Times of the same transfer differ by this much on a CPU, where threads run in changing order."""
KINDS: tuple[OverheadKind, ...] = ("qkv", "attention", "route", "shared", "expert", "merge")
"""Compute stages that can have a separate overhead."""
MEASURED_OPERATIONS: tuple[Operation, ...] = (
    "all_to_all",
    "direct_all_to_all",
    "all_gather",
    "reduce_scatter",
)
"""The collectives that :mod:`.operations` times, in the order of the file."""
IssueTimes = Mapping[str, Mapping[str, float]]
"""Microseconds to issue a stage, by direction and kind."""


def slowest_samples(reports: Sequence[Sequence[Sample]]) -> list[Sample]:
    """The samples of all ranks, in one order: of each, the maximum over ranks."""
    return [
        replace(by_rank[0], us=max(sample.us for sample in by_rank)) for by_rank in zip(*reports, strict=True)
    ]


def slowest_block(reports: Sequence[BlockTimes]) -> BlockTimes:
    """The parts of a block on all ranks: of each, the maximum over ranks."""
    stages = {
        degree: {way: slowest([report["stages"][degree][way] for report in reports]) for way in by_direction}
        for degree, by_direction in reports[0]["stages"].items()
    }
    return {
        "stock": slowest([report["stock"] for report in reports]),
        "stages": stages,
        "around": slowest([report["around"] for report in reports]),
    }


def slowest(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The maximum over ranks of each time."""
    return {name: max(report[name] for report in reports) for name in reports[0]}


def fit(samples: Sequence[Sample], *, noise_us: float = 0.0) -> tuple[dict[str, float], float]:
    """The line through the samples of one family; RunFailed if none fits by more than ``noise_us``.

    Returns:
        The figures of the cluster file by name, at least 0; and the share of the variance of the times that
        the line explains, at least 0.
    """
    from scipy.optimize import nnls

    names = list(samples[0].columns)
    columns = np.array([[sample.columns[name] for name in names] for sample in samples])
    times = np.array([sample.us for sample in samples])
    weights = times**-0.5
    figures, _ = nnls(columns * weights[:, None], times * weights)
    predicted = columns @ figures
    spread = float(((times - times.mean()) ** 2).sum())
    r_squared = max(0.0, 1 - float(((times - predicted) ** 2).sum()) / spread) if spread else 1.0
    errors = np.abs(predicted / times - 1)
    farthest = int(errors.argmax())
    us, line_us = float(times[farthest]), float(predicted[farthest])
    if r_squared < LEAST_R_SQUARED and errors[farthest] > TOLERATED and abs(us - line_us) > noise_us:
        raise RunFailed(
            f"{samples[0].family}: no line fits the times (r^2 {r_squared:.3f}, and at least "
            f"{LEAST_R_SQUARED} is needed). Farthest off is {dict(samples[farthest].columns)}: {us:.0f} us, "
            f"where the line has {line_us:.0f} us. Close other work and measure again, with more --repeats."
        )
    return {name: float(value) for name, value in zip(names, figures, strict=True)}, r_squared


def factor_and_rest(expected: Sequence[float], took: Sequence[float]) -> tuple[float, float]:
    """A factor of at least 1 and a time of at least 0 that turn expected times into measured ones.

    Where both explain them equally well, as with stages that are all equal, it is the time.
    """
    from scipy.optimize import nnls

    times, models = np.array(took), np.array(expected)
    weights = np.maximum(times, 1.0) ** -0.5
    columns = np.stack([models, np.ones_like(models)], axis=1) * weights[:, None]
    beyond = np.maximum(times - models, 0.0) * weights
    price = [PRICE_OF_A_FACTOR * float(np.linalg.norm(columns[:, 0])), 0.0]
    (more, rest), _ = nnls(np.vstack([columns, price]), np.append(beyond, 0.0))
    return 1.0 + float(more), float(rest)


class Figures:
    """The figures of the cluster file, from the line of each operation.

    Args:
        lines: By family of samples, what :func:`fit` returns.
        source: Where the figures come from.
    """

    def __init__(self, lines: Mapping[str, tuple[dict[str, float], float]], source: str) -> None:
        self._lines, self._source = lines, source

    def gemm(self) -> Gemm:
        values, r_squared = self._line("gemm")
        return Gemm(**values, basis="measured", source=self._source, r_squared=r_squared)

    def attention(self, way: Direction) -> AttentionLine:
        values, r_squared = self._line(f"attention.{way}")
        return AttentionLine(**values, basis="measured", source=self._source, r_squared=r_squared)

    def transfer(self, family: str) -> TransferCost:
        values, r_squared = self._line(family)
        return TransferCost(
            alpha_us=values["alpha_us"],
            beta_us_per_mb=values["beta_us_per_mb"],
            basis="measured",
            source=self._source,
            r_squared=r_squared,
        )

    def collectives(self, group: str) -> dict[Operation, TransferCost] | None:
        """The collectives of a class of links; None if there are no such links."""
        figures = {
            operation: self.transfer(f"{group}.{operation}")
            for operation in MEASURED_OPERATIONS
            if f"{group}.{operation}" in self._lines
        }
        return figures or None

    def collectives_on_host(self, group: str, *, stock_factor: float) -> dict[Operation, TransferCost] | None:
        """The same with Megatron's exchange, which is ``stock_factor`` times as slow as AMPipe's."""
        figures = self.collectives(group)
        if figures is None:
            return None
        direct = figures.get("direct_all_to_all", figures["all_to_all"])
        figures["stock_all_to_all"] = replace(
            direct,
            alpha_us=_rounded(direct.alpha_us * stock_factor),
            beta_us_per_mb=_rounded(direct.beta_us_per_mb * stock_factor),
        )
        return figures

    def overhead(self, forward_us: float, backward_us: float) -> Overhead:
        """At least 0: an overhead cannot correct a model that counts too much."""
        return Overhead(
            forward_us=_at_least_0(forward_us),
            backward_us=_at_least_0(backward_us),
            basis="measured",
            source=self._source,
        )

    def stage_overhead(
        self, forward_us: float, backward_us: float, *, forward_factor: float, backward_factor: float
    ) -> StageOverhead:
        """As :meth:`overhead`, with the factors of a stage's operations."""
        return StageOverhead(
            forward_us=_at_least_0(forward_us),
            backward_us=_at_least_0(backward_us),
            forward_factor=_at_least_0(forward_factor),
            backward_factor=_at_least_0(backward_factor),
            basis="measured",
            source=self._source,
        )

    def overlap(self, slowdowns: Mapping[str, float]) -> Overlap:
        return Overlap(
            compute_slowdown=_rounded(slowdowns["compute_slowdown"]),
            communication_slowdown=_rounded(slowdowns["communication_slowdown"]),
            latency_us=_rounded(slowdowns["latency_us"]),
            basis="measured",
            source=self._source,
        )

    def _line(self, family: str) -> tuple[dict[str, float], float]:
        values, r_squared = self._lines[family]
        return {name: _rounded(value) for name, value in values.items()}, round(r_squared, 4)


def assemble(
    case: Case,
    reports: Sequence[OperationsReport],
    *,
    ranks_per_node: int,
    description: str,
    source: str,
    device_memory_gib: float | None = None,
) -> Cluster:
    """Reduce, fit, and put together: what goes into the file; RunFailed if no line fits some operation.

    Args:
        case: The measured block.
        reports: The report of each rank (:func:`.operations.measure`).
        ranks_per_node: Ranks on one machine.
        description: Description in the file.
        source: Where the figures come from; stored with each of them.
        device_memory_gib: Memory of one rank, on GPUs.
    """
    block = block_of_case(case, num_ranks=len(reports), fused_gradients=reports[0]["fused_gradients"])
    block_us = slowest_block([report["block"] for report in reports])
    issue_of = [report["issue_of"] for report in reports]
    on_host = not any(issue_of)
    figures = Figures(_lines(reports, noise_us=HOST_NOISE_US if on_host else 0.0), source)
    attention = Attention(
        forward=figures.attention(Direction.FORWARD), backward=figures.attention(Direction.BACKWARD)
    )
    # What goes beyond these operations is not known yet.
    host = Host(
        issue=_mean_issue(figures, issue_of),
        issue_of={kind: figures.overhead(*times) for kind, times in _issued(block, issue_of).items()} or None,
        stage={"any": figures.stage_overhead(0.0, 0.0, forward_factor=1.0, backward_factor=1.0)},
        block=figures.overhead(*(block_us["around"][way] for way in Direction)),
        stock=figures.overhead(0.0, 0.0),
    )
    cluster = Cluster(
        description=description,
        ranks_per_node=ranks_per_node,
        device_memory_gib=device_memory_gib,
        intra=figures.collectives("intra"),
        inter=figures.collectives("inter"),
        compute=Compute(
            gemm={case.dtype: figures.gemm()},
            attention={case.dtype: attention},
            memory=figures.transfer("memory"),
            permute=figures.transfer("permute"),
            copy=figures.transfer("copy"),
        ),
        host=host,
        overlap=figures.overlap(slowest([report["slowdowns"] for report in reports])),
    )
    if on_host:
        cluster = _with_exchanges_of_stock(cluster, figures, stock_factor=1.0)
    return _with_unexplained_times(cluster, figures, block, block_us, on_host=on_host)


def _lines(
    reports: Sequence[OperationsReport], *, noise_us: float
) -> dict[str, tuple[dict[str, float], float]]:
    """By family, the line through the samples of the slowest ranks."""
    families: dict[str, list[Sample]] = {}
    for sample in slowest_samples([report["samples"] for report in reports]):
        families.setdefault(sample.family, []).append(sample)
    return {family: fit(samples, noise_us=noise_us) for family, samples in families.items()}


def _mean_issue(figures: Figures, reports: Sequence[IssueTimes]) -> Overhead:
    """The slowest host's mean time to issue a stage of the forward pass, for both passes."""
    means_us = []
    for by_direction in reports:
        forward_us = by_direction.get("forward", {})
        means_us.append(statistics.fmean(forward_us.values()) if forward_us else 0.0)
    return figures.overhead(max(means_us), max(means_us))


def _with_exchanges_of_stock(cluster: Cluster, figures: Figures, *, stock_factor: float) -> Cluster:
    return replace(
        cluster,
        intra=figures.collectives_on_host("intra", stock_factor=stock_factor),
        inter=figures.collectives_on_host("inter", stock_factor=stock_factor),
    )


def _with_unexplained_times(
    cluster: Cluster, figures: Figures, block: Block, block_us: BlockTimes, *, on_host: bool
) -> Cluster:
    """Add what a real block and its stages take beyond the operations that the cost model counts."""
    model = Predictor(block, cluster)
    stock_us = model.stock()
    beyond_us = [block_us["stock"][way] - stock_us.of(way) for way in Direction]
    if on_host:
        # The ranks of a block do not begin together: the unexplained time of a block is in its exchanges.
        exchanges = model.stock_exchanges()
        slower = 1 + max(0.0, sum(beyond_us)) / (exchanges.forward + exchanges.backward)
        cluster = _with_exchanges_of_stock(cluster, figures, stock_factor=slower)
        beyond_us = [0.0, 0.0]
    host = replace(
        cluster.host,
        stage=_stage_overheads(figures, _beyond_the_model(model, block_us["stages"])),
        stock=figures.overhead(*beyond_us),
    )
    return replace(cluster, host=host)


def _stage_overheads(
    figures: Figures, by_kind: Mapping[OverheadKind, Mapping[str, float]]
) -> dict[OverheadKind, StageOverhead]:
    """The overheads by kind; ``any`` has the medians over kinds."""
    names = next(iter(by_kind.values()))
    medians = {name: statistics.median(beyond[name] for beyond in by_kind.values()) for name in names}
    with_any: dict[OverheadKind, Mapping[str, float]] = {"any": medians, **by_kind}
    return {kind: figures.stage_overhead(**beyond) for kind, beyond in with_any.items()}


def _issued(block: Block, reports: Sequence[IssueTimes]) -> dict[IssuedKind, list[float]]:
    """By kind, the slowest host's times to issue a stage, with one local expert, if all measured it."""
    kinds = {kind.name: kind for kind in MOE_BLOCK}
    issued_us: dict[IssuedKind, list[float]] = {}
    for name in get_args(IssuedKind):
        # A backward pass has no counts.
        ways = [Direction.FORWARD] if name == "counts" else list(Direction)
        by_way = [[report[way][name] for report in reports if name in report.get(way, {})] for way in ways]
        if any(len(by_rank) < len(reports) for by_rank in by_way):
            continue
        times_us = []
        for way, by_rank in zip(ways, by_way, strict=True):
            times_us.append(max(by_rank) / issued_parts(kinds[name], way, block))
        if name == "counts":
            times_us.append(0.0)
        issued_us[name] = times_us
    return issued_us


def _beyond_the_model(
    model: Predictor, stages: Mapping[str, Mapping[str, Mapping[str, float]]]
) -> dict[OverheadKind, dict[str, float]]:
    """By kind, factor and time by which its stages of all degrees took longer than the model counts."""
    times: dict[tuple[str, Direction], list[tuple[float, float]]] = {}
    for degree, by_direction in stages.items():
        for stage, pair in model.stages(even_chunks(model.block.rows, int(degree))).items():
            for way in () if stage.is_communication else Direction:
                both = (pair.of(way), by_direction[way][str(stage)])
                times.setdefault((stage.kind.name, way), []).append(both)
    factors: dict[OverheadKind, dict[str, float]] = {}
    for kind, way in itertools.product(KINDS, Direction):
        if (kind, way) in times:
            factor, us = factor_and_rest(*zip(*times[kind, way], strict=True))
            factors.setdefault(kind, {}).update({f"{way}_factor": factor, f"{way}_us": us})
    return factors


def _at_least_0(value: float) -> float:
    return _rounded(max(0.0, value))


def _rounded(value: float) -> float:
    """Five digits; none of these times is reproducible to so many."""
    return float(f"{value:.5g}")
