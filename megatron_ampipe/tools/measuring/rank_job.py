"""What any job for ranks says, whatever is measured. Plain types, no torch.

The command writes a job to every rank as one line of JSON; the rank answers with one JSON object a line
(``{"event": ...}``). Read by :mod:`.rank_processes` on one side and :mod:`.rank_worker` on the other.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

from megatron_ampipe.tools.measuring.grid import Case


class RankJob(Protocol):
    """A job: a dataclass whose field ``rendezvous`` is filled in when the ranks are started."""

    worker: ClassVar[str]
    """The module that each rank runs."""

    @property
    def link(self) -> str:
        """As the user wrote it."""

    @property
    def num_ranks(self) -> int:
        """Ranks over which the experts are spread."""

    @property
    def num_processes(self) -> int:
        """How many processes there are: fewer where ranks are pretended."""

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda``."""

    @property
    def cores(self) -> tuple[int, ...]:
        """One for each rank; empty when ranks are not pinned."""

    @property
    def timeout_s(self) -> float:
        """A collective fails after this time."""

    @property
    def rendezvous(self) -> str:
        """File over which the ranks find each other."""

    def to_json(self) -> str:
        """One line."""


class BlockJob(RankJob, Protocol):
    """A job about blocks, which :func:`.rank_worker.start_torch` prepares a rank for."""

    @property
    def cases(self) -> tuple[Case, ...]:
        """The blocks, one after another."""

    @property
    def pretended(self) -> bool:
        """One process stands for all ranks; see :mod:`.emulation`."""

    @property
    def seed(self) -> int:
        """Of weights and inputs."""
