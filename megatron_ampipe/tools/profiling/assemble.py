"""Makes a cluster of what was measured: a line for every operation, then what a stage costs beyond them.

Pure, with scipy. The overheads are what is left of a real block's stages after subtracting the operations
that the cost model counts in them. Called by ``ampipe profile``.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

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
    Point,
    StageOverhead,
    TransferCost,
)
from megatron_ampipe.plan.predict import CostModel
from megatron_ampipe.plan.stage_costs import issued_parts
from megatron_ampipe.schedule import MOE_BLOCK, Direction, even_chunks
from megatron_ampipe.tools.measuring.case_workload import workload_of_case
from megatron_ampipe.tools.measuring.grid import Case
from megatron_ampipe.tools.profiling.fit import Line, factor_and_rest, fit, nearest_line
from megatron_ampipe.tools.profiling.samples import Sample, slowest, slowest_numbers

STOCK_EXCHANGE = ".stock_all_to_all"
"""Of whole blocks, one tensor after the other: the file has the time of every size. In a block, where ranks
do not begin together, it is slower still, by a factor taken from Megatron's own layer."""

HOST_NOISE_US = 200.0
"""Times of the same transfer differ by so much where the host computes: threads run in another order."""

KINDS: tuple[OverheadKind, ...] = ("qkv", "attention", "route", "shared", "expert", "merge")
"""Compute stages that can have a separate overhead."""


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """A measured cluster, and how well the lines fit.

    Attributes:
        cluster: What goes into the file.
        lines: By operation, what was fitted.
    """

    cluster: Cluster
    lines: Mapping[str, Line]


def assemble(
    case: Case,
    reports: Sequence[Mapping[str, Any]],
    *,
    ranks_per_node: int,
    description: str,
    source: str,
    device_memory_gib: float | None = None,
) -> Profile:
    """Reduce, fit, and put together.

    Args:
        case: The block around which was measured.
        reports: What each rank found (:func:`.measure.measure`).
        ranks_per_node: Ranks on one machine.
        description: For the file.
        source: Where the figures come from; stored with each of them.
        device_memory_gib: Of one rank, on GPUs.

    Raises:
        RunFailed: no line fits the times of some operation that the planner needs.
    """
    families: dict[str, list[Sample]] = {}
    for sample in slowest([report["samples"] for report in reports]):
        families.setdefault(sample.family, []).append(sample)
    blocks = [dict(report["block"]) for report in reports]
    issue_of = _issued(case, [block.pop("issue_of") for block in blocks], num_ranks=len(reports))
    block = slowest_numbers(blocks)
    noise_us = 0.0 if block["issue"] else HOST_NOISE_US
    lines = {
        family: nearest_line(samples) if family.endswith(STOCK_EXCHANGE) else fit(samples, noise_us=noise_us)
        for family, samples in families.items()
    }
    tables = {
        family: _table(samples) for family, samples in families.items() if family.endswith(STOCK_EXCHANGE)
    }
    slowdowns = slowest_numbers([report["slowdowns"] for report in reports])
    make = _Figures(lines, tables, source)
    overhead = make.overhead(0.0, 0.0)
    cluster = Cluster(
        description=description,
        ranks_per_node=ranks_per_node,
        device_memory_gib=device_memory_gib,
        intra=make.collectives("intra"),
        inter=make.collectives("inter"),
        compute=Compute(
            gemm={case.dtype: make.gemm()},
            attention={
                case.dtype: Attention(forward=make.attend("forward"), backward=make.attend("backward"))
            },
            memory=make.transfer("memory"),
            permute=make.transfer("permute"),
            copy=make.transfer("copy"),
        ),
        host=Host(
            issue=make.overhead(block["issue"], block["issue"]),
            issue_of={kind: make.overhead(*times) for kind, times in issue_of.items()} or None,
            stage={"any": make.stage_overhead([(1.0, 0.0)] * 2)},
            block=overhead,
            stock=overhead,
        ),
        overlap=Overlap(
            basis="measured",
            source=source,
            compute_slowdown=_rounded(slowdowns["compute"]),
            communication_slowdown=_rounded(slowdowns["communication"]),
            latency_us=_rounded(slowdowns["latency_us"]),
        ),
    )
    workload = workload_of_case(case, num_ranks=len(reports), fused_gradients=reports[0]["fused_gradients"])
    model = CostModel(workload, cluster)
    beyond = {way: block["stock"][way] - model.stock().of(way) for way in Direction}
    if tables:
        exchanges = model.stock_exchanges()
        slower = 1 + max(0.0, sum(beyond.values())) / (exchanges.forward + exchanges.backward)
        cluster = dataclasses.replace(
            cluster, intra=_slower(cluster.intra, slower), inter=_slower(cluster.inter, slower)
        )
        beyond = dict.fromkeys(Direction, 0.0)
    host = dataclasses.replace(
        cluster.host,
        stage=_stage_overheads(model, block["stages"], make),
        block=make.overhead(
            *(statistics.median(of[way] for of in block["around"].values()) for way in Direction)
        ),
        stock=make.overhead(*(beyond[way] for way in Direction)),
    )
    return Profile(dataclasses.replace(cluster, host=host), lines)


def _issued(
    case: Case, reports: Sequence[Mapping[str, Mapping[str, float]]], *, num_ranks: int
) -> dict[IssuedKind, tuple[float, float]]:
    """By kind, the time to issue a stage in both directions, with one local expert, of the slowest host.

    A kind that some rank could not measure, because its host waits for the device, is left out.
    """
    workload = workload_of_case(case, num_ranks=num_ranks, fused_gradients=False)
    kinds = {kind.name: kind for kind in MOE_BLOCK}
    found: dict[IssuedKind, tuple[float, float]] = {}
    for name in get_args(IssuedKind):
        times = []
        for way in Direction:
            of_ranks = [report.get(way.value, {}).get(name) for report in reports]
            measured = [us for us in of_ranks if us is not None]
            if len(measured) == len(of_ranks):
                times.append(max(measured) / issued_parts(kinds[name], way, workload))
        if name == "counts" and len(times) == 1:
            # A backward pass has none.
            times.append(0.0)
        if len(times) == 2:
            found[name] = (times[0], times[1])
    return found


def _slower(
    figures: Mapping[Operation, TransferCost] | None, factor: float
) -> Mapping[Operation, TransferCost] | None:
    """The collectives of a class of links, with all times of Megatron's exchange multiplied by ``factor``."""
    if figures is None:
        return None
    figure = figures["stock_all_to_all"]
    slower = dataclasses.replace(
        figure,
        alpha_us=_rounded(figure.alpha_us * factor),
        beta_us_per_mb=_rounded(figure.beta_us_per_mb * factor),
        table=tuple(Point(mb=point.mb, us=_rounded(point.us * factor)) for point in figure.table or ()),
    )
    return {**figures, "stock_all_to_all": slower}


def _table(samples: Sequence[Sample]) -> tuple[Point, ...]:
    found = {sample.columns["beta_us_per_mb"]: sample.us for sample in samples}
    return tuple(Point(mb=_rounded(mb), us=_rounded(found[mb])) for mb in sorted(found))


class _Figures:
    """Makes the records of a cluster file out of lines."""

    def __init__(
        self, lines: Mapping[str, Line], tables: Mapping[str, tuple[Point, ...]], source: str
    ) -> None:
        self._lines, self._tables, self._source = lines, tables, source

    def transfer(self, family: str) -> TransferCost:
        return TransferCost(**self._fields(family), table=self._tables.get(family))

    def gemm(self) -> Gemm:
        return Gemm(**self._fields("gemm"))

    def attend(self, direction: str) -> AttentionLine:
        return AttentionLine(**self._fields(f"attention.{direction}"))

    def collectives(self, group: str) -> dict[Operation, TransferCost] | None:
        names = [family.partition(".")[2] for family in self._lines if family.startswith(f"{group}.")]
        return {cast(Operation, name): self.transfer(f"{group}.{name}") for name in names} or None

    def overhead(self, forward_us: float, backward_us: float) -> Overhead:
        """At least 0: an overhead cannot correct a model that counts too much."""
        return Overhead(
            basis="measured",
            source=self._source,
            forward_us=_rounded(max(0.0, forward_us)),
            backward_us=_rounded(max(0.0, backward_us)),
        )

    def stage_overhead(self, fits: Sequence[tuple[float, float]]) -> StageOverhead:
        """For each direction a factor and a time in microseconds."""
        (forward_factor, forward_us), (backward_factor, backward_us) = fits
        return StageOverhead(
            basis="measured",
            source=self._source,
            forward_us=_rounded(forward_us),
            backward_us=_rounded(backward_us),
            forward_factor=_rounded(forward_factor),
            backward_factor=_rounded(backward_factor),
        )

    def _fields(self, family: str) -> dict[str, Any]:
        line = self._lines[family]
        figures = {name: _rounded(value) for name, value in line.figures.items()}
        return {**figures, "basis": "measured", "source": self._source, "r_squared": round(line.r_squared, 4)}


def _stage_overheads(
    model: CostModel, stages: Mapping[str, Mapping[str, Mapping[str, float]]], make: _Figures
) -> dict[OverheadKind, StageOverhead]:
    """By kind of stage, what its stages of all degrees took beyond what the model counts in them."""
    expected: dict[tuple[str, Direction], list[float]] = {}
    took: dict[tuple[str, Direction], list[float]] = {}
    for degree, by_direction in stages.items():
        for stage, pair in model.stages(even_chunks(model.workload.rows, int(degree))).items():
            for direction in Direction:
                if not stage.is_communication:
                    key = (stage.kind.name, direction)
                    expected.setdefault(key, []).append(pair.of(direction))
                    took.setdefault(key, []).append(by_direction[direction][str(stage)])
    found = {}
    for kind in KINDS:
        if (kind, Direction.FORWARD) in took:
            fits = [factor_and_rest(expected[kind, way], took[kind, way]) for way in Direction]
            found[kind] = make.stage_overhead(fits)
    fits = [
        (
            statistics.median(getattr(figure, f"{way}_factor") for figure in found.values()),
            statistics.median(getattr(figure, f"{way}_us") for figure in found.values()),
        )
        for way in Direction
    ]
    return {"any": make.stage_overhead(fits), **found}


def _rounded(value: float) -> float:
    """Five digits; none of these times is reproducible to so many."""
    return float(f"{value:.5g}")
