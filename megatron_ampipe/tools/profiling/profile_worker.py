"""What each rank of ``ampipe profile`` runs, where the command starts the ranks itself.

Started by ``measuring.rank_processes`` as ``python -m megatron_ampipe.tools.profiling.profile_worker``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ampipe.tools.measuring import machine
from megatron_ampipe.tools.measuring.rank_worker import Answer, measure_cases, serve
from megatron_ampipe.tools.profiling.profile_job import ProfileJob


def main() -> None:
    """Run one job."""
    serve(ProfileJob.from_json, _profile)


def _profile(job: ProfileJob, rank: int, answer: Answer) -> None:
    def measure_case(index: int, progress: Callable[[], None]) -> dict[str, Any]:
        # Imports Megatron, which must not come before the link is emulated.
        from megatron_ampipe.tools.profiling.measure import measure

        return measure(
            job.cases[index],
            rank=rank,
            num_ranks=job.num_ranks,
            ranks_per_node=job.ranks_per_node,
            turns=1 if job.cores or job.device == "cuda" else machine.ranks_per_core(job.num_ranks),
            repeats=job.repeats,
            on_cuda=job.device == "cuda",
            seed=job.seed,
            progress=progress,
            alive=lambda: answer(event="alive"),
        )

    measure_cases(job, rank, answer, measure_case)


if __name__ == "__main__":
    main()
