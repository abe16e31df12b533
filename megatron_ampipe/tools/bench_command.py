"""``ampipe bench``: compares Megatron's layers with AMPipe's, interleaved in one run, over a chosen link.

Puts the parts of :mod:`megatron_ampipe.tools.benchmark` together.
Imports no torch: that is for the processes it starts. Called by :mod:`megatron_ampipe.cli`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import shlex
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_ampipe.compat import has_fused_weight_gradients
from megatron_ampipe.errors import AMPipeError, BadInput, EnvironmentMissing
from megatron_ampipe.files import outputs
from megatron_ampipe.plan.cluster import find_cluster, read_cluster
from megatron_ampipe.schedule import ALL_EXCHANGES, chunk_sequence, parse_exchanges
from megatron_ampipe.tools.benchmark import prediction, result, result_file, training
from megatron_ampipe.tools.benchmark.argument_values import (
    ROUNDS,
    check_gloo,
    check_training,
    cuts,
    layers,
    memories,
    schedules,
    stacks,
    wires,
)
from megatron_ampipe.tools.benchmark.arguments import add_arguments
from megatron_ampipe.tools.benchmark.bench_job import BenchJob
from megatron_ampipe.tools.measuring import machine, network, rank_processes
from megatron_ampipe.tools.measuring.grid import Grid, find_grid, read_grid
from megatron_ampipe.tools.measuring.link import Link, LinkKind
from megatron_ampipe.tools.measuring.link_arguments import link_of, num_ranks

__all__ = ["add_arguments", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Measure, or read a result; then print the table and draw.

    Raises:
        BadInput: an argument, a grid or an output is refused.
        EnvironmentMissing: the link needs what is not there.
        DifferenceFound: the layers do not compute the same.
        RunFailed: a rank was lost, or an output cannot be written any more.
    """
    from megatron_ampipe.tools.benchmark import plot

    if arguments.plot is not None:
        plot.check_target(arguments.plot)
    if arguments.json is not None:
        outputs.check(arguments.json, flag="--json")
    link = link_of(arguments)
    check_training(arguments, link)
    for flag, value in (
        ("--planned", arguments.planned),
        ("--gloo-all-to-all", "" if arguments.gloo_all_to_all else None),
    ):
        if arguments.source is not None and value is not None:
            rule = "is for what will be measured, and --from measures nothing"
            raise BadInput(flag, value, rule=rule, remedy="Leave one of the two out.")
    cluster = None if arguments.predict is None else read_cluster(find_cluster(arguments.predict))
    if arguments.source is not None:
        document = result_file.read(arguments.source)
    else:
        document = _measure(arguments, link)
    if not arguments.end_to_end:
        prediction.predict_peaks(document)
    if cluster is not None:
        prediction.predict(document, cluster)
    try:
        if arguments.json is not None:
            result_file.write(document, arguments.json)
    finally:
        # Also if the disk has become full meanwhile.
        _show(document, end_to_end=arguments.end_to_end)
    if arguments.json is not None:
        print(f"wrote {arguments.json}{_emulated(document)}")
    if arguments.plot is not None:
        written, left_out = plot.draw(document, arguments.plot)
        for path in written:
            print(f"wrote {path}{_emulated(document)}")
        for reason in left_out:
            print(f"not drawn, {reason}")
    return 0


def _show(document: dict[str, Any], *, end_to_end: bool) -> None:
    from rich.console import Console

    from megatron_ampipe.tools.benchmark import table

    # A table in a file or a pipe may be wider than this terminal.
    console = Console(width=None if sys.stdout.isatty() else 150)
    (training if end_to_end else table).show(document, console)


def _measure(arguments: argparse.Namespace, link: Link) -> dict[str, Any]:
    """Check everything and run the ranks; the document.

    It is written whenever a case is finished. If the run ends early, what is finished is shown, and a note of
    the exception says where it is.
    """
    grid = read_grid(find_grid(arguments.grid)).only(arguments.cases)
    job = _job(arguments, link, grid)
    if link.kind is LinkKind.NETWORK:
        network.check_usable()
    hardware = machine.hardware()
    document: dict[str, Any] = {
        "format": result_file.FORMAT,
        "command": shlex.join(["ampipe", *sys.argv[1:]]),
        "begin": _now(),
        "end": None,
        "grid": grid.name,
        "link": link.text,
        "emulated": link.emulated,
        "pretended": job.pretended,
        "ranks": job.num_ranks,
        "device": job.device,
        "clean": machine.is_clean(),
        "cores": list(job.cores),
        "cuts": list(map(str, job.cuts)),
        "schedules": list(job.schedules),
        "layers": job.layers,
        "stacks": list(job.stacks),
        "memories": list(job.memories),
        "exchanges": list(job.exchanges),
        "wires": list(job.wires),
        "gloo_all_to_all": job.gloo_all_to_all,
        "repeats": job.repeats,
        "warmup": job.warmup,
        "seed": job.seed,
        "versions": machine.versions(),
        "hardware": hardware,
        "missing_cases": [case.name for case in job.cases],
        "cases": [],
    }
    num_written = 0

    def finished(case: dict[str, Any], of_ranks: dict[str, str]) -> None:
        nonlocal num_written
        document["cases"].append(case)
        document["missing_cases"].remove(case["name"])
        document["end"] = _now()
        hardware.update(of_ranks, load_average_after=machine.hardware()["load_average"])
        if arguments.json is not None:
            result_file.write(document, arguments.json)
            num_written += 1

    try:
        if arguments.end_to_end:
            document |= training.settings(rounds=arguments.rounds or ROUNDS)
            _train(job, rounds=document["rounds"], finished=finished)
        else:
            _time_blocks(job, link, finished=finished)
    except (AMPipeError, KeyboardInterrupt) as error:
        if document["cases"]:
            _show(document, end_to_end=arguments.end_to_end)
            error.add_note(_what_is_finished(document, arguments.json, num_written=num_written))
        raise
    return document


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _what_is_finished(document: dict[str, Any], path: Path | None, *, num_written: int) -> str:
    """Where the finished cases of a run that has ended early are, and how the others are measured."""
    num_finished, missing = len(document["cases"]), document["missing_cases"]
    text = f"{num_finished} of {num_finished + len(missing)} cases are finished, and in the table"
    if num_written:
        text += f"; {path} has {num_written} of them"
        if document["format"] == result_file.FORMAT:
            text += f" (ampipe bench --from {shlex.quote(str(path))})"
    if missing:
        text += f". Measure the others with --cases {','.join(missing)}"
        text += " and another --json file" * (path is not None)
    return f"{text}."


def _time_blocks(job: BenchJob, link: Link, *, finished: Callable[..., None]) -> None:
    """Time blocks; ``finished`` is given each entry of ``cases`` and what the ranks know of their device."""
    with _progress(sum(map(job.num_passes, range(len(job.cases))))) as bar:
        cases = iter(job.cases)

        def on_event(event: str) -> None:
            if event == "progress":
                bar(advance=1)
            elif event in ("ready", "case"):
                case = next(cases, None)
                bar(description=case.name if case else "writing")

        def on_case(number: int, found: rank_processes.RankReports) -> None:
            case, reports = job.cases[number], found.cases[number]
            finished(
                result.case_result(case, job.variants_of(number), reports, link=link, layers=job.layers),
                found.hardware,
            )

        rank_processes.measure(job, timeout_s=job.timeout_s, on_event=on_event, on_case=on_case)


def _train(job: BenchJob, *, rounds: int, finished: Callable[..., None]) -> None:
    """Train whole models; ``finished`` is given each entry of ``cases``."""
    trainings = sum(len(job.variants_of(number)) for number in range(len(job.cases))) * rounds
    iterations = trainings * (job.warmup + job.repeats)
    with _progress(iterations) as bar:
        for case in training.measure(
            job, rounds=rounds, on_iteration=lambda what: bar(advance=1, description=what)
        ):
            finished(case, {})


def _job(arguments: argparse.Namespace, link: Link, grid: Grid) -> BenchJob:
    on_cpu = link.kind is LinkKind.NETWORK or arguments.end_to_end
    num_gpus = 0 if on_cpu else machine.num_gpus()
    num_layers, count = layers(arguments), num_ranks(arguments)
    compared = cuts(arguments.degrees, arguments.chunks)
    job = BenchJob(
        cases=grid.cases,
        layers=num_layers,
        stacks=stacks(arguments.stack, layers=num_layers),
        memories=memories(arguments.memory, compared),
        exchanges=parse_exchanges(arguments.exchange, flag="--exchange"),
        wires=wires(arguments.wire),
        schedules=schedules(arguments.schedules),
        cuts=compared,
        link=link.text,
        num_ranks=count,
        pretended=arguments.pretend_peers or (link.emulated and 0 < num_gpus < count),
        device="cuda" if num_gpus else "cpu",
        repeats=arguments.repeats,
        warmup=arguments.warmup,
        seed=arguments.seed,
        timeout_s=arguments.timeout,
        rendezvous="",
        cores=() if num_gpus else machine.cores_of(count),
        gloo_all_to_all=arguments.gloo_all_to_all,
    )
    if job.gloo_all_to_all:
        check_gloo(link=link, on_cuda=num_gpus > 0, pretended=job.pretended)
    if job.wires != (None,) and (arguments.end_to_end or arguments.planned or arguments.predict):
        raise BadInput(
            "--wire",
            arguments.wire,
            rule="is measured for blocks alone: trainings would differ in their losses, and predictions do "
            "not know it",
            remedy="Leave out --end-to-end, --planned and --predict.",
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
    if arguments.end_to_end:
        for case in job.cases:
            if case.expert_kind != "sequential":
                raise BadInput(
                    "--end-to-end",
                    "",
                    rule=f"expert_kind {case.expert_kind} of case {case.name} needs a GPU in a training",
                    remedy="Choose another with --cases, or write expert_kind: sequential.",
                )
    _check_cases(job, grid, asked=arguments.exchange)
    if arguments.planned is None:
        return job
    cluster = read_cluster(find_cluster(arguments.planned))
    fused = has_fused_weight_gradients(on_gpu=job.device == "cuda")
    plans = [
        prediction.planned(
            case,
            cluster,
            stacks=job.stacks,
            exchanges=job.exchanges,
            num_ranks=job.num_ranks,
            fused_gradients=fused,
        )
        for case in job.cases
    ]
    return dataclasses.replace(job, planned=tuple(plans))


def _check_cases(job: BenchJob, grid: Grid, *, asked: str) -> None:
    two_hops = [one for one in job.exchanges if one.has_two_hops]
    if two_hops and job.ranks_per_node is None and asked != ALL_EXCHANGES:
        raise BadInput(
            "--exchange",
            ",".join(two_hops),
            rule=f"--link {job.link} has no nodes",
            remedy="Use --link inter=50mbit,intra=400mbit --nodes 2 --ranks-per-node 2.",
        )
    if not any(one in job.useful_exchanges(case) for case in job.cases for one in job.exchanges):
        raise BadInput(
            "--exchange",
            ",".join(job.exchanges),
            rule=f"saves nothing in the cases of {grid.path}: no rank gets a token twice",
            remedy="Use cases with several experts per token and rank, or --exchange rows.",
        )
    for case in job.cases:
        if case.experts % job.num_ranks:
            raise BadInput(
                "--ranks",
                job.num_ranks,
                rule=f"does not divide the {case.experts} experts of case {case.name} in {grid.path}",
                remedy="Use --ranks 2, or change the grid.",
            )
        for cut in job.cuts:
            degree = cut.num_chunks
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


def _emulated(document: dict[str, Any]) -> str:
    return " (emulated link)" if document["emulated"] else ""


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[..., None]]:
    """A bar on the terminal, nothing elsewhere; yields what updates it (``advance``, ``description``)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("starting ranks", total=total)

        def update(**changes: Any) -> None:
            bar.update(task, **changes)
            bar.refresh()

        yield update
