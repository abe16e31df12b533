"""What a user sets. Imports neither torch nor Megatron.

``launch`` builds the configuration from flags; ``layers`` receive it. What it cannot be combined with is in
:mod:`megatron_ampipe.refusals`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from megatron_ampipe.errors import BadInput

SCHEDULE_NAMES = ("ampipe", "moe-only", "sequential")
"""The named orders of stages; :mod:`megatron_ampipe.schedule.build` builds each."""

AUTO: Final = "auto"
"""The value of ``--ampipe-degree`` that leaves the choice to us."""

CAPACITY_SCOPES = ("sequence", "chunk")
"""Over which tokens an expert's capacity counts."""

_ROUNDING_OF_SHARES = 0.015
"""How far the sum of shares may be from 1: 0.33,0.33,0.33 means thirds."""

TRACED_ITERATIONS = 3
"""How many iterations, counted from the end of the run, a trace holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AMPipeConfig:
    """How every MoE block of the model is pipelined."""

    degree: int | Literal["auto"] = 1
    """Number of chunks the sequence is cut into. 1 builds Megatron's own layers and nothing else; ``auto``
    leaves the choice to a plan or to the first iterations."""
    backward_degree: int | None = None
    """Number of chunks of the backward pass; as ``degree`` if None. One of the two divides the other."""
    chunks: tuple[float, ...] | None = None
    """Share of the sequence of each chunk, with a sum of 1; equal if None."""
    cluster: str | None = None
    """Cluster file from which ``auto`` plans; None to try degrees in the first iterations."""
    plan: str | None = None
    """Plan file that the degrees, chunks and order of stages were read from."""
    save_plan: str | None = None
    """File that receives what ``auto`` chose, as a plan; None to keep it in the log alone."""
    schedule: str = "ampipe"
    """Name of the order of the stages; one of :data:`SCHEDULE_NAMES`."""
    capacity_scope: str = "sequence"
    """Over which tokens an expert's capacity counts; one of :data:`CAPACITY_SCOPES`. ``chunk`` drops other
    tokens than a stock run."""
    trace_dir: str | None = None
    """Folder that receives one Chrome trace per rank at the end of the run; None records nothing."""

    def __post_init__(self) -> None:
        if self.degree != AUTO:
            check_pipeline(self.degree, self.backward_degree, self.chunks)
        elif self.backward_degree is not None or self.chunks is not None:
            flag, value = "--ampipe-backward-degree", str(self.backward_degree)
            if self.chunks is not None:
                flag, value = "--ampipe-chunks", ",".join(f"{share:.6g}" for share in self.chunks)
            raise BadInput(
                flag,
                value,
                rule="is what --ampipe-degree auto chooses",
                remedy=f"Leave {flag} out, or name the degree: --ampipe-degree 4.",
            )
        if self.cluster is not None and self.degree != AUTO:
            raise BadInput(
                "--ampipe-cluster",
                self.cluster,
                rule=f"has no effect at --ampipe-degree {self.degree}, which is not chosen by us",
                remedy="Use --ampipe-degree auto, or leave it out.",
            )
        if self.save_plan is not None and self.degree != AUTO:
            raise BadInput(
                "--ampipe-save-plan",
                self.save_plan,
                rule=f"has no effect at --ampipe-degree {self.degree}, which is not chosen by us",
                remedy="Use --ampipe-degree auto, or leave it out.",
            )
        if self.schedule not in SCHEDULE_NAMES:
            raise BadInput(
                "--ampipe-schedule",
                self.schedule,
                rule=f"is not one of {', '.join(SCHEDULE_NAMES)}",
                remedy="Use --ampipe-schedule ampipe.",
            )
        if self.capacity_scope not in CAPACITY_SCOPES:
            raise BadInput(
                "--ampipe-capacity-scope",
                self.capacity_scope,
                rule=f"is not one of {', '.join(CAPACITY_SCOPES)}",
                remedy="Use --ampipe-capacity-scope sequence, which drops the tokens that a stock run drops.",
            )

    @property
    def pipelined(self) -> bool:
        """Whether MoE layers are built as ours; Megatron's own otherwise."""
        return self.degree == AUTO or max(self.degree, self.backward_degree or 1) > 1


def check_pipeline(degree: int, backward_degree: int | None, shares: tuple[float, ...] | None) -> None:
    """Hold the degrees and the shares of the chunks against each other.

    Raises:
        BadInput: one of them is wrong, or they do not go together.
    """
    if degree < 1:
        raise BadInput(
            "--ampipe-degree",
            degree,
            rule="must be a whole number of chunks, at least 1",
            remedy="Use --ampipe-degree 4, or 1 for Megatron's own layers.",
        )
    backward = degree if backward_degree is None else backward_degree
    if backward < 1 or max(degree, backward) % min(degree, backward):
        raise BadInput(
            "--ampipe-backward-degree",
            backward,
            rule=f"must divide the degree of the forward pass ({degree}), or be divided by it",
            remedy=f"Use --ampipe-backward-degree {2 * degree}, 1 or {degree}.",
        )
    if shares is not None and len(shares) != degree:
        raise BadInput(
            "--ampipe-degree",
            degree,
            rule=f"is not the number of chunks that --ampipe-chunks names ({len(shares)})",
            remedy=f"Leave it out: --ampipe-chunks implies --ampipe-degree {len(shares)}.",
        )


def parse_shares(text: str, *, flag: str) -> tuple[float, ...]:
    """Read shares of a sequence, such as ``0.4,0.3,0.3``.

    Args:
        text: Numbers with commas between them.
        flag: Where it stands, for the error.

    Returns:
        The shares, scaled to a sum of exactly 1.

    Raises:
        BadInput: it is no list of numbers above 0 with a sum of 1.
    """
    remedy = f"Use for example {flag} 0.4,0.3,0.3."
    try:
        shares = [float(word) for word in text.split(",")]
    except ValueError:
        raise BadInput(
            flag, text or "(empty)", rule="is not a list of numbers with commas between them", remedy=remedy
        ) from None
    if not all(0 < share < math.inf for share in shares):
        raise BadInput(flag, text, rule="every share must be above 0", remedy=remedy)
    total = sum(shares)
    if abs(total - 1) > _ROUNDING_OF_SHARES:
        raise BadInput(
            flag, text, rule=f"the shares must have a sum of 1, and have {total:.6g}", remedy=remedy
        )
    return tuple(share / total for share in shares)
