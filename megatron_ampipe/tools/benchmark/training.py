"""``ampipe bench --end-to-end``: whole trainings in turns, stock and AMPipe's, and whether losses are equal.

Every training is Megatron's own loop as ``-m megatron_ampipe.pretrain_gpt`` runs it, on a CPU, from the same
seed. A round trains every variant once, in an order that is rotated from round to round, so that a
machine that becomes slower affects all equally. Times are those of Megatron's log. Called by
:mod:`megatron_ampipe.tools.bench_command`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_ampipe.errors import DifferenceFound, RunFailed
from megatron_ampipe.schedule import KEEP, Exchange
from megatron_ampipe.tools.benchmark.bench_job import BenchJob
from megatron_ampipe.tools.benchmark.result import percentile, speedup, with_control
from megatron_ampipe.tools.benchmark.table import (
    OF_CONTROL,
    OF_GLOO,
    OF_STACKS,
    megatrons_again,
    speedup_cells,
    unfinished,
)
from megatron_ampipe.tools.benchmark.training_job import (
    MICRO_BATCHES,
    TrainingJob,
    training_flags,
    variant_flags,
)
from megatron_ampipe.tools.measuring import rank_processes
from megatron_ampipe.tools.measuring.grid import Case
from megatron_ampipe.tools.measuring.variant import STOCK_GLOO, Variant

FORMAT = "ampipe-training-1"
TOLERANCE = 1e-5
"""Largest relative difference of the losses that still counts as the same curve."""

_CAPTION = (
    "ms: an iteration (all layers, optimizer and gradient reduction included) by Megatron's log, median. "
    "speedup: median of stock / this at the same iteration of the same round, and the 10th to 90th "
    "percentile. loss difference: the largest of all iterations, relative to stock."
)


@dataclass(frozen=True, slots=True)
class Curve:
    """What one training logged, by iteration.

    Attributes:
        ms: Milliseconds.
        lm_loss: The loss.
    """

    ms: tuple[float, ...]
    lm_loss: tuple[float, ...]


def measure(job: BenchJob, *, rounds: int, on_iteration: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Train every case with every variant, as often as there are rounds.

    Args:
        job: Cases, variants, link and ranks; ``warmup`` and ``repeats`` are iterations of a training that do
            not and that do count.
        rounds: Trainings of each variant.
        on_iteration: Called at every iteration with what is trained.

    Yields:
        The entries ``cases`` of the document, each when it is measured.

    Raises:
        DifferenceFound: a loss differs from the stock training's.
        RunFailed: a training did not come to its end.
    """
    # Between two trainings there is nothing to clean up, but the exit code should be the same.
    with rank_processes.signals_as_interrupts():
        for number, case in enumerate(job.cases):
            variants = job.variants_of(number)
            curves: list[list[Curve]] = [[] for _ in variants]
            for round_ in range(rounds):
                for step in range(len(variants)):
                    index = (round_ + step) % len(variants)
                    variant = variants[index]
                    curves[index].append(_train(case, variant, job, on_iteration=on_iteration))
                    # The first training of all is stock's.
                    _check_same(case, variants, curves)
            yield case_result(case, job, variants, curves)


def _flags(case: Case, job: BenchJob) -> tuple[str, ...]:
    iterations = job.warmup + job.repeats
    return training_flags(
        case, layers=job.layers, num_ranks=job.num_ranks, iterations=iterations, seed=job.seed
    )


def _train(case: Case, variant: Variant, job: BenchJob, *, on_iteration: Callable[[str], None]) -> Curve:
    """One training, on newly started ranks."""
    training = TrainingJob(
        flags=(*_flags(case, job), *variant_flags(variant)),
        stock_attends_as=None if variant.pipelined else case.dtype,
        link=job.link,
        num_ranks=job.num_ranks,
        timeout_s=job.timeout_s,
        cores=job.cores,
        gloo_all_to_all=variant.schedule == STOCK_GLOO,
    )
    return run(
        training,
        iterations=job.warmup + job.repeats,
        title=f"case {case.name}: the training of {variant}",
        on_iteration=lambda _: on_iteration(f"{case.name}, {variant}"),
    )


def run(
    training: TrainingJob,
    *,
    iterations: int,
    title: str,
    on_iteration: Callable[[float], None],
    log: Path | None = None,
) -> Curve:
    """Run one training to its end.

    Args:
        training: What to run.
        iterations: How many it is to log.
        title: What an error calls it.
        on_iteration: Told the loss of every iteration.
        log: File that receives what all ranks print; None for temporary files, one for each rank.

    Raises:
        RunFailed: a rank failed, or an iteration is missing.
        EnvironmentMissing: the network cannot be made.
    """
    found = []
    with rank_processes.started(training, timeout_s=training.timeout_s, log=log) as running:
        for _, answer in running.events(timeout_s=training.timeout_s):
            if answer["event"] == "iteration":
                found.append((answer["number"], answer["ms"], answer["lm_loss"]))
                on_iteration(answer["lm_loss"])
    if [number for number, *_ in found] != list(range(1, iterations + 1)):
        raise RunFailed(f"{title} logged {len(found)} of {iterations} iterations")
    return Curve(tuple(ms for _, ms, _ in found), tuple(loss for *_, loss in found))


def _check_same(case: Case, variants: Sequence[Variant], curves: Sequence[Sequence[Curve]]) -> None:
    for variant, found in zip(variants, curves, strict=True):
        for curve in found:
            difference, iteration = loss_difference(curves[0][0], curve)
            # Written so that NaN is a difference.
            if not difference <= TOLERANCE:
                raise DifferenceFound(
                    f"case {case.name}: the loss of {variant} differs from the stock training's by "
                    f"{difference:.1e} at iteration {iteration}, allowed is {TOLERANCE:.0e}. Over many "
                    "iterations a tie between experts can do this: use fewer, or another --seed."
                )


def loss_difference(stock: Curve, other: Curve) -> tuple[float, int]:
    """The largest relative difference of the losses, and the iteration, from 1, that has it."""
    differences = [abs(b - a) / max(abs(a), 1e-12) for a, b in zip(stock.lm_loss, other.lm_loss, strict=True)]
    # NaN is the largest.
    place = max(range(len(differences)), key=lambda i: (differences[i] != differences[i], differences[i]))
    return differences[place], place + 1


def case_result(
    case: Case, job: BenchJob, variants: Sequence[Variant], curves: Sequence[Sequence[Curve]]
) -> dict[str, Any]:
    """One entry of ``cases`` in the document.

    Args:
        case: The block.
        job: What was trained.
        variants: Of this case; stock first.
        curves: By variant and round.
    """
    timed = [[ms for curve in of_rounds for ms in curve.ms[job.warmup :]] for of_rounds in curves]
    rows = []
    for variant, samples, of_rounds in zip(variants[1:], timed[1:], curves[1:], strict=True):
        rows.append(
            {
                "schedule": variant.schedule,
                "degree": variant.cut.degree,
                "cut": str(variant.cut),
                "layers": job.layers,
                "stack": variant.stack,
                "memory": variant.memory,
                "exchange": variant.exchange,
                **_speed(samples),
                **speedup(timed[0], samples),
                "loss_difference": max(loss_difference(curves[0][0], curve)[0] for curve in of_rounds),
                "trainings": [asdict(curve) for curve in of_rounds],
            }
        )
    return {
        "name": case.name,
        "block": asdict(case),
        "flags": list(_flags(case, job)),
        "layers": job.layers,
        "stock": {**_speed(timed[0]), "trainings": [asdict(curve) for curve in curves[0]]},
        **with_control(rows),
    }


def _speed(samples_ms: Sequence[float]) -> dict[str, float]:
    median = statistics.median(samples_ms)
    return {
        "ms": round(median, 2),
        "ms_p10": round(percentile(samples_ms, 0.1), 2),
        "ms_p90": round(percentile(samples_ms, 0.9), 2),
        "iterations_per_s": round(1e3 / median, 4),
    }


def settings(*, rounds: int) -> dict[str, Any]:
    """What the document holds in addition to what every document of ``ampipe bench`` holds."""
    return {
        "format": FORMAT,
        "rounds": rounds,
        "micro_batches": MICRO_BATCHES,
        "loss_tolerance": TOLERANCE,
    }


def show(document: Mapping[str, Any], console: Console) -> None:
    """Print one row for each training of each case."""
    title = (
        f"training · grid {document['grid']}, {document['layers']} layers · link {document['link']} · "
        f"{document['ranks']} ranks{unfinished(document)}"
    )
    again = [row for case in document["cases"] for row in megatrons_again(case)]
    on_gloo = any(row["schedule"] == STOCK_GLOO for row in again)
    caption = _CAPTION + OF_CONTROL * bool(again) + OF_GLOO * on_gloo + OF_STACKS * (document["layers"] > 1)
    table = Table(title=title, caption=caption, caption_justify="left")
    table.add_column("case", overflow="fold")
    table.add_column("layers of")
    stacked = document["layers"] > 1
    rows = [row for case in document["cases"] for row in case["rows"]]
    several = any(row.get("memory", KEEP) != KEEP for row in rows)
    # Absent from older results.
    exchanged = any(row.get("exchange", Exchange.ROWS) != Exchange.ROWS for row in rows)
    for column in (
        *["stack"] * stacked,
        *["memory"] * several,
        *["exchange"] * exchanged,
        "degree",
        "ms",
        "10-90 %",
        "iterations/s",
        "speedup",
        "10-90 %",
        "loss difference",
    ):
        table.add_column(column, justify="right")
    for case in document["cases"]:
        fastest = min((row["ms"] for row in case["rows"]), default=None)
        blank = [""] * (1 + stacked + several + exchanged)
        table.add_row(case["name"], "stock", *blank, *_speed_cells(case["stock"]))
        for row in megatrons_again(case):
            difference = f"{row['loss_difference']:.1e}"
            table.add_row("", row["schedule"], *blank, *_speed_cells(row), *speedup_cells(row), difference)
        for row in case["rows"]:
            table.add_row(
                "",
                row["schedule"],
                *([str(row["stack"])] if stacked else []),
                *([row.get("memory", KEEP)] if several else []),
                *([row["exchange"]] if exchanged else []),
                row["cut"],
                *_speed_cells(row),
                *speedup_cells(row),
                f"{row['loss_difference']:.1e}",
                style="bold" if row["ms"] == fastest else None,
            )
        table.add_section()
    console.print(table)


def _speed_cells(speed: Mapping[str, Any]) -> tuple[str, str, str]:
    return (
        f"{speed['ms']:.1f}",
        f"{speed['ms_p10']:.1f}-{speed['ms_p90']:.1f}",
        f"{speed['iterations_per_s']:.3f}",
    )
