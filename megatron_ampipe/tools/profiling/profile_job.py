"""What ``ampipe profile`` tells each rank that it starts: plain data, no torch.

Made by the command, sent by ``measuring.rank_processes``, read by :mod:`.profile_worker`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import ClassVar, Literal

from megatron_ampipe.tools.measuring.grid import Case
from megatron_ampipe.tools.measuring.link import parse_link


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileJob:
    """The block around which is measured, and how; a ``measuring.rank_job.BlockJob``.

    Attributes:
        case: The block.
        link: As the user wrote it.
        num_ranks: Ranks over which the experts are spread.
        device: Where it runs.
        repeats: Timed calls of each operation.
        seed: Of weights.
        timeout_s: A collective fails after this time.
        rendezvous: File over which the ranks find each other.
        cores: One for each rank; empty when ranks are not pinned.
    """

    worker: ClassVar[str] = "megatron_ampipe.tools.profiling.profile_worker"
    pretended: ClassVar[bool] = False

    case: Case
    link: str
    num_ranks: int
    device: Literal["cpu", "cuda"]
    repeats: int
    seed: int
    timeout_s: float
    rendezvous: str
    cores: tuple[int, ...]

    @property
    def cases(self) -> tuple[Case, ...]:
        """The one block."""
        return (self.case,)

    @property
    def ranks_per_node(self) -> int:
        """Ranks of a node: all of them where they have one network."""
        nodes = parse_link(self.link).nodes
        return self.num_ranks if nodes is None else nodes.ranks_per_node

    @property
    def num_processes(self) -> int:
        """How many processes there are."""
        return self.num_ranks

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> ProfileJob:
        """Read what :meth:`to_json` wrote."""
        found = json.loads(line)
        return cls(**found | {"case": Case(**found["case"]), "cores": tuple(found["cores"])})
