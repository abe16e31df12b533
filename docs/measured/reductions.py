"""Whole trainings with gradients reduced after the backward pass, as Megatron overlaps it, and placed.

Four layers of ``cpu-small``, one expert per token, in turns. ``dp2-ep2``: four ranks, two expert-parallel and
two data-parallel, at 200 Mbit/s. ``positions``: two expert-parallel ranks at 100 Mbit/s and a learned table
of positions, which is reduced too. A layer has several buckets. The first iterations do not count: Megatron
overlaps nothing in the first.

Megatron's timer ``all-grads-sync`` says how long a rank waits for reductions after the last backward pass;
the shortest of the ranks counts, which waits for no other one. Backward passes are timed too (Megatron's
timer ``backward-compute``, the longest of the ranks).

    python docs/measured/reductions.py positions docs/measured/results/reductions-positions.json --degree 4

Four ranks on two cores compute in turns: while one waits for the network, the other one of its core computes,
so a wait costs little. ``--dilation 5`` shows what ranks with a core each would do: all that a rank computes
takes five times as long, as it sleeps four times as long as it has computed, and the link has a fifth of the
rate. Ratios of computation and transfers stay, and the cores are idle for most of the time. Times are written
divided by five. What the network itself takes of a core is not dilated.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ampipe.tools.measuring import machine
from megatron_ampipe.tools.measuring.grid import find_grid, read_grid
from megatron_ampipe.tools.measuring.network import parse_link
from megatron_ampipe.tools.measuring.ranks import Rank, signals_as_interrupts
from megatron_ampipe.tools.measuring.training import (
    Curve,
    TrainingJob,
    loss_difference,
    run,
    train,
    training_flags,
)

LAYERS = 4
TIMERS = ("--timing-log-level", "2", "--no-barrier-with-level-1-timing")
SYNC = re.compile(r"all-grads-sync \.+: \(([0-9.]+), [0-9.]+\)")
BACKWARD = re.compile(r"backward-compute \.+: \([0-9.]+, ([0-9.]+)\)")
OVERLAP = ("--overlap-grad-reduce", "--ddp-bucket-size", "250000")
VARIANTS = {
    "after the pass": (),
    "overlapped": OVERLAP,
    "placed": (*OVERLAP, "--ampipe-grad-reduce", "placed"),
}
PLACES = {
    "dp2-ep2": (4, 200, ("--expert-model-parallel-size", "2")),
    "positions": (2, 100, ("--position-embedding-type", "learned_absolute")),
}
"""Ranks, rate of the link in Mbit/s, and further flags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DilatedJob(TrainingJob):
    """A training whose computation takes ``dilation`` times as long."""

    dilation: int


def arguments() -> argparse.Namespace:
    """What to measure, and how often."""
    parser = argparse.ArgumentParser()
    parser.add_argument("place", choices=PLACES)
    parser.add_argument("file", type=Path)
    parser.add_argument("--degree", type=int, default=4)
    parser.add_argument("--schedule", default="ampipe")
    parser.add_argument("--sequence-length", type=int, help="of the case: 2048")
    parser.add_argument("--micro-batches", type=int, default=2, help="of a rank in an iteration")
    parser.add_argument("--dilation", type=int, default=1, help="how much longer computation takes")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=4, help="iterations of a training that count")
    parser.add_argument("--warmup", type=int, default=2, help="iterations before them")
    return parser.parse_args()


def main() -> None:
    """Measure one place and write the document."""
    asked = arguments()
    num_ranks, rate, changed = PLACES[asked.place]
    link = f"{rate / asked.dilation:g}mbit"
    (case,) = read_grid(find_grid("cpu-small"), only="top1")
    case = replace(case, sequence_length=asked.sequence_length or case.sequence_length)
    iterations = asked.warmup + asked.repeats
    flags = (
        *training_flags(case, layers=LAYERS, num_ranks=num_ranks, iterations=iterations, seed=1234),
        *(*changed, *TIMERS, "--ampipe-degree", str(asked.degree), "--ampipe-schedule", asked.schedule),
        *("--global-batch-size", str(case.batch * num_ranks * asked.micro_batches)),
    )
    variants = asked.variants
    curves: dict[str, list[Curve]] = {name: [] for name in variants}
    waits: dict[str, list[float]] = {name: [] for name in variants}
    passes: dict[str, list[float]] = {name: [] for name in variants}
    with signals_as_interrupts():
        for round_ in range(asked.rounds):
            first_of_round = round_ % len(variants)
            for name in (*variants[first_of_round:], *variants[:first_of_round]):
                job = DilatedJob(
                    dilation=asked.dilation,
                    flags=(*flags, *VARIANTS[name]),
                    stock_attends_as=None,
                    link=parse_link(link),
                    num_ranks=num_ranks,
                    timeout_s=600.0,
                )
                with tempfile.TemporaryDirectory() as folder:
                    log = Path(folder) / "log"
                    curve = run(job, iterations=iterations, title=name, work=work, log=log)
                    text = log.read_text(errors="replace")
                waited, passed = (
                    [float(ms) / asked.dilation for ms in timer.findall(text)] for timer in (SYNC, BACKWARD)
                )
                curve = replace(curve, ms=tuple(ms / asked.dilation for ms in curve.ms))
                assert len(waited) == len(passed) == iterations, (len(waited), len(passed), iterations)
                passes[name] += passed[asked.warmup :]
                curves[name].append(curve)
                waits[name] += waited[asked.warmup :]
                first = next(found[0] for found in curves.values() if found)
                difference, _ = loss_difference(first, curve)
                print(name, [round(ms) for ms in curve.ms[asked.warmup :]], f"{difference:.1e}", flush=True)
                print("  after the pass", [round(ms) for ms in waited[asked.warmup :]], flush=True)
    medians = {
        name: statistics.median(ms for curve in found for ms in curve.ms[asked.warmup :])
        for name, found in curves.items()
    }
    document = {
        "command": ["python", *sys.argv],
        "flags": list(flags),
        "variants": {name: list(VARIANTS[name]) for name in variants},
        "link": link,
        "dilation": asked.dilation,
        "ranks": num_ranks,
        "hardware": machine.hardware(),
        "versions": machine.versions(),
        "median ms": medians,
        "median ms after the pass": {name: statistics.median(found) for name, found in waits.items()},
        "median ms of backward passes": {name: statistics.median(found) for name, found in passes.items()},
        "waits ms": waits,
        "backward passes ms": passes,
        "trainings": {
            name: [{"ms": curve.ms, "lm loss": curve.lm_loss} for curve in found]
            for name, found in curves.items()
        },
    }
    asked.file.write_text(json.dumps(document, indent=1) + "\n")
    print(medians)


def work(rank: Rank[DilatedJob]) -> None:
    """One rank: a training that sleeps after each stage, and at the end of an iteration for all else."""
    from megatron_ampipe.launch import host

    host.install()
    from megatron.training import training

    from megatron_ampipe.runtime import executors

    job = rank.job
    run_on_host, train_step = executors.run_on_host, training.train_step
    computed_s = 0.0

    def longer_stage(*stage: Any) -> None:
        nonlocal computed_s
        begin = time.thread_time()
        run_on_host(*stage)
        spent = time.thread_time() - begin
        computed_s += spent
        time.sleep((job.dilation - 1) * spent)

    @functools.wraps(train_step)
    def longer_step(*inputs: Any, **more: Any) -> Any:
        nonlocal computed_s
        computed_s, begin = 0.0, time.thread_time()
        found = train_step(*inputs, **more)
        time.sleep((job.dilation - 1) * (time.thread_time() - begin - computed_s))
        return found

    executors.run_on_host, training.train_step = longer_stage, longer_step
    train(rank)


if __name__ == "__main__":
    main()
