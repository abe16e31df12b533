"""How blocks are run at present: where the sequence is cut, and in which order the stages run.

A plain value. The flags make one, a plan makes one, and ``--ampipe-degree auto`` goes from one to another
between two iterations. Carried to the blocks by ``layers.context``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_ampipe.config import check_pipeline
from megatron_ampipe.schedule.build import build
from megatron_ampipe.schedule.check import check
from megatron_ampipe.schedule.chunks import Chunk, SequenceLayout, chunk_sequence
from megatron_ampipe.schedule.graph import BlockFeatures, restrict
from megatron_ampipe.schedule.types import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """One way to run every block of a model.

    The sequence is cut into as many chunks as the larger of the two degrees says. In the direction with the
    smaller one, adjacent chunks stand together: they are computed one behind the other and share a
    collective.

    Attributes:
        degree: Of the forward pass.
        backward_degree: Of the backward pass; one of the two divides the other. As ``degree`` if None.
        shares: Of the sequence, with a sum of 1: one for each chunk, or for each part of the forward pass,
            whose chunks are then equal. All equal if None.
        schedule: Name of the order of the stages.
        order: A searched order in place of the named one; has these degrees.

    Raises:
        BadInput: the figures do not go together.
    """

    degree: int
    backward_degree: int | None = None
    shares: tuple[float, ...] | None = None
    schedule: str = "ampipe"
    order: Schedule | None = None
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shares = self.shares
        if shares is not None and len(shares) == self.num_chunks:
            shares = None
        check_pipeline(self.degree, self.backward_degree, shares)
        if self.order is not None:
            assert (self.order.degree, self.order.of_backward) == (self.degree, self.of_backward)
        values = (self.degree, self.backward_degree, self.shares, self.schedule, self.order)
        object.__setattr__(self, "_hash", hash(values))

    def __hash__(self) -> int:
        # Blocks look up by it in every pass, and an order has hundreds of stages.
        return self._hash

    @property
    def of_backward(self) -> int:
        """The degree of the backward pass."""
        return self.degree if self.backward_degree is None else self.backward_degree

    @property
    def num_chunks(self) -> int:
        """Into how many chunks the sequence is cut."""
        return max(self.degree, self.of_backward)

    def chunks(self, sequence_length: int, layout: SequenceLayout | None = None) -> tuple[Chunk, ...]:
        """The chunks of a sequence.

        Args:
            sequence_length: Rows of the whole sequence.
            layout: What this rank holds; the whole sequence if None.

        Raises:
            BadInput: some chunk would be empty, or the ranks cannot hold equal parts.
        """
        shares = self.shares
        if shares is not None and len(shares) < self.num_chunks:
            parts = self.num_chunks // self.degree
            shares = tuple(share / parts for share in shares for _ in range(parts))
        return chunk_sequence(sequence_length, degree=self.num_chunks, shares=shares, layout=layout)

    def schedule_of(self, features: BlockFeatures) -> Schedule:
        """The order of the stages of a block with these features, checked."""
        if self.order is not None:
            schedule = restrict(self.order, features)
        else:
            schedule = build(
                self.schedule, degree=self.degree, backward_degree=self.backward_degree, features=features
            )
        check(schedule, features)
        return schedule

    @property
    def labels(self) -> dict[str, str]:
        """What the timeline of such a run says of it, recorded or predicted."""
        labels = {"degree": str(self.degree), "schedule": self.name}
        if self.of_backward != self.degree:
            labels["backward degree"] = str(self.of_backward)
        if self.shares is not None:
            labels["shares"] = self._shares
        return labels

    @property
    def _shares(self) -> str:
        return " ".join(f"{share:.4g}" for share in self.shares or ())

    @property
    def name(self) -> str:
        """Of the order of the stages."""
        return self.order.name if self.order is not None else self.schedule

    def __str__(self) -> str:
        degree = f"degree {self.degree}"
        if self.of_backward != self.degree:
            degree += f" forward, {self.of_backward} backward"
        shares = "" if self.shares is None else f", shares {self._shares}"
        return f"{degree}{shares}, schedule {self.name}"
