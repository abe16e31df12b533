"""Makes a cluster of what was measured: a line for every operation, then what a stage costs beyond them.

Pure, with scipy. The overheads are what is left of a real block's stages when the operations that the cost
model counts in them are taken away. Called by ``ampipe profile``.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, cast

from megatron_ampipe.errors import RunFailed
from megatron_ampipe.plan.cluster import (
    Attention,
    AttentionLine,
    Cluster,
    Compute,
    Gemm,
    Host,
    Operation,
    Overhead,
    Overlap,
    StageKind,
    Transfer,
)
from megatron_ampipe.plan.cost import CostModel
from megatron_ampipe.plan.rows import even_chunks
from megatron_ampipe.schedule import Direction
from megatron_ampipe.tools.benchmark.grid import Case
from megatron_ampipe.tools.profiling.fit import Line, fit
from megatron_ampipe.tools.profiling.samples import Sample, slowest, slowest_numbers
from megatron_ampipe.tools.profiling.workload import workload_of_case

STOCK_EXCHANGE = ".stock_all_to_all"
"""No choice depends on it, only the time of Megatron's layer. With gloo it has two speeds (docs/log.md)."""

KINDS: tuple[StageKind, ...] = ("qkv", "attention", "route", "shared", "expert", "merge")
"""Compute stages that can have an overhead of their own."""


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """A measured cluster, and how well the lines lie.

    Attributes:
        cluster: What goes into the file.
        lines: By operation, what was fitted.
        left_out: What was odd about operations that the planner can do without.
    """

    cluster: Cluster
    lines: Mapping[str, Line]
    left_out: tuple[str, ...]


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
        case: Around which was measured.
        reports: What each rank found (:func:`.measure.measure`).
        ranks_per_node: Ranks on one machine.
        description: For the file.
        source: Where the figures come from, for every one of them.
        device_memory_gib: Of one rank, on GPUs.

    Raises:
        RunFailed: the times of some operation that the planner needs lie on no line.
    """
    families: dict[str, list[Sample]] = {}
    for sample in slowest([report["samples"] for report in reports]):
        families.setdefault(sample.family, []).append(sample)
    lines, left_out = _fit_all(families)
    block = slowest_numbers([report["block"] for report in reports])
    slowdowns = slowest_numbers([report["slowdowns"] for report in reports])
    make = _Figures(lines, source)
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
        ),
        host=Host(
            issue=make.overhead(block["issue"], block["issue"]),
            stage={"any": overhead},
            block=overhead,
            stock=overhead,
        ),
        overlap=Overlap(
            basis="measured",
            source=source,
            compute_slowdown=_rounded(slowdowns["compute"]),
            communication_slowdown=_rounded(slowdowns["communication"]),
        ),
    )
    model = CostModel(workload_of_case(case, num_ranks=ranks_per_node), cluster)
    host = dataclasses.replace(
        cluster.host,
        stage=_stage_overheads(model, block["stages"], make),
        block=make.overhead(
            *(statistics.median(of[way] for of in block["around"].values()) for way in Direction)
        ),
        stock=make.overhead(*(block["stock"][way] - model.stock().of(way) for way in Direction)),
    )
    return Profile(dataclasses.replace(cluster, host=host), lines, left_out)


def _fit_all(families: Mapping[str, list[Sample]]) -> tuple[dict[str, Line], tuple[str, ...]]:
    lines, left_out = {}, []
    for family, samples in families.items():
        try:
            lines[family] = fit(samples)
        except RunFailed as error:
            if not family.endswith(STOCK_EXCHANGE):
                raise
            left_out.append(
                f"{error} It is left out: Megatron's exchange is taken to be as fast as AMPipe's."
            )
    return lines, tuple(left_out)


class _Figures:
    """Makes the records of a cluster file out of lines."""

    def __init__(self, lines: Mapping[str, Line], source: str) -> None:
        self._lines, self._source = lines, source

    def transfer(self, family: str) -> Transfer:
        return Transfer(**self._fields(family))

    def gemm(self) -> Gemm:
        return Gemm(**self._fields("gemm"))

    def attend(self, direction: str) -> AttentionLine:
        return AttentionLine(**self._fields(f"attention.{direction}"))

    def collectives(self, group: str) -> dict[Operation, Transfer] | None:
        names = [family.partition(".")[2] for family in self._lines if family.startswith(f"{group}.")]
        return {cast(Operation, name): self.transfer(f"{group}.{name}") for name in names} or None

    def overhead(self, forward_us: float, backward_us: float) -> Overhead:
        """At least 0: what the model counts too much, no overhead can take away."""
        return Overhead(
            basis="measured",
            source=self._source,
            forward_us=_rounded(max(0.0, forward_us)),
            backward_us=_rounded(max(0.0, backward_us)),
        )

    def _fields(self, family: str) -> dict[str, Any]:
        line = self._lines[family]
        figures = {name: _rounded(value) for name, value in line.figures.items()}
        return {**figures, "basis": "measured", "source": self._source, "r_squared": round(line.r_squared, 4)}


def _stage_overheads(
    model: CostModel, stages: Mapping[str, Mapping[str, Mapping[str, float]]], make: _Figures
) -> dict[StageKind, Overhead]:
    """By kind of stage, the median of what its stages took beyond what the model counts in them."""
    beyond: dict[tuple[str, Direction], list[float]] = {}
    for degree, by_direction in stages.items():
        expected = model.stages(even_chunks(model.workload.rows, int(degree)))
        for stage, pair in expected.items():
            if stage.is_communication:
                continue
            for direction in Direction:
                took = by_direction[direction][str(stage)]
                beyond.setdefault((stage.kind, direction), []).append(took - pair.of(direction))
    found = {
        kind: make.overhead(*(statistics.median(beyond[kind, direction]) for direction in Direction))
        for kind in KINDS
        if (kind, Direction.FORWARD) in beyond
    }
    typical = statistics.median(figure.forward_us for figure in found.values())
    typical_backward = statistics.median(figure.backward_us for figure in found.values())
    return {"any": make.overhead(typical, typical_backward), **found}


def _rounded(value: float) -> float:
    """Five digits: more than any of these times repeats."""
    return float(f"{value:.5g}")
