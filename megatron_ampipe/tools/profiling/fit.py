"""Fits a line to samples of one operation, and refuses samples that no line fits. Pure, with scipy.

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
"""A line that explains a smaller part of the spread of the times is refused."""
TOLERATED = 0.25
"""With all relative errors this small the line is accepted: where size hardly matters, r^2 says nothing."""
LEAST_FALL = 0.7
"""A larger size that takes less than this share of the time of a smaller one is refused."""
PRICE_OF_A_FACTOR = 0.02
"""The penalty of a factor over a time in :func:`factor_and_rest`: enough to decide between them, no more."""
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
