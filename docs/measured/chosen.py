"""What ``--ampipe-degree auto`` chooses by trying, and whether it is slower than Megatron afterwards.

Whole trainings of two layers of a case of ``cpu-lengths``: Megatron's layers, and ``auto`` with Megatron's
exchange of tokens on both sides, in turns. The last iterations count, in which the choice is known.

    python docs/measured/chosen.py docs/measured/chosen.json s512:200mbit s512:none s2048:none
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from megatron_ampipe.tools.benchmark.training import run
from megatron_ampipe.tools.benchmark.training_job import TrainingJob, training_flags
from megatron_ampipe.tools.measuring import machine, rank_processes
from megatron_ampipe.tools.measuring.grid import find_grid, read_grid

LAYERS, RANKS, ITERATIONS, COUNTED, ROUNDS = 2, 2, 44, 12, 3
CHOSEN = re.compile(r"AMPipe: (input of .*: an iteration spent .*)")


def main() -> None:
    """Measure all that was asked for and write the document."""
    file, *places = sys.argv[1:]
    with rank_processes.signals_as_interrupts():
        found = {place: measure(*place.split(":")) for place in places}
    document = {
        "command": ["python", *sys.argv],
        "hardware": machine.hardware(),
        "versions": machine.versions(),
        "places": found,
    }
    Path(file).write_text(json.dumps(document, indent=1) + "\n")


def measure(name: str, link: str) -> dict[str, Any]:
    """Train Megatron's layers and with ``auto``, one after the other, several times."""
    (case,) = read_grid(find_grid("cpu-lengths")).only(name).cases
    flags = training_flags(case, layers=LAYERS, num_ranks=RANKS, iterations=ITERATIONS, seed=1234)
    rounds: list[dict[str, Any]] = []
    for _ in range(ROUNDS):
        rounds.append({})
        for degree in ("1", "auto"):
            job = TrainingJob(
                flags=(*flags, "--ampipe-degree", degree),
                stock_attends_as=None,  # with Megatron's attention, which auto has at degree 1 as well
                link=link,
                num_ranks=RANKS,
                timeout_s=120.0,
                cores=machine.cores_of(RANKS),
            )
            with tempfile.TemporaryDirectory() as folder:
                log = Path(folder) / "log"
                curve = run(job, iterations=ITERATIONS, title=degree, on_iteration=lambda _: None, log=log)
                said = CHOSEN.findall(log.read_text(errors="replace"))
            rounds[-1][degree] = {
                "median ms": statistics.median(curve.ms[-COUNTED:]),
                "ms": curve.ms,
                "lm loss": curve.lm_loss,
                "said": said,
            }
        print(name, link, {d: (one["median ms"], one["said"]) for d, one in rounds[-1].items()}, flush=True)
    return {"flags": list(flags), "rounds": rounds}


if __name__ == "__main__":
    main()
