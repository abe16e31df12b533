"""How far the results of a measured layer may be from those of Megatron's. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far the results of a variant may be from stock's.

    Attributes:
        limit: Largest norm of the difference, relative to the norm of stock's tensor.
        order: Of both norms; infinite for the largest element.
    """

    limit: float
    order: float

    @classmethod
    def of(cls, dtype: str, wire: str | None) -> Tolerance:
        """For a block of this dtype whose rows travel in the format ``wire``, None for their own."""
        if wire is not None:
            # Rows are rounded while they travel.
            return cls(limit=0.2, order=2)
        if dtype == "fp32":
            return cls(limit=1e-4, order=math.inf)
        return cls(limit=3e-2, order=2)
