"""``ampipe bench`` and ``docs/measured/partners.py`` with CUDA graphs, on the stand-ins for these.

A rank's transfers run on the calling thread, the only one that a capture sees. ``python -m tests.graphed``
with the arguments of ``ampipe bench`` prints the cases of its document, of the first rank.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
from typing import Any
from unittest import mock

from megatron_ampipe.tools import bench_command
from megatron_ampipe.tools.measuring import machine, result
from megatron_ampipe.tools.measuring.bench_job import BenchJob
from megatron_ampipe.tools.measuring.ranks import Rank, run_ranks
from tests import cuda_graph_standin


@contextlib.contextmanager
def stand_ins() -> Any:
    """Within it, AMPipe's and Megatron's graphs are recorded. Megatron must have started on a CPU."""
    from megatron_ampipe.layers import block_stack
    from megatron_ampipe.runtime.executors import SequentialExecutor

    with (
        cuda_graph_standin.stand_ins(),
        cuda_graph_standin.of_megatron(),
        mock.patch.object(block_stack, "ThreadExecutor", SequentialExecutor),
    ):
        yield


def measure(rank: Rank[BenchJob]) -> None:
    """Measure all cases in a rank."""
    start = Rank.start_megatron
    with contextlib.ExitStack() as stack:

        def start_with_graphs(rank: Rank[BenchJob]) -> Any:
            emulation = start(rank)
            stack.enter_context(stand_ins())
            return emulation

        with mock.patch.object(Rank, "start_megatron", start_with_graphs):
            bench_command.measure_blocks(rank)


def main() -> None:
    """Parse as if there were a GPU, and run on a CPU."""
    parser = argparse.ArgumentParser()
    bench_command.add_arguments(parser)
    arguments = parser.parse_args()
    arguments.refuse = sys.exit
    with mock.patch.object(machine, "num_gpus", lambda: 1):
        job = dataclasses.replace(bench_command._job(arguments), device="cpu")
    found: list[Any] = []
    run_ranks(
        job, measure, on_message=lambda _, event, value: found.append(value) if event == "case" else None
    )
    cases = [result.case_result(job, index, [report]) for index, report in found]
    print(json.dumps(cases))


if __name__ == "__main__":
    main()
