"""Judges what launches have logged: every digit, every iteration, memory and threads. Starts nothing."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

ITERATION = re.compile(r"iteration\s+(\d+)/\s*\d+ \|.*")
_VALUE = re.compile(r"\| (lm loss|grad norm): (\S+)")
_VALIDATION = re.compile(r"validation loss at (iteration \d+.*?) \| lm loss value: (\S+)")
_ROUNDING = 2.01
"""How far a loss that is computed from printed ones may be from one that is printed, in its last digit."""
_MOST_GROWTH = 1.01
"""Most by which a rank's memory may grow from the second to the last quarter of a training."""
FEWEST_SAMPLES = 60
"""Fewer samples say nothing about growth."""


class SoakFailed(Exception):
    """Something was not as in the undisturbed training."""


@dataclass(frozen=True, slots=True)
class Log:
    """What one launch has logged."""

    name: str
    values: dict[int, dict[str, str]]
    """Losses and gradient norms as they are printed, by iteration."""
    validation: dict[str, str]
    """Validation losses as they are printed, by iteration and part of the data."""


def read_log(name: str, text: str) -> Log:
    """Read the output of a launch."""
    values = {int(line[1]): dict(_VALUE.findall(line[0])) for line in ITERATION.finditer(text)}
    return Log(name, values, dict(_VALIDATION.findall(text)))


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """The log of the training that others are compared with."""

    log: Log
    num_iterations: int

    def __post_init__(self) -> None:
        expected = list(range(1, self.num_iterations + 1))
        if list(self.log.values) != expected:
            raise SoakFailed(
                f"{self.log.name} has not logged iterations 1 to {self.num_iterations}, each once"
            )
        for iteration, values in self.log.values.items():
            if len(values) != 2 or not all(math.isfinite(float(value)) for value in values.values()):
                raise SoakFailed(f"{self.log.name}: iteration {iteration} has {values}")

    def loss(self, iteration: int) -> float:
        """The loss of an iteration. The second line of a launch has the mean of its first two."""
        losses = {number: float(values["lm loss"]) for number, values in self.log.values.items()}
        return 2 * losses[2] - losses[1] if iteration == 2 else losses[iteration]


def check_values(log: Log, undisturbed: Undisturbed) -> None:
    """Compare the losses and gradient norms of a launch with the undisturbed training, digit by digit."""
    for place, (iteration, values) in enumerate(log.values.items()):
        expected = dict(undisturbed.log.values.get(iteration, {}))
        is_second = place == 1
        if is_second != (iteration == 2) and values.keys() == expected.keys():
            # One of the two lines has a mean of two losses, and the other has not.
            loss = undisturbed.loss(iteration)
            if is_second:
                loss = (undisturbed.loss(iteration - 1) + loss) / 2
            if _agrees(values["lm loss"], loss):
                expected["lm loss"] = values["lm loss"]
        if values != expected:
            raise SoakFailed(f"{log.name}: iteration {iteration} has {values}, undisturbed {expected}")
    for part, validation_loss in log.validation.items():
        wanted = undisturbed.log.validation.get(part)
        if validation_loss != wanted:
            raise SoakFailed(
                f"{log.name}: validation at {part} gives {validation_loss}, undisturbed {wanted}"
            )


def _agrees(printed: str, value: float) -> bool:
    """Whether a printed number, which may be none, is a value that has been computed from printed numbers."""
    digits, _, exponent = printed.partition("E")
    if not exponent:
        return False
    last_digit = 10.0 ** (int(exponent) - len(digits.partition(".")[2]))
    return abs(float(printed) - value) <= _ROUNDING * last_digit


def count_repeated(logs: Sequence[Log], *, num_iterations: int, most: int) -> int:
    """The number of iterations that were trained again after a launch had ended.

    Args:
        logs: The launches of a training, in order.
        num_iterations: The last iteration of the training.
        most: How many iterations may be lost.

    Raises:
        SoakFailed: An iteration was never trained, or more of them were trained again.
    """
    last, repeated = 0, 0
    for log in logs:
        numbers = list(log.values)
        if not numbers:
            continue
        first = numbers[0]
        if first > last + 1 or numbers != list(range(first, first + len(numbers))):
            raise SoakFailed(f"{log.name} has iterations {numbers}, after a launch that ended with {last}")
        repeated += last + 1 - first
        last = numbers[-1]
    if last != num_iterations:
        raise SoakFailed(f"{logs[-1].name} ended with iteration {last} of {num_iterations}")
    if repeated > most:
        raise SoakFailed(f"{logs[-1].name}: {repeated} iterations were lost, at most {most} may be")
    return repeated


def count_lines(text: str, pattern: str, *, most: int = 1) -> int:
    """The number of lines that say why a launch has ended.

    Raises:
        SoakFailed: There is no such line, or there are more than ``most``.
    """
    count = len(re.findall(pattern, text, re.MULTILINE))
    if not 1 <= count <= most:
        raise SoakFailed(f"{count} lines match {pattern!r}, of one to {most} that say why it ended")
    return count


@dataclass(slots=True)
class Samples:
    """Memory and threads of the ranks of one launch, by process."""

    memory_mib: dict[int, list[float]] = field(default_factory=dict)
    num_threads: dict[int, list[int]] = field(default_factory=dict)

    def add(self, pid: int, *, memory_mib: float, num_threads: int) -> None:
        """Add what a process has now."""
        self.memory_mib.setdefault(pid, []).append(memory_mib)
        self.num_threads.setdefault(pid, []).append(num_threads)

    @property
    def fewest(self) -> int:
        """The number of samples of the rank with the fewest."""
        return min(map(len, self.memory_mib.values()), default=0)

    def growth(self) -> float | None:
        """The largest growth of a rank's memory, from the second to the last quarter of its samples."""
        if self.fewest < FEWEST_SAMPLES:
            return None
        return max(late / early for early, late in map(_quarters, self.memory_mib.values()))

    def new_threads(self) -> int | None:
        """The largest number of threads that a rank has gained, from the second to the last quarter."""
        if self.fewest < FEWEST_SAMPLES:
            return None
        gained = [late - early for early, late in map(_quarters, self.num_threads.values())]
        return math.ceil(max(gained))


def _quarters(samples: Sequence[float]) -> tuple[float, float]:
    """The medians of the second and the last quarter."""
    quarter = len(samples) // 4
    return statistics.median(samples[quarter : 2 * quarter]), statistics.median(samples[-quarter:])


def check_samples(samples: Samples) -> dict[str, object]:
    """What was sampled, for the report; raises SoakFailed if memory or threads of a rank grow."""
    growth, new_threads = samples.growth(), samples.new_threads()
    report: dict[str, object] = {
        "samples": samples.fewest,
        "memory_growth": None if growth is None else round(growth, 4),
        "new_threads": new_threads,
    }
    if (growth or 1.0) > _MOST_GROWTH or (new_threads or 0) > 0:
        raise SoakFailed(f"memory or threads of a rank grow: {report}")
    return report
