"""``ampipe bench``: Megatron's own layer against AMPipe's, interleaved in one run, over a chosen link.

Declares and checks the arguments and puts the parts of :mod:`megatron_ampipe.tools.benchmark` together.
Imports no torch: that is for the processes it starts. Called by :mod:`megatron_ampipe.cli`.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_ampipe.config import SCHEDULE_NAMES, parse_shares
from megatron_ampipe.errors import BadInput, EnvironmentMissing
from megatron_ampipe.plan.cluster import find_cluster, read_cluster
from megatron_ampipe.schedule import chunk_sequence
from megatron_ampipe.tools.benchmark import machine, network, prediction, ranks, result
from megatron_ampipe.tools.benchmark.arguments import at_least, cores_of
from megatron_ampipe.tools.benchmark.grid import Grid, find_grid, read_grid
from megatron_ampipe.tools.benchmark.job import Cut, Job
from megatron_ampipe.tools.benchmark.link import Link, LinkKind, parse_link

_EPILOG = """\
examples:
  ampipe bench --grid cpu-small --link 200mbit --degrees 1,2,4,8 --json bench.json
      two ranks over a real 200 Mbit/s network between network namespaces (needs root)
  ampipe bench --grid cpu-small --link emulated:200mbit:50us
      the same without root: every all-to-all, of both layers, takes as much longer
  ampipe bench --grid paper --link emulated:20GB/s --json paper.json --plot paper
      on one GPU: the paper's cases; the other ranks are only pretended, and the output says so
  ampipe bench --from bench.json --plot bench
      table and pictures of an earlier result

Before anything is timed, outputs and gradients of all layers are compared; a difference ends with code 4.
Close other work first: the columns '10-90 %' and the rows of degree 1, which are Megatron's layer again,
show how quiet the machine was.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ampipe bench``."""
    parser.description = (
        "Measure forward and backward of MoE blocks: Megatron's own layer and AMPipe's, in turns."
    )
    parser.epilog = _EPILOG
    add = parser.add_argument
    grid = "blocks to measure: a YAML file or a name in configs/bench"
    link = "none; a rate (200mbit) for a real network between namespaces; or emulated:RATE[:LATENCY]"
    degrees = "numbers of chunks; 4:2 is 4 in the forward pass and 2 in the backward pass"
    shares = "also measure chunks of these shares of the sequence (0.4,0.3,0.3); can be repeated"
    schedules = f"of {', '.join(SCHEDULE_NAMES)}"
    timeout = "give up after so many seconds without a sign of life"
    pretend = (
        "run one rank; what the others would send is zeros. Only with an emulated link, and chosen by itself "
        "where there are fewer GPUs than ranks"
    )
    predict = "also show what the planner predicts from this cluster file (ampipe profile writes one)"
    chosen = " (default: %(default)s)"
    add("--grid", metavar="NAME|FILE", default="cpu-small", help=grid + chosen)
    add("--link", metavar="L", default="none", help=link + chosen)
    add("--degrees", metavar="N,N", default="1,2,4,8", help=degrees + chosen)
    add("--chunks", metavar="SHARE,SHARE", action="append", default=[], help=shares)
    add("--schedules", metavar="S,S", default="moe-only,ampipe", help=schedules + chosen)
    add("--ranks", metavar="N", type=at_least(1), default=2, help="expert-parallel ranks" + chosen)
    add("--repeats", metavar="N", type=at_least(1), default=10, help="timed passes of each layer" + chosen)
    add("--warmup", metavar="N", type=at_least(0), default=2, help="passes before those" + chosen)
    add("--seed", metavar="N", type=at_least(0), default=1, help="of weights and inputs" + chosen)
    add("--timeout", metavar="S", type=at_least(1), default=300, help=timeout + chosen)
    add("--pretend-peers", action="store_true", help=pretend)
    add("--json", metavar="FILE", type=Path, help="write every sample and figure, versions and hardware")
    add("--plot", metavar="PREFIX", type=Path, help="write PREFIX-by-case.svg, .png and others")
    add("--predict", metavar="FILE", help=predict)
    add("--from", metavar="FILE", type=Path, dest="source", help="show and draw this result; measure nothing")


def run(arguments: argparse.Namespace) -> int:
    """Measure, or read a result; then print the table and draw.

    Raises:
        BadInput: an argument or a grid is refused.
        EnvironmentMissing: the link needs what is not there.
        DifferenceFound: the layers do not compute the same.
        RunFailed: a rank was lost.
    """
    if arguments.plot is not None and not arguments.plot.absolute().parent.is_dir():
        raise BadInput(
            "--plot",
            arguments.plot,
            rule="its directory does not exist",
            remedy="Make it, or choose another.",
        )
    if arguments.json is not None:
        result.check_target(arguments.json)
    cluster = None if arguments.predict is None else read_cluster(find_cluster(arguments.predict))
    if arguments.source is not None:
        document = result.read(arguments.source)
    else:
        document = _measure(arguments)
    if cluster is not None:
        prediction.predict(document, cluster)
    if arguments.json is not None:
        result.write(document, arguments.json)
    from rich.console import Console

    from megatron_ampipe.tools.benchmark import plot, table

    # A table in a file or a pipe is read later, by someone with more room.
    console = Console(width=None if sys.stdout.isatty() else 120)
    table.show(document, console)
    if arguments.json is not None:
        print(f"wrote {arguments.json}{_emulated(document)}")
    if arguments.plot is not None:
        written, left_out = plot.draw(document, arguments.plot)
        for path in written:
            print(f"wrote {path}{_emulated(document)}")
        for reason in left_out:
            print(f"not drawn, {reason}")
    return 0


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Check everything, run the ranks, and write the JSON."""
    link = parse_link(arguments.link)
    grid = read_grid(find_grid(arguments.grid))
    job = _job(arguments, link, grid)
    if link.kind is LinkKind.NETWORK:
        network.check_usable()
    hardware = machine.hardware()
    begin = datetime.now(UTC)
    with _progress(job) as advance:
        findings = ranks.measure(job, timeout_s=arguments.timeout, on_event=advance)
    return {
        "format": result.FORMAT,
        "command": shlex.join(["ampipe", *sys.argv[1:]]),
        "begin": begin.isoformat(timespec="seconds"),
        "end": datetime.now(UTC).isoformat(timespec="seconds"),
        "grid": grid.name,
        "link": link.text,
        "emulated": link.emulated,
        "pretended": job.pretended,
        "ranks": job.num_ranks,
        "device": job.device,
        "cores": list(job.cores),
        "cuts": list(map(str, job.cuts)),
        "schedules": list(job.schedules),
        "repeats": job.repeats,
        "warmup": job.warmup,
        "seed": job.seed,
        "hardware": {
            **hardware,
            **findings.hardware,
            "load_average_after": machine.hardware()["load_average"],
        },
        "versions": machine.versions(),
        "cases": [
            result.case_result(case, job.variants, reports, link=link)
            for case, reports in zip(job.cases, findings.cases, strict=True)
        ],
    }


def _job(arguments: argparse.Namespace, link: Link, grid: Grid) -> Job:
    num_gpus = 0 if link.kind is LinkKind.NETWORK else machine.num_gpus()
    job = Job(
        cases=grid.cases,
        schedules=_schedules(arguments.schedules),
        cuts=_cuts(arguments.degrees, arguments.chunks),
        link=link.text,
        num_ranks=arguments.ranks,
        pretended=arguments.pretend_peers or (link.emulated and 0 < num_gpus < arguments.ranks),
        device="cuda" if num_gpus else "cpu",
        repeats=arguments.repeats,
        warmup=arguments.warmup,
        seed=arguments.seed,
        timeout_s=arguments.timeout,
        rendezvous="",
        cores=() if num_gpus else cores_of(arguments.ranks),
    )
    if job.pretended and not link.emulated:
        raise BadInput(
            "--pretend-peers",
            "",
            rule=f"--link {link.text} needs real ranks",
            remedy="Use --link emulated:RATE.",
        )
    if 0 < num_gpus < job.num_processes:
        raise EnvironmentMissing(
            f"{job.num_ranks} ranks need as many GPUs, and there are {num_gpus}. Use --link emulated:RATE, "
            "which pretends the missing ranks."
        )
    _check_cases(job, grid)
    return job


def _check_cases(job: Job, grid: Grid) -> None:
    for case in job.cases:
        if case.experts % job.num_ranks:
            raise BadInput(
                "--ranks",
                job.num_ranks,
                rule=f"does not divide the {case.experts} experts of case {case.name} in {grid.path}",
                remedy="Use --ranks 2, or change the grid.",
            )
        for cut in job.cuts:
            degree = max(cut.degree, cut.backward_degree or 1)
            if degree > case.sequence_length:
                raise BadInput(
                    "--degrees",
                    degree,
                    rule=f"is above the {case.sequence_length} rows of case {case.name} in {grid.path}",
                    remedy="Use --degrees 1,2,4.",
                )
            if cut.shares is not None:
                shares = cut.shares
                chunk_sequence(case.sequence_length, degree=degree, shares=shares, flag="--chunks")


def _cuts(degrees: str, chunks: list[str]) -> tuple[Cut, ...]:
    found = [_cut(word, degrees) for word in degrees.split(",")]
    for text in chunks:
        shares = parse_shares(text, flag="--chunks")
        found.append(Cut(len(shares), shares=shares))
    return tuple(dict.fromkeys(found))


def _cut(word: str, text: str) -> Cut:
    """One word of ``--degrees``: ``4``, or ``4:2``."""
    parts = word.split(":")
    if len(parts) > 2 or not all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
        raise BadInput(
            "--degrees",
            text or "(empty)",
            rule="is not a list of whole numbers of at least 1",
            remedy="Use --degrees 1,2,4,8, or 4:2 for a backward pass of degree 2.",
        )
    forward, backward = int(parts[0]), int(parts[-1])
    if max(forward, backward) % min(forward, backward):
        raise BadInput(
            "--degrees", word, rule="one of the two must divide the other", remedy="Use for example 4:2."
        )
    return Cut(forward, None if forward == backward else backward)


def _schedules(text: str) -> tuple[str, ...]:
    words = text.split(",")
    unknown = [word for word in words if word not in SCHEDULE_NAMES]
    if unknown:
        raise BadInput(
            "--schedules",
            unknown[0] or "(empty)",
            rule=f"is not one of {', '.join(SCHEDULE_NAMES)}",
            remedy="Use --schedules moe-only,ampipe.",
        )
    return tuple(dict.fromkeys(words))


def _emulated(document: dict[str, Any]) -> str:
    return " (emulated link)" if document["emulated"] else ""


@contextlib.contextmanager
def _progress(job: Job) -> Iterator[Callable[[str], None]]:
    """A bar on the terminal, nothing elsewhere; yields what is to be told each event of a rank."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal
    ) as bar:
        # Of each case, the check with the warm-up and then every repeat.
        task = bar.add_task("starting ranks", total=len(job.cases) * (job.repeats + 1))
        cases = iter(job.cases)

        def on_event(event: str) -> None:
            if event == "progress":
                bar.advance(task)
            elif event in ("ready", "case"):
                case = next(cases, None)
                bar.update(task, description=case.name if case else "writing")
            bar.refresh()

        yield on_event
