"""What the trials of ``--ampipe-degree auto --ampipe-exchange auto`` choose, for times of ``ampipe bench``.

Gives the rule of the trials (``launch/trials.py``) the samples of ``ampipe bench --exchange auto``, one after
the other, and compares what it chooses with the combination of the least median. These samples decide and
judge. So it also chooses by every second sample of each combination, and judges by the medians of the others.

    python docs/measured/chosen_by_trials.py docs/measured/choice-*-more.json
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from megatron_ampipe.launch.trials import Trials
from megatron_ampipe.schedule import Exchange

Combination = tuple[str, int]


def main() -> None:
    """Print a line for each block of each file."""
    near = total = near_apart = total_apart = 0
    for file in sys.argv[1:]:
        for case in json.loads(Path(file).read_text())["cases"]:
            samples = samples_of(case)
            medians = {key: statistics.median(times) for key, times in samples.items()}
            chosen, fastest = choose(samples), min(medians, key=lambda key: medians[key])
            slower = medians[chosen] / medians[fastest] - 1
            near, total = near + (slower <= 0.03), total + 1
            apart = [slower_in_others(samples, first) for first in (0, 1)]
            near_apart, total_apart = near_apart + sum(one <= 0.03 for one in apart), total_apart + len(apart)
            print(
                f"{Path(file).stem:22} {case['name']:11} chosen {chosen} {medians[chosen]:.1f} ms, "
                f"fastest {fastest} {medians[fastest]:.1f} ms: {slower:.1%} slower; "
                f"in other samples {', '.join(f'{one:.1%}' for one in apart)}"
            )
    print(
        f"within 3 % of the fastest: {near} of {total}; in samples not given: {near_apart} of {total_apart}"
    )


def samples_of(case: dict[str, Any]) -> dict[Combination, list[float]]:
    """Milliseconds of each exchange and degree; ``rows`` at degree 1 is Megatron's own layer."""
    found = {(row["exchange"], row["degree"]): row["samples_ms"] for row in case["rows"]}
    return found | {("rows", 1): found[("rows", 1)] + case["stock_samples_ms"]}


def slower_in_others(samples: dict[Combination, list[float]], first: int) -> float:
    """How much slower than the fastest is what every second sample chooses, by the medians of the others."""
    chosen = choose({key: times[first::2] for key, times in samples.items()})
    judged = {key: statistics.median(times[1 - first :: 2]) for key, times in samples.items()}
    return judged[chosen] / min(judged.values()) - 1


def choose(samples: dict[Combination, list[float]]) -> Combination:
    """Drive the trials with the samples of each combination, again from the first when there are no more."""
    exchanges = [kind for kind in Exchange if any(name == kind.value for name, _ in samples)]
    exchanges.sort(key=lambda kind: kind is not Exchange.ROWS)
    degrees = sorted({degree for _, degree in samples})
    times = {key: itertools.cycle(values) for key, values in samples.items()}
    trials = Trials(degrees, schedule="ampipe", exchanges=exchanges)
    while trials.choice is None:
        # All of it as forward time: one degree for both directions, because only those were measured.
        trials.add_times(1e3 * next(times[trials.pipeline.exchange.value, trials.pipeline.degree]), 0.0)
    return trials.choice.pipeline.exchange.value, trials.choice.pipeline.degree


if __name__ == "__main__":
    main()
