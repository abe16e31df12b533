"""``ampipe profile``: measures what the operations of a block cost on these ranks, and writes a cluster file.

Declares and checks the arguments and puts :mod:`megatron_ampipe.tools.profiling` together. Starts its own
ranks, or takes part as one of those that torchrun has started. Called by :mod:`megatron_ampipe.cli`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from megatron_ampipe.errors import BadInput, EnvironmentMissing
from megatron_ampipe.files import outputs
from megatron_ampipe.plan.cluster import write_cluster
from megatron_ampipe.tools.measuring import machine, network, rank_processes
from megatron_ampipe.tools.measuring.grid import Case, find_grid, read_grid
from megatron_ampipe.tools.measuring.link import LinkKind
from megatron_ampipe.tools.measuring.link_arguments import (
    NO_LINK,
    add_link_arguments,
    link_of,
    num_ranks,
)
from megatron_ampipe.tools.profiling.assemble import Profile, assemble
from megatron_ampipe.tools.profiling.joined import measure_here, under_torchrun
from megatron_ampipe.tools.profiling.profile_job import ProfileJob
from megatron_ampipe.tools.whole_numbers import LARGEST_SEED, at_least

NUM_PARTS = 3
"""Steps of a measurement before the rounds of a real block: computation, collectives, both concurrently."""
WARMUP = 2
"""Rounds of a real block that do not count."""

_EPILOG = """\
examples:
  ampipe profile --link 200mbit --output cluster.yaml
      two ranks of this machine over a real 200 Mbit/s network between network namespaces (needs root)
  ampipe profile --link inter=50mbit,intra=400mbit --nodes 2 --ranks-per-node 2 --output cluster.yaml
      four ranks of this machine as two nodes; the file has figures of both classes of links
  torchrun --nproc-per-node 8 -m megatron_ampipe.cli profile --grid mixtral --output cluster.yaml
      the ranks that will train, on one node or several

Then: ampipe plan --cluster cluster.yaml --model MODEL, or train with --ampipe-degree auto --ampipe-cluster
cluster.yaml. Close other work first. Times are medians of a rank, and the slowest rank's counts.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ampipe profile``."""
    parser.description = "Measure what the operations of a block cost, and write a cluster file."
    parser.epilog = _EPILOG
    add = parser.add_argument
    grid = "file of blocks, or a name in configs/bench: the sizes of one of them are measured"
    timeout = "fail after so many seconds without an answer of any rank"
    chosen = " (default: %(default)s)"
    add("--output", metavar="FILE", type=Path, required=True, help="the cluster file to write")
    add("--grid", metavar="NAME|FILE", default="cpu-small", help=grid + chosen)
    add("--case", metavar="NAME", help="which block of the grid (default: the first)")
    add_link_arguments(parser, fewest_ranks=2)
    add("--repeats", metavar="N", type=at_least(3), default=7, help="timed calls of each operation" + chosen)
    add("--seed", metavar="N", type=at_least(0, at_most=LARGEST_SEED), default=1, help="of weights" + chosen)
    add("--timeout", metavar="S", type=at_least(1), default=300, help=timeout + chosen)


def run(arguments: argparse.Namespace) -> int:
    """Measure, fit and write.

    Raises:
        BadInput: an argument is refused.
        EnvironmentMissing: the link needs what is not there.
        RunFailed: a rank was lost, no line fits the times of some operation, or the file cannot be written.
    """
    outputs.check(arguments.output, flag="--output")
    case = _case(arguments)
    with _progress(steps=NUM_PARTS + WARMUP + arguments.repeats) as advance:
        if under_torchrun():
            _refuse_own_ranks(arguments)
            reports, ranks_per_node = measure_here(
                case, repeats=arguments.repeats, seed=arguments.seed, progress=lambda: advance("progress")
            )
            if int(os.environ["RANK"]) != 0:
                return 0
        else:
            job = _job(arguments, case)
            found = rank_processes.measure(job, timeout_s=arguments.timeout, on_event=advance)
            reports, ranks_per_node = found.cases[0], job.ranks_per_node
    command = shlex.join(["ampipe", *sys.argv[1:]])
    profile = assemble(
        case,
        reports,
        ranks_per_node=ranks_per_node,
        description=_description(case, arguments.link or NO_LINK, len(reports), reports[0]["kernel"]),
        source="measured by ampipe profile; medians of the slowest rank",
        device_memory_gib=_device_memory_gib(),
    )
    try:
        write_cluster(profile.cluster, arguments.output, head=command)
    finally:
        _show(profile)
    print(f"wrote {arguments.output}")
    return 0


def _job(arguments: argparse.Namespace, case: Case) -> ProfileJob:
    link, count = link_of(arguments), num_ranks(arguments)
    if link.kind is LinkKind.NETWORK:
        network.check_usable()
    num_gpus = 0 if link.kind is LinkKind.NETWORK else machine.num_gpus()
    if 0 < num_gpus < count:
        raise EnvironmentMissing(
            f"{count} ranks need as many GPUs, and there are {num_gpus}. Use --link RATE, which measures "
            "on the processor, or run where there are more."
        )
    if case.experts % count:
        raise BadInput(
            "--ranks",
            count,
            rule=f"does not divide the {case.experts} experts of case {case.name}",
            remedy="Use --ranks 2, or another grid.",
        )
    return ProfileJob(
        case=case,
        link=link.text,
        num_ranks=count,
        device="cuda" if num_gpus else "cpu",
        repeats=arguments.repeats,
        seed=arguments.seed,
        timeout_s=arguments.timeout,
        rendezvous="",
        cores=() if num_gpus else machine.cores_of(count),
    )


def _case(arguments: argparse.Namespace) -> Case:
    grid = read_grid(find_grid(arguments.grid))
    if arguments.case is None:
        return grid.cases[0]
    for case in grid.cases:
        if case.name == arguments.case:
            return case
    known = ", ".join(case.name for case in grid.cases[:5])
    raise BadInput(
        "--case",
        arguments.case,
        rule=f"is not in {grid.path}",
        remedy=f"Use one of {known}, or others there.",
    )


def _refuse_own_ranks(arguments: argparse.Namespace) -> None:
    for flag, value in (
        ("--ranks", arguments.ranks),
        ("--link", arguments.link),
        ("--nodes", arguments.nodes),
        ("--ranks-per-node", arguments.ranks_per_node),
    ):
        if value is not None:
            raise BadInput(
                flag,
                value,
                rule="is for ranks that the command starts itself, and torchrun has started these",
                remedy=f"Leave {flag} out.",
            )


def _description(case: Case, link: str, num_ranks: int, kernel: str) -> str:
    hardware, versions = machine.hardware(), machine.versions()
    what = f"{num_ranks} ranks, link {link}, attention {kernel}, around case {case.name}"
    return f"{hardware['cpu']}, torch {versions['torch']}: {what}"


def _device_memory_gib() -> float | None:
    if not machine.num_gpus():
        return None
    import torch

    return round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)


def _show(profile: Profile) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="what was fitted", caption="worst: the largest relative error of a measured size")
    for column in ("operation", "figures", "r^2", "worst"):
        table.add_column(column, justify="right" if column in ("r^2", "worst") else "left")
    for family, line in profile.lines.items():
        table.add_row(family, _figures(line.figures), f"{line.r_squared:.4f}", f"{line.worst:.0%}")
    overlap = profile.cluster.overlap
    table.add_row(
        "concurrent",
        f"computation {overlap.compute_slowdown:.2f} times as long, communication "
        f"{overlap.communication_slowdown:.2f} times and {overlap.latency_us:.4g} us",
        "",
        "",
    )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def _figures(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items())


@contextlib.contextmanager
def _progress(*, steps: int) -> Iterator[Callable[[str], None]]:
    """A bar on the terminal, nothing elsewhere; yields what takes each event of the first rank."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    quiet = not console.is_terminal or int(os.environ.get("RANK", "0")) != 0
    with Progress(*columns, console=console, transient=True, auto_refresh=False, disable=quiet) as bar:
        task = bar.add_task("", total=steps)

        def on_event(event: str) -> None:
            if event == "progress":
                bar.advance(task)
                bar.refresh()

        yield on_event
