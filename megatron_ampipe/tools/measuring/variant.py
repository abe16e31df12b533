"""The ways to run blocks that are compared: a schedule, where it cuts the sequence, how many blocks share it.

Plain data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from megatron_ampipe.schedule import KEEP, Exchange, Pipeline, from_text

STOCK = "stock"
"""Name of Megatron's own layer among the variants."""
CONTROL = "control"
"""Name of Megatron's own layer when it is measured a second time."""
STOCK_GLOO = "stock-gloo"
"""Name of Megatron's own layer with gloo's own all-to-all (``launch.host.all_to_all``)."""
MEGATRONS = (STOCK, CONTROL, STOCK_GLOO)
PLANNED = "planned"
"""Name of what the planner chooses for a case."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Where the sequence is cut.

    Attributes:
        degree: Number of chunks of the forward pass.
        backward_degree: Of the backward pass.
        shares: Of the sequence, of each chunk; equal if None.
    """

    degree: int
    backward_degree: int
    shares: tuple[float, ...] | None = None

    @classmethod
    def of(
        cls, degree: int, backward_degree: int | None = None, shares: tuple[float, ...] | None = None
    ) -> Self:
        """A cut whose backward degree is the forward one's unless it is given."""
        return cls(degree, degree if backward_degree is None else backward_degree, shares)

    @property
    def num_chunks(self) -> int:
        """Into how many chunks the sequence is cut."""
        return max(self.degree, self.backward_degree)

    def __str__(self) -> str:
        """As it stands after ``--degrees`` or ``--chunks``."""
        if self.shares is not None:
            return ",".join(f"{share:.4g}" for share in self.shares)
        return str(self.degree) + (f":{self.backward_degree}" if self.backward_degree != self.degree else "")

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """From ``dataclasses.asdict`` after a way through JSON, where tuples became lists."""
        return cls(**{**fields, "shares": tuple(fields["shares"]) if fields["shares"] else None})


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the layers that are compared.

    Attributes:
        schedule: Name of a schedule, :data:`STOCK`, :data:`CONTROL`, :data:`STOCK_GLOO` or :data:`PLANNED`.
        cut: Into which chunks. In one chunk, both ways, a schedule is Megatron's own layer again, unless it
            overlaps gradients of weights or has another exchange.
        order: Of a plan, the order of the stages (``schedule.to_text``).
        stack: How many consecutive layers share the schedule; 1 is block by block.
        memory: What the experts keep for their backward, as in ``Pipeline.memory``.
        exchange: How the all-to-all groups copies of a token.
        wire: What rows become while they travel, as ``--ampipe-wire``; None to send them as they are.
    """

    schedule: str
    cut: Cut
    order: str | None = None
    stack: int = 1
    memory: str = KEEP
    exchange: Exchange = Exchange.ROWS
    wire: str | None = None

    @property
    def pipelined(self) -> bool:
        """Whether it is AMPipe's layer rather than Megatron's own."""
        return not self.pipeline.is_stock

    @property
    def pipeline(self) -> Pipeline:
        """What its blocks run."""
        cut = self.cut
        if self.order is None and self.schedule in (*MEGATRONS, PLANNED):
            return Pipeline.of(1)
        found = Pipeline.of(
            cut.degree,
            backward_degree=cut.backward_degree,
            shares=cut.shares,
            stack=self.stack,
            memory=self.memory,
            exchange=self.exchange,
        )
        if self.order is not None:
            return replace(found, order=from_text(self.order))
        return replace(found, schedule=self.schedule)

    def __str__(self) -> str:
        if self.schedule in MEGATRONS:
            return self.schedule
        stack = f", stack {self.stack}" if self.stack > 1 else ""
        memory = f", memory {self.memory}" if self.memory != KEEP else ""
        exchange = "" if self.exchange is Exchange.ROWS else f", exchange {self.exchange}"
        wire = "" if self.wire is None else f", wire {self.wire}"
        kind = "degree" if self.cut.shares is None else "chunks"
        return f"{self.schedule} {kind} {self.cut}{stack}{memory}{exchange}{wire}"

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Likewise."""
        cut, exchange = Cut.from_fields(fields["cut"]), Exchange(fields["exchange"])
        return cls(**{**fields, "cut": cut, "exchange": exchange})
