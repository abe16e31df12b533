"""What recording the routing costs a training: iterations that record next to iterations that do not.

One training of the quick start's recipe on its text, two ranks without a slow link, which records every
fourth iteration. Megatron's log says how long an iteration took on the last rank. The first rank writes the
file, so a part of the cost can appear in the iteration after: both are compared with the one before and the
one after them, which makes a machine that slows down matter less.

    ampipe data --output runs/stdlib
    python docs/measured/recording.py measure runs/stdlib FILE DEGREE [DEGREE ...]
    python docs/measured/recording.py show FILE
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ampipe.tools.measuring import machine
from megatron_ampipe.tools.measuring.network import parse_link
from megatron_ampipe.tools.measuring.ranks import signals_as_interrupts
from megatron_ampipe.tools.measuring.training import TrainingJob, run
from megatron_ampipe.tools.quickstart import CONFIGS

RANKS, ITERATIONS, INTERVAL, WARMUP = 2, 208, 4, 8


def main() -> None:
    """Measure or show, as the command line says."""
    match sys.argv[1:]:
        case "measure", data, file, *degrees:
            train(data, Path(file), degrees)
        case "show", file:
            for degree, one in json.loads(Path(file).read_text())["degrees"].items():
                print(f"degree {degree}: {text_of(one)}")
        case _:
            sys.exit(__doc__)


def train(data: str, output: Path, degrees: Sequence[str]) -> None:
    """Train at every degree and add what was found to the document."""
    found = json.loads(output.read_text()) if output.exists() else {"degrees": {}}
    for degree in degrees:
        with signals_as_interrupts():
            found["degrees"][degree] = measure(data, degree)
        print(f"degree {degree}: {text_of(found['degrees'][degree])}", flush=True)
    found |= {"hardware": machine.hardware(), "versions": machine.versions()}
    output.write_text(json.dumps(found, indent=1) + "\n")


def measure(data: str, degree: str) -> dict[str, Any]:
    """Train once."""
    with tempfile.TemporaryDirectory() as folder:
        flags = (
            *("--ampipe-config", *CONFIGS, "--ampipe-degree", degree),
            *("--train-iters", str(ITERATIONS)),
            *("--data-path", data, "--data-cache-path", f"{data}-cache"),
            *("--ampipe-routing-dir", folder, "--ampipe-routing-interval", str(INTERVAL)),
        )
        job = TrainingJob(
            flags=flags,
            stock_attends_as="fp32" if degree == "1" else None,
            link=parse_link("none"),
            num_ranks=RANKS,
            timeout_s=120.0,
        )
        curve = run(job, iterations=ITERATIONS, title=f"degree {degree}")
        size = statistics.fmean(path.stat().st_size for path in Path(folder).iterdir())
    kinds: dict[str, list[float]] = {"recorded": [], "after": [], "others": []}
    for number, ms in enumerate(curve.ms, start=1):
        if number > WARMUP:
            kinds[{0: "recorded", 1: "after"}.get(number % INTERVAL, "others")].append(ms)
    return {"ms": curve.ms, "file_bytes": size, **{kind: spread(values) for kind, values in kinds.items()}}


def spread(values: list[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile in milliseconds, and how many."""
    return {
        "median": statistics.median(values),
        "p10": float(np.percentile(values, 10)),
        "p90": float(np.percentile(values, 90)),
        "iterations": len(values),
    }


def text_of(one: dict[str, Any]) -> str:
    """One line."""
    plain, ms = one["others"]["median"], one["ms"]
    # Index of the first iteration is 0, of a recorded one 3, 7, 11, ...
    costs = [
        ms[place] + ms[place + 1] - ms[place - 1] - ms[place + 2]
        for place in range(WARMUP + INTERVAL - 1, len(ms) - 2, INTERVAL)
    ]
    draw = random.Random(1)
    again = [statistics.median(draw.choices(costs, k=len(costs))) for _ in range(2000)]
    low, high = np.percentile(again, (5, 95))
    kinds = ", ".join(
        f"{kind} {one[kind]['median']:.1f} ({one[kind]['p10']:.1f} to {one[kind]['p90']:.1f}) ms"
        for kind in ("others", "recorded", "after")
    )
    return (
        f"{kinds}; a recorded iteration costs {statistics.median(costs):.1f} ms ({low:.1f} to {high:.1f} in "
        f"90 % of resampled sets of {len(costs)}), {statistics.median(costs) / plain:.1%} of an iteration"
    )


if __name__ == "__main__":
    main()
