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
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
from scipy.optimize import nnls

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


@dataclass(frozen=True, slots=True)
class Sample:
    """One size of one operation.

    Attributes:
        family: The operation: ``gemm``, ``intra.all_to_all``, ``attention.forward``.
        columns: How often each figure of the cluster file counts in its time, by name.
        us: Microseconds.
    """

    family: str
    columns: Mapping[str, float]
    us: float


def slowest(reports: Sequence[Any]) -> Any:
    """Combine the ranks' reports, which have the same form: every number is the maximum over ranks."""
    first = reports[0]
    if isinstance(first, Mapping):
        return {key: slowest([report[key] for report in reports]) for key in first}
    if isinstance(first, list):
        return [slowest(by_rank) for by_rank in zip(*reports, strict=True)]
    if isinstance(first, Sample):
        return replace(first, us=max(sample.us for sample in reports))
    return max(reports)


def fit(samples: Sequence[Sample], *, noise_us: float = 0.0) -> tuple[dict[str, float], float]:
    """The line through the samples of one family; RunFailed if none fits by more than ``noise_us``.

    Returns:
        The figures of the cluster file by name, at least 0; and the share of the variance of the times that
        the line explains, at least 0.
    """
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
    times, models = np.array(took), np.array(expected)
    weights = np.maximum(times, 1.0) ** -0.5
    columns = np.stack([models, np.ones_like(models)], axis=1) * weights[:, None]
    beyond = np.maximum(times - models, 0.0) * weights
    price = [PRICE_OF_A_FACTOR * float(np.linalg.norm(columns[:, 0])), 0.0]
    (more, rest), _ = nnls(np.vstack([columns, price]), np.append(beyond, 0.0))
    return 1.0 + float(more), float(rest)


def assemble(
    case: Case,
    reports: Sequence[Mapping[str, Any]],
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
    samples, blocks, slowdowns = (
        slowest([report[key] for report in reports]) for key in ("samples", "block", "slowdowns")
    )
    block = block_of_case(case, num_ranks=len(reports), fused_gradients=reports[0]["fused_gradients"])
    issue_of = [report["issue_of"] for report in reports]
    on_host = not any(issue_of)
    families: dict[str, list[Sample]] = {}
    for sample in samples:
        families.setdefault(sample.family, []).append(sample)
    noise_us = HOST_NOISE_US if on_host else 0.0
    lines = {family: fit(family_samples, noise_us=noise_us) for family, family_samples in families.items()}
    measured: dict[str, Any] = {"basis": "measured", "source": source}

    def figure(kind: type[Any], family: str) -> Any:
        """The figures of one operation."""
        values, r_squared = lines[family]
        rounded = {name: _rounded(value) for name, value in values.items()}
        return kind(**rounded, **measured, r_squared=round(r_squared, 4))

    def collectives(group: str, *, stock_factor: float = 1.0) -> Any:
        """On a host also Megatron's exchange, which is ``stock_factor`` times as slow."""
        families = [family for family in lines if family.startswith(f"{group}.")]
        figures = {family.partition(".")[2]: figure(TransferCost, family) for family in families}
        if figures and on_host:
            direct = figures.get("direct_all_to_all", figures["all_to_all"])
            alpha, beta = (_rounded(us * stock_factor) for us in (direct.alpha_us, direct.beta_us_per_mb))
            figures["stock_all_to_all"] = replace(direct, alpha_us=alpha, beta_us_per_mb=beta)
        return figures or None

    def overhead(forward_us: float, backward_us: float, *, kind: Any = Overhead, **factors: float) -> Any:
        """At least 0: an overhead cannot correct a model that counts too much."""
        times = {"forward_us": forward_us, "backward_us": backward_us}
        rounded = {name: _rounded(max(0.0, value)) for name, value in (times | factors).items()}
        return kind(**measured, **rounded)

    forward_issues = [statistics.fmean(by_kind.get("forward", {}).values() or [0.0]) for by_kind in issue_of]
    by_kind = {kind: overhead(*times) for kind, times in _issued(block, issue_of).items()}
    attention = {way: figure(AttentionLine, f"attention.{way}") for way in Direction}
    cluster = Cluster(
        description=description,
        ranks_per_node=ranks_per_node,
        device_memory_gib=device_memory_gib,
        intra=collectives("intra"),
        inter=collectives("inter"),
        compute=Compute(
            gemm={case.dtype: figure(Gemm, "gemm")},
            attention={case.dtype: Attention(**attention)},
            memory=figure(TransferCost, "memory"),
            permute=figure(TransferCost, "permute"),
            copy=figure(TransferCost, "copy"),
        ),
        host=Host(
            issue=overhead(max(forward_issues), max(forward_issues)),
            issue_of=by_kind or None,
            stage={"any": overhead(0.0, 0.0, kind=StageOverhead)},
            block=overhead(*(blocks["around"][way] for way in Direction)),
            stock=overhead(0.0, 0.0),
        ),
        overlap=Overlap(**measured, **{name: _rounded(value) for name, value in slowdowns.items()}),
    )
    model = Predictor(block, cluster)
    beyond = {way: blocks["stock"][way] - model.stock().of(way) for way in Direction}
    if on_host:
        # The ranks of a block do not begin together: the unexplained time of a block is in its exchanges.
        exchanges = model.stock_exchanges()
        slower = 1 + max(0.0, sum(beyond.values())) / (exchanges.forward + exchanges.backward)
        intra, inter = (collectives(group, stock_factor=slower) for group in ("intra", "inter"))
        cluster = replace(cluster, intra=intra, inter=inter)
        beyond = dict.fromkeys(Direction, 0.0)
    fits = _beyond_the_model(model, blocks["stages"])
    names = next(iter(fits.values()))
    medians = {name: statistics.median(figures[name] for figures in fits.values()) for name in names}
    stage = {
        kind: overhead(**figures, kind=StageOverhead) for kind, figures in ({"any": medians} | fits).items()
    }
    return replace(cluster, host=replace(cluster.host, stage=stage, stock=overhead(*beyond.values())))


def _issued(block: Block, reports: Sequence[Mapping[str, Any]]) -> dict[IssuedKind, list[float]]:
    """By kind, the slowest host's times to issue a stage, with one local expert, if all measured it."""
    kinds = {kind.name: kind for kind in MOE_BLOCK}
    issued_us: dict[IssuedKind, list[float]] = {}
    for name in get_args(IssuedKind):
        # A backward pass has no counts.
        ways = [Direction.FORWARD] if name == "counts" else list(Direction)
        times = [[report.get(way, {}).get(name) for report in reports] for way in ways]
        if all(None not in by_rank for by_rank in times):
            parts = (issued_parts(kinds[name], way, block) for way in ways)
            issued_us[name] = [max(by_rank) / part for by_rank, part in zip(times, parts, strict=True)]
            issued_us[name] += [0.0] * (name == "counts")
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


def _rounded(value: float) -> float:
    """Five digits; none of these times is reproducible to so many."""
    return float(f"{value:.5g}")
