"""What the command hands to every rank, and the lines they exchange: plain data, no torch.

Each rank reads its :class:`Job` as one line of JSON from standard input and answers with one JSON object a
line (``{"event": ...}``). Called by :mod:`.ranks` on one side and :mod:`.worker` on the other.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, Self

from megatron_ampipe.schedule import Pipeline, from_text
from megatron_ampipe.tools.benchmark.grid import Case

STOCK = "stock"
"""Name of Megatron's own layer among the variants."""
PLANNED = "planned"
"""Name of what the planner makes of a case."""


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
        return self.cut.num_chunks > 1

    @property
    def pipeline(self) -> Pipeline:
        """What its blocks run."""
        cut = self.cut
        if not self.chunked:
            return Pipeline.of(1)
        degrees = {"degree": cut.degree, "backward_degree": cut.backward_degree}
        if self.order is not None:
            return Pipeline(**degrees, shares=cut.shares, order=from_text(self.order))
        return Pipeline(**degrees, shares=cut.shares, schedule=self.schedule)

    def __str__(self) -> str:
        if self.schedule == STOCK:
            return STOCK
        return f"{self.schedule} {'degree' if self.cut.shares is None else 'chunks'} {self.cut}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that the ranks have to do.

    Attributes:
        cases: The blocks, one after another.
        schedules: Names of schedules.
        cuts: Into which chunks.
        link: As the user wrote it.
        num_ranks: Ranks over which the experts are spread.
        pretended: One process stands for all ranks; see :mod:`.emulation`.
        device: Where it runs.
        repeats: Timed passes of each variant.
        warmup: Passes of each variant before those.
        seed: Of weights and inputs.
        timeout_s: After so long a collective is given up.
        rendezvous: File over which the ranks find each other.
        cores: One for each rank; empty when ranks are not pinned.
        profiles: Operations are measured around each case, for ``ampipe profile``; no layers are compared.
        planned: Of each case, what the planner makes of it; empty where nobody asked.
    """

    worker: ClassVar[str] = "megatron_ampipe.tools.benchmark.worker"

    cases: tuple[Case, ...]
    schedules: tuple[str, ...]
    cuts: tuple[Cut, ...]
    link: str
    num_ranks: int
    pretended: bool
    device: Literal["cpu", "cuda"]
    repeats: int
    warmup: int
    seed: int
    timeout_s: float
    rendezvous: str
    cores: tuple[int, ...]
    profiles: bool = False
    planned: tuple[Variant, ...] = ()

    @property
    def variants(self) -> tuple[Variant, ...]:
        """What is compared: stock first, then every schedule with every cut."""
        rows = (Variant(schedule, cut) for schedule in self.schedules for cut in self.cuts)
        return (Variant(STOCK, Cut.of(1)), *rows)

    def variants_of(self, case: int) -> tuple[Variant, ...]:
        """Likewise, with what was planned for the case of that number."""
        return (*self.variants, *self.planned[case : case + 1])

    @property
    def num_processes(self) -> int:
        """How many processes there are."""
        return 1 if self.pretended else self.num_ranks

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Job:
        """Read what :meth:`to_json` wrote."""
        found = json.loads(line)
        found["cases"] = tuple(Case(**case) for case in found["cases"])
        found["cuts"] = tuple(map(_cut, found["cuts"]))
        found["planned"] = tuple(
            Variant(**{**variant, "cut": _cut(variant["cut"])}) for variant in found["planned"]
        )
        for key in ("schedules", "cores"):
            found[key] = tuple(found[key])
        return cls(**found)


def _cut(found: dict[str, Any]) -> Cut:
    return Cut(**{**found, "shares": tuple(found["shares"]) if found["shares"] else None})
