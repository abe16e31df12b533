"""Draws a line through samples of one operation, and refuses what is none. Pure, with scipy.

Non-negative least squares, a time's square error counted relative to the time: small sizes count, and
cannot bend the line away from large ones. A negative figure would let small operations take no time at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from megatron_ampipe.errors import RunFailed
from megatron_ampipe.tools.profiling.samples import Sample

LEAST_R_SQUARED = 0.9
"""A line that explains less of the spread of the times is none."""
TOLERATED = 0.25
"""With all times this near, relatively, it is a line: where size hardly matters, r^2 says nothing."""
LEAST_FALL = 0.7
"""A larger size that takes less than this share of the time of a smaller one is odd."""
_REMEDY = "Close other work and measure again, with more --repeats."


@dataclass(frozen=True, slots=True)
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


def fit(samples: Sequence[Sample]) -> Line:
    """The line through the samples of one family.

    Raises:
        RunFailed: there is none; says what was odd.
    """
    family = samples[0].family
    names = list(samples[0].columns)
    _require_rising(family, samples)
    columns = np.array([[sample.columns[name] for name in names] for sample in samples])
    times = np.array([sample.us for sample in samples])
    weights = times**-0.5
    figures, _ = nnls(columns * weights[:, None], times * weights)
    predicted = columns @ figures
    spread = float(((times - times.mean()) ** 2).sum())
    r_squared = 1 - float(((times - predicted) ** 2).sum()) / spread if spread else 1.0
    errors = np.abs(predicted / times - 1)
    worst = int(errors.argmax())
    if not r_squared >= LEAST_R_SQUARED and errors[worst] > TOLERATED:
        raise RunFailed(
            f"{family}: the times lie on no line (r^2 {r_squared:.3f}, and at least {LEAST_R_SQUARED} is "
            f"needed). Farthest off is {_size(samples[worst])}: {times[worst]:.0f} us, where the line has "
            f"{predicted[worst]:.0f} us. {_REMEDY}"
        )
    values = dict(zip(names, (float(value) for value in figures), strict=True))
    return Line(values, max(0.0, r_squared), float(errors.max()))


def _require_rising(family: str, samples: Sequence[Sample]) -> None:
    """Where one size is the whole difference, more of it may not be faster."""
    sizes = {name for name in samples[0].columns if name != "alpha_us"}
    if len(sizes) != 1:
        return
    (name,) = sizes
    ordered = sorted(samples, key=lambda sample: sample.columns[name])
    for smaller, larger in itertools.pairwise(ordered):
        if larger.us < LEAST_FALL * smaller.us:
            raise RunFailed(
                f"{family}: {_size(larger)} took {larger.us:.0f} us, and the smaller {_size(smaller)} "
                f"{smaller.us:.0f} us. {_REMEDY}"
            )


def _size(sample: Sample) -> str:
    units = {"beta_us_per_mb": "MB", "beta_us_per_gflop": "GFLOP", "weights_us_per_million": "M weights",
             "merge_us_per_mb": "MB merged"}  # fmt: skip
    parts = [f"{value:.4g} {units[name]}" for name, value in sample.columns.items() if name in units]
    return ", ".join(parts)
