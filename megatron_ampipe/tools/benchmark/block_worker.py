"""What each rank of ``ampipe bench`` runs, without ``--end-to-end``: it compares the layers of every block.

Started by ``measuring.rank_processes`` as ``python -m megatron_ampipe.tools.benchmark.block_worker``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ampipe.tools.benchmark.bench_job import BenchJob
from megatron_ampipe.tools.measuring.rank_worker import Answer, measure_cases, serve


def main() -> None:
    """Run one job."""
    serve(BenchJob.from_json, _compare)


def _compare(job: BenchJob, rank: int, answer: Answer) -> None:
    def measure_case(index: int, progress: Callable[[], None]) -> dict[str, Any]:
        # Imports Megatron, which must not come before the link is emulated.
        from megatron_ampipe.tools.benchmark.timed_passes import measure

        return measure(job.cases[index], job.variants_of(index), job, rank=rank, progress=progress)

    measure_cases(job, rank, answer, measure_case)


if __name__ == "__main__":
    main()
