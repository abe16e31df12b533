"""Makes a cluster file of what the ranks measured: lines of operations, then what a stage costs beyond.

The time of an operation is its median over repeats on a rank, and of these the maximum over ranks: a
collective is over when its slowest rank is, and a block waits for the slowest computation. Lines are fitted
by non-negative least squares, a time's square error counted relative to the time: small sizes count, and
cannot bend the line away from large ones; a negative figure would let small operations take no time at all.
Samples that no line fits are refused. The overheads are what is left of a real block's stages after
subtracting the operations that the cost model counts in them. Needs scipy, and no torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

import numpy as np
from scipy.optimize import nnls

from megatron_ampipe.errors import RunFailed
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
from megatron_ampipe.tools.measuring.grid import Case, block_of_case

LEAST_R_SQUARED = 0.9
"""A line that explains a smaller part of the spread of the times is refused."""
TOLERATED = 0.25
"""With all relative errors this small the line is accepted: where size hardly matters, r^2 says nothing."""
LEAST_FALL = 0.7
"""A larger size that takes less than this share of the time of a smaller one is refused."""
PRICE_OF_A_FACTOR = 0.02
"""The penalty of a factor over a time in :func:`factor_and_rest`: enough to decide between them, no more."""
_REMEDY = "Close other work and measure again, with more --repeats."
STOCK_EXCHANGE = ".stock_all_to_all"
"""Of whole blocks, one tensor after the other: the file has the time of every size. In a block, where ranks
do not begin together, it is slower still, by a factor taken from Megatron's own layer."""

HOST_NOISE_US = 200.0
"""Times of the same transfer differ by so much where the host computes: threads run in another order."""

KINDS: tuple[OverheadKind, ...] = ("qkv", "attention", "route", "shared", "expert", "merge")
"""Compute stages that can have a separate overhead."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One size of one operation.

    Attributes:
        family: Which operation: ``gemm``, ``intra.all_to_all``, ``attention.forward``.
        columns: What its time is made of: by the name of a figure of the cluster file, how often it counts.
        us: Microseconds.
    """

    family: str
    columns: Mapping[str, float]
    us: float


def slowest(reports: Sequence[Sequence[Mapping[str, Any]]]) -> list[Sample]:
    """Of each sample, the maximum over ranks.

    Args:
        reports: By rank, its samples, in the same order on every rank.
    """
    return [
        Sample(of_ranks[0]["family"], of_ranks[0]["columns"], max(found["us"] for found in of_ranks))
        for of_ranks in zip(*reports, strict=True)
    ]


def slowest_numbers(reports: Sequence[Any]) -> Any:
    """Mappings of mappings of numbers, one for each rank: the maximum of each number over ranks."""
    if isinstance(reports[0], Mapping):
        return {key: slowest_numbers([report[key] for report in reports]) for key in reports[0]}
    return max(reports)


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """What was fitted.

    Attributes:
        figures: By the name of a figure of the cluster file, its value, at least 0.
        r_squared: Share of the spread of the times that the line explains, at least 0.
        worst: The largest relative error over the samples.
    """

    figures: dict[str, float]
    r_squared: float
    worst: float


def fit(samples: Sequence[Sample], *, noise_us: float = 0.0) -> Line:
    """The line through the samples of one family.

    Args:
        samples: Of one family.
        noise_us: Smaller differences are ignored.

    Raises:
        RunFailed: no line fits; says which sample.
    """
    family = samples[0].family
    _require_rising(family, samples, noise_us)
    line, predicted = _nearest(samples)
    pairs = zip(samples, predicted, strict=True)
    sample, us = max(pairs, key=lambda pair: abs(pair[1] / pair[0].us - 1))
    far = line.worst > TOLERATED and abs(sample.us - us) > noise_us
    if not line.r_squared >= LEAST_R_SQUARED and far:
        raise RunFailed(
            f"{family}: no line fits the times (r^2 {line.r_squared:.3f}, and at least {LEAST_R_SQUARED} "
            f"is needed). Farthest off is {_size(sample)}: {sample.us:.0f} us, where the line has "
            f"{us:.0f} us. {_REMEDY}"
        )
    return line


def nearest_line(samples: Sequence[Sample]) -> Line:
    """The line with the least error, however large the error is."""
    return _nearest(samples)[0]


def factor_and_rest(expected: Sequence[float], took: Sequence[float]) -> tuple[float, float]:
    """A factor of at least 1 and a time of at least 0 that turn expected times into measured ones.

    A square error counts relative to the time, as above. Where both explain them equally well, as
    with stages that are all equal, it is the time.
    """
    times, models = np.array(took), np.array(expected)
    weights = np.maximum(times, 1.0) ** -0.5
    columns = np.stack([models, np.ones_like(models)], axis=1) * weights[:, None]
    beyond = np.maximum(times - models, 0.0) * weights
    price = [PRICE_OF_A_FACTOR * float(np.linalg.norm(columns[:, 0])), 0.0]
    (more, rest), _ = nnls(np.vstack([columns, price]), np.append(beyond, 0.0))
    return 1.0 + float(more), float(rest)


def _nearest(samples: Sequence[Sample]) -> tuple[Line, Sequence[float]]:
    """That line, and its time for each sample."""
    names = list(samples[0].columns)
    columns = np.array([[sample.columns[name] for name in names] for sample in samples])
    times = np.array([sample.us for sample in samples])
    weights = times**-0.5
    figures, _ = nnls(columns * weights[:, None], times * weights)
    predicted = columns @ figures
    spread = float(((times - times.mean()) ** 2).sum())
    r_squared = 1 - float(((times - predicted) ** 2).sum()) / spread if spread else 1.0
    worst = float(np.abs(predicted / times - 1).max())
    values = dict(zip(names, (float(value) for value in figures), strict=True))
    return Line(values, max(0.0, r_squared), worst), [float(us) for us in predicted]


def _require_rising(family: str, samples: Sequence[Sample], noise_us: float) -> None:
    """If the samples differ in one size only, a larger one must not be faster."""
    sizes = {name for name in samples[0].columns if name != "alpha_us"}
    if len(sizes) != 1:
        return
    (name,) = sizes
    ordered = sorted(samples, key=lambda sample: sample.columns[name])
    for smaller, larger in itertools.pairwise(ordered):
        if larger.us < LEAST_FALL * smaller.us and smaller.us - larger.us > noise_us:
            raise RunFailed(
                f"{family}: {_size(larger)} took {larger.us:.0f} us, and the smaller {_size(smaller)} "
                f"{smaller.us:.0f} us. {_REMEDY}"
            )


def _size(sample: Sample) -> str:
    units = {"beta_us_per_mb": "MB", "beta_us_per_gflop": "GFLOP", "weights_us_per_million": "M weights",
             "merge_us_per_mb": "MB merged"}  # fmt: skip
    parts = [f"{value:.4g} {units[name]}" for name, value in sample.columns.items() if name in units]
    return ", ".join(parts)


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
        reports: What each rank found (:func:`.operations.measure`).
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
    measured = slowest_numbers(blocks)
    noise_us = 0.0 if measured["issue"] else HOST_NOISE_US
    lines = {
        family: nearest_line(samples) if family.endswith(STOCK_EXCHANGE) else fit(samples, noise_us=noise_us)
        for family, samples in families.items()
    }
    tables = {
        family: _table(samples) for family, samples in families.items() if family.endswith(STOCK_EXCHANGE)
    }
    slowdowns = slowest_numbers([report["slowdowns"] for report in reports])
    figures = _Figures(lines, tables, source)
    overhead = figures.overhead(0.0, 0.0)
    cluster = Cluster(
        description=description,
        ranks_per_node=ranks_per_node,
        device_memory_gib=device_memory_gib,
        intra=figures.collectives("intra"),
        inter=figures.collectives("inter"),
        compute=Compute(
            gemm={case.dtype: figures.make(Gemm, "gemm")},
            attention={
                case.dtype: Attention(
                    forward=figures.make(AttentionLine, "attention.forward"),
                    backward=figures.make(AttentionLine, "attention.backward"),
                )
            },
            memory=figures.make(TransferCost, "memory"),
            permute=figures.make(TransferCost, "permute"),
            copy=figures.make(TransferCost, "copy"),
        ),
        host=Host(
            issue=figures.overhead(measured["issue"], measured["issue"]),
            issue_of={kind: figures.overhead(*times) for kind, times in issue_of.items()} or None,
            stage={"any": figures.stage_overhead([(1.0, 0.0)] * 2)},
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
    block = block_of_case(case, num_ranks=len(reports), fused_gradients=reports[0]["fused_gradients"])
    model = CostModel(block, cluster)
    beyond = {way: measured["stock"][way] - model.stock().of(way) for way in Direction}
    if tables:
        exchanges = model.stock_exchanges()
        slower = 1 + max(0.0, sum(beyond.values())) / (exchanges.forward + exchanges.backward)
        cluster = dataclasses.replace(
            cluster, intra=_slower(cluster.intra, slower), inter=_slower(cluster.inter, slower)
        )
        beyond = dict.fromkeys(Direction, 0.0)
    host = dataclasses.replace(
        cluster.host,
        stage=_stage_overheads(model, measured["stages"], figures),
        block=figures.overhead(
            *(statistics.median(of[way] for of in measured["around"].values()) for way in Direction)
        ),
        stock=figures.overhead(*(beyond[way] for way in Direction)),
    )
    return Profile(dataclasses.replace(cluster, host=host), lines)


def _issued(
    case: Case, reports: Sequence[Mapping[str, Mapping[str, float]]], *, num_ranks: int
) -> dict[IssuedKind, tuple[float, float]]:
    """By kind, the time to issue a stage in both directions, with one local expert, of the slowest host.

    A kind that some rank could not measure, because its host waits for the device, is left out.
    """
    block = block_of_case(case, num_ranks=num_ranks, fused_gradients=False)
    kinds = {kind.name: kind for kind in MOE_BLOCK}
    found: dict[IssuedKind, tuple[float, float]] = {}
    for name in get_args(IssuedKind):
        times = []
        for way in Direction:
            of_ranks = [report.get(way.value, {}).get(name) for report in reports]
            measured = [us for us in of_ranks if us is not None]
            if len(measured) == len(of_ranks):
                times.append(max(measured) / issued_parts(kinds[name], way, block))
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

    def make[Record](self, kind: type[Record], family: str) -> Record:
        """The figures of one operation."""
        line = self._lines[family]
        fields: dict[str, Any] = {name: _rounded(value) for name, value in line.figures.items()}
        if family in self._tables:
            fields["table"] = self._tables[family]
        r_squared = round(line.r_squared, 4)
        return kind(**fields, basis="measured", source=self._source, r_squared=r_squared)

    def collectives(self, group: str) -> dict[Operation, TransferCost] | None:
        names = [family.partition(".")[2] for family in self._lines if family.startswith(f"{group}.")]
        return {cast(Operation, name): self.make(TransferCost, f"{group}.{name}") for name in names} or None

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


def _stage_overheads(
    model: CostModel, stages: Mapping[str, Mapping[str, Mapping[str, float]]], figures: _Figures
) -> dict[OverheadKind, StageOverhead]:
    """By kind of stage, what its stages of all degrees took beyond what the model counts in them."""
    expected: dict[tuple[str, Direction], list[float]] = {}
    took: dict[tuple[str, Direction], list[float]] = {}
    for degree, by_direction in stages.items():
        for stage, pair in model.stages(even_chunks(model.block.rows, int(degree))).items():
            for direction in Direction:
                if not stage.is_communication:
                    key = (stage.kind.name, direction)
                    expected.setdefault(key, []).append(pair.of(direction))
                    took.setdefault(key, []).append(by_direction[direction][str(stage)])
    found = {}
    for kind in KINDS:
        if (kind, Direction.FORWARD) in took:
            fits = [factor_and_rest(expected[kind, way], took[kind, way]) for way in Direction]
            found[kind] = figures.stage_overhead(fits)
    fits = [
        (
            statistics.median(getattr(figure, f"{way}_factor") for figure in found.values()),
            statistics.median(getattr(figure, f"{way}_us") for figure in found.values()),
        )
        for way in Direction
    ]
    return {"any": figures.stage_overhead(fits), **found}


def _rounded(value: float) -> float:
    """Five digits; none of these times is reproducible to so many."""
    return float(f"{value:.5g}")
