"""Whole trainings with gradients reduced after the backward pass, as Megatron overlaps it, and placed.

Four layers of ``cpu-small``, one expert per token, in turns. ``dp2-ep2``: four ranks, two expert-parallel and
two data-parallel, at 200 Mbit/s. ``positions``: two expert-parallel ranks at 100 Mbit/s and a learned table
of positions, which is reduced too. A layer has several buckets. The first iterations do not count: Megatron
overlaps nothing in the first.

    python docs/measured/reductions.py positions docs/measured/reductions-positions.json --degree 4
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from megatron_ampipe.tools.benchmark.training import Curve, loss_difference, run
from megatron_ampipe.tools.benchmark.training_job import TrainingJob, training_flags
from megatron_ampipe.tools.measuring import machine, rank_processes
from megatron_ampipe.tools.measuring.grid import find_grid, read_grid

LAYERS, WARMUP = 4, 2
OVERLAP = ("--overlap-grad-reduce", "--ddp-bucket-size", "250000")
VARIANTS = {
    "after the pass": (),
    "overlapped": OVERLAP,
    "placed": (*OVERLAP, "--ampipe-grad-reduce", "placed"),
}
PLACES = {
    "dp2-ep2": (4, "200mbit", ("--expert-model-parallel-size", "2")),
    "positions": (2, "100mbit", ("--position-embedding-type", "learned_absolute")),
}


def main() -> None:
    """Measure one place and write the document."""
    parser = argparse.ArgumentParser()
    parser.add_argument("place", choices=PLACES)
    parser.add_argument("file", type=Path)
    parser.add_argument("--degree", type=int, default=4)
    parser.add_argument("--schedule", default="ampipe")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=4)
    asked = parser.parse_args()
    num_ranks, link, changed = PLACES[asked.place]
    (case,) = read_grid(find_grid("cpu-small")).only("top1").cases
    iterations = WARMUP + asked.repeats
    flags = (
        *training_flags(case, layers=LAYERS, num_ranks=num_ranks, iterations=iterations, seed=1234),
        *(*changed, "--ampipe-degree", str(asked.degree), "--ampipe-schedule", asked.schedule),
    )
    curves: dict[str, list[Curve]] = {name: [] for name in VARIANTS}
    with rank_processes.signals_as_interrupts():
        for round_ in range(asked.rounds):
            names = list(VARIANTS)[round_ % len(VARIANTS) :] + list(VARIANTS)[: round_ % len(VARIANTS)]
            for name in names:
                job = TrainingJob(
                    flags=(*flags, *VARIANTS[name]),
                    stock_attends_as=None,
                    link=link,
                    num_ranks=num_ranks,
                    timeout_s=120.0,
                    cores=machine.cores_of(num_ranks),
                )
                curve = run(job, iterations=iterations, title=name, on_iteration=lambda _: None)
                curves[name].append(curve)
                first = next(found[0] for found in curves.values() if found)
                difference, _ = loss_difference(first, curve)
                print(name, [round(ms) for ms in curve.ms[WARMUP:]], f"{difference:.1e}", flush=True)
    medians = {
        name: statistics.median(ms for curve in found for ms in curve.ms[WARMUP:])
        for name, found in curves.items()
    }
    document = {
        "command": ["python", *sys.argv],
        "flags": list(flags),
        "variants": {name: list(words) for name, words in VARIANTS.items()},
        "link": link,
        "ranks": num_ranks,
        "hardware": machine.hardware(),
        "versions": machine.versions(),
        "median ms": medians,
        "trainings": {
            name: [{"ms": curve.ms, "lm loss": curve.lm_loss} for curve in found]
            for name, found in curves.items()
        },
    }
    asked.file.write_text(json.dumps(document, indent=1) + "\n")
    print(medians)


if __name__ == "__main__":
    main()
