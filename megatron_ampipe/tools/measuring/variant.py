"""The ways to run a block that are compared: a schedule, and where it cuts the sequence. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STOCK = "stock"
"""Name of Megatron's own layer among the variants."""
PLANNED = "planned"
"""Name of what the planner chooses for a case."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Where the sequence is cut.

    Attributes:
        degree: Number of chunks of the forward pass.
        backward_degree: Of the backward pass; as ``degree`` if None.
        shares: Of the sequence, of each chunk; equal if None.
    """

    degree: int
    backward_degree: int | None = None
    shares: tuple[float, ...] | None = None

    def __str__(self) -> str:
        """As it stands after ``--degrees`` or ``--chunks``."""
        if self.shares is not None:
            return ",".join(f"{share:.4g}" for share in self.shares)
        return str(self.degree) + (f":{self.backward_degree}" if self.backward_degree else "")

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Cut:
        """From ``dataclasses.asdict`` after a way through JSON, where tuples became lists."""
        return cls(**{**fields, "shares": tuple(fields["shares"]) if fields["shares"] else None})


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the layers that are compared.

    Attributes:
        schedule: Name of a schedule, :data:`STOCK` or :data:`PLANNED`.
        cut: Into which chunks. In one chunk, both ways, a schedule is Megatron's own layer again.
        order: Of a plan, the order of the stages (``schedule.to_text``).
    """

    schedule: str
    cut: Cut
    order: str | None = None

    @property
    def chunked(self) -> bool:
        """Whether it is a pipeline rather than Megatron's own layer."""
        return max(self.cut.degree, self.cut.backward_degree or 1) > 1

    def __str__(self) -> str:
        if self.schedule == STOCK:
            return STOCK
        return f"{self.schedule} {'degree' if self.cut.shares is None else 'chunks'} {self.cut}"

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Variant:
        """Likewise."""
        return cls(**{**fields, "cut": Cut.from_fields(fields["cut"])})
