"""``ampipe profile``: measures what the operations of a block cost on these ranks, and writes a cluster file.

Starts its own ranks, or runs as one of the ranks that torchrun has started.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tqdm import tqdm

from megatron_ampipe.files import outputs
from megatron_ampipe.files.inputs import adder, at_least
from megatron_ampipe.plan.cluster import write_cluster
from megatron_ampipe.tools import packages
from megatron_ampipe.tools.measuring import machine
from megatron_ampipe.tools.measuring.bench_job import BenchJob
from megatron_ampipe.tools.measuring.cluster_fit import assemble
from megatron_ampipe.tools.measuring.grid import find_grid, read_grid
from megatron_ampipe.tools.measuring.network import RANKS, add_link_arguments, check_nodes, parse_link
from megatron_ampipe.tools.measuring.ranks import Rank, run_ranks
from megatron_ampipe.tools.measuring.reports import OperationsReport

EPILOG = """\
examples:
  ampipe profile --link 200mbit --output cluster.yaml
      two ranks of this machine over a real 200 Mbit/s network between network namespaces (needs root)
  ampipe profile --ranks 4 --ranks-per-node 2 --link inter=50mbit,intra=400mbit --output cluster.yaml
      two nodes of two ranks: both classes of links are measured
  torchrun --nproc-per-node 8 -m megatron_ampipe.cli profile --grid mixtral --output cluster.yaml
      the ranks that will train, on one node or several

Then: ampipe plan --cluster cluster.yaml --model MODEL, or train with --ampipe-degree auto --ampipe-cluster
cluster.yaml. Close other work first. Times are medians of a rank, and the slowest rank's counts.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ampipe profile``."""
    add = adder(parser)
    add("--output", "FILE", "the cluster file to write", type=Path, required=True)
    grid = "file of blocks, or a name in configs/bench: the sizes of one of them are measured"
    add("--grid", "NAME|FILE", grid, default="cpu-small")
    add("--case", "NAME", "which block of the grid (default: the first)")
    add_link_arguments(parser, fewest_ranks=2)
    add("--repeats", "N", "timed calls of each operation", type=at_least(3), default=7)


@dataclass(frozen=True, slots=True)
class _Launch:
    """How many ranks measure, and who has started them.

    Attributes:
        count: The ranks.
        ranks_per_node: Consecutive ranks on a node; None if all are.
        rank: This rank, if torchrun has started it; None if this command starts the ranks.
    """

    count: int
    ranks_per_node: int | None
    rank: int | None

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> _Launch:
        """Of the arguments, or of the variables that torchrun sets; refuses both together."""
        if not {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
            count = arguments.ranks or RANKS
            check_nodes(arguments, count)
            return cls(count, arguments.ranks_per_node, rank=None)
        given = (arguments.ranks, arguments.ranks_per_node)
        if given != (None, None) or arguments.link != parse_link(None):
            arguments.refuse(
                "torchrun has started these ranks; leave --ranks, --ranks-per-node and --link out"
            )
        return cls(
            int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["RANK"])
        )

    @property
    def is_first(self) -> bool:
        """Whether this process shows progress and writes the file."""
        return self.rank is None or self.rank == 0


def run(arguments: argparse.Namespace) -> int:
    """Measure, fit and write."""
    packages.require("scipy")
    outputs.check(arguments.output, flag="--output")
    launch = _Launch.of(arguments)
    link = arguments.link
    case, *_ = read_grid(find_grid(arguments.grid), only=arguments.case, num_ranks=launch.count)
    num_gpus = 0 if link.is_network else machine.num_gpus()
    job = BenchJob(
        cases=(case,),
        link=link,
        num_ranks=launch.count,
        device="cuda" if num_gpus else "cpu",
        repeats=arguments.repeats,
        warmup=2,
        ranks_per_node=launch.ranks_per_node,
    )
    reports = _measure(job, launch)
    if not launch.is_first:
        return 0
    kernel, versions = reports[0]["kernel"], machine.versions()
    cluster = assemble(
        case,
        reports,
        ranks_per_node=job.ranks_per_node or launch.count,
        description=f"{machine.hardware()['cpu']}, torch {versions['torch']}: {launch.count} ranks, "
        f"link {link.text}, attention {kernel}, around case {case.name}",
        source=f"measured by ampipe profile, commit {versions['commit']}; medians of the slowest rank",
        device_memory_gib=reports[0]["device_memory_gib"],
    )
    write_cluster(cluster, arguments.output, head=arguments.command_line)
    print(f"wrote {arguments.output}{machine.without_commit(versions)}")
    return 0


def _measure(job: BenchJob, launch: _Launch) -> list[OperationsReport]:
    """The reports of all ranks: of those that it starts, or of those that torchrun has started."""
    disable = None if launch.is_first else True
    with tqdm(desc=f"{launch.count} ranks start", unit=" steps", leave=False, disable=disable) as bar:

        def on_message(rank: int, event: str, _: object = None) -> None:
            if rank == 0 and event == "progress":
                if not bar.n:
                    bar.set_description_str("ampipe profile")
                bar.update()

        if launch.rank is None:
            return run_ranks(job, measure_rank, on_message=on_message)
        import torch.distributed as dist

        report = measure_rank(Rank(job, launch.rank, say=partial(on_message, launch.rank)))
        reports = [report] * launch.count
        dist.all_gather_object(reports, report)
        dist.destroy_process_group()
        return reports


def measure_rank(rank: Rank[BenchJob]) -> OperationsReport:
    """Measure in a rank."""
    rank.start_megatron()
    # Imports Megatron, so it must come after the link is emulated.
    from megatron_ampipe.tools.measuring import operations

    return operations.measure(rank)
