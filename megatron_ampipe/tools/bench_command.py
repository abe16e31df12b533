"""``ampipe bench``: compares Megatron's layers with AMPipe's, interleaved in one run, over a chosen link.

Arguments and their checks, the job, the document. Imports no torch: that is for the ranks that it starts.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from megatron_ampipe.block.named_values import SHIPPED_WIRES, check_wire
from megatron_ampipe.block.settings import AUTO
from megatron_ampipe.compat import has_fused_weight_gradients
from megatron_ampipe.errors import AMPipeError, BadInput, EnvironmentMissing
from megatron_ampipe.files import outputs
from megatron_ampipe.plan.cluster import find_cluster, read_cluster
from megatron_ampipe.schedule import (
    KEEP,
    PAPER_NAMES,
    SCHEDULE_NAMES,
    STRATEGIES,
    check_memory,
    chunk_sequence,
    of_chunks,
    parse_exchanges,
    parse_shares,
    parse_stack,
)
from megatron_ampipe.tools.measuring import machine, network, prediction, result, training
from megatron_ampipe.tools.measuring.bench_job import BenchJob, Cut
from megatron_ampipe.tools.measuring.grid import Grid, find_grid, read_grid
from megatron_ampipe.tools.measuring.link import LinkKind, add_link_arguments, link_of, num_ranks
from megatron_ampipe.tools.measuring.ranks import Rank, progress_bar, run_ranks
from megatron_ampipe.tools.whole_numbers import LARGEST_SEED, at_least

UNCHANGED = "none"
"""The value of ``--wire`` with which rows travel as they are."""
LAYERS_OF_TRAINING, ROUNDS = 2, 3
"""Of ``--end-to-end``, where they are not given."""


_EPILOG = """\
examples:
  ampipe bench --grid cpu-small --link 200mbit --degrees 1,2,4,8 --json bench.json
      two ranks over a real 200 Mbit/s network between network namespaces (needs root)
  ampipe bench --grid cpu-small --link emulated:200mbit:50us
      the same without root: every all-to-all, of both layers, takes as much longer
  ampipe bench --grid paper --link emulated:20GB/s --json paper.json --plot paper
      on one GPU: the paper's cases; the other ranks are only pretended, and the output says so
  ampipe bench --link 200mbit --layers 8 --stack all --schedules ampipe --degrees 4 --memory keep,rebuild
      eight layers under one schedule, whose experts keep everything, or compute their inner tensors once more
  ampipe bench --link inter=50mbit,intra=400mbit --nodes 2 --ranks-per-node 2 --exchange rows,ranks
      a slow network between two nodes and a faster one within each
  ampipe bench --end-to-end --link 100mbit --schedules ampipe --degrees 4 --json training.json
      iterations per second of Megatron's whole training loop, and whether the losses are the same
  ampipe profile --link 100mbit --output mine.yaml && ampipe bench --link 100mbit --planned mine.yaml
      what ampipe plan would choose for each block, and schedules and degrees chosen by hand
  ampipe bench --from bench.json --plot bench --predict cluster.yaml
      table and pictures of an earlier result, next to what the planner predicts

Before anything is timed, outputs and gradients of all layers are compared; a difference ends with code 4.
Close other work first: the row 'control', Megatron's layer measured a second time, shows how quiet the
machine was. A speedup that is nearer to 1 than its spread is marked as no difference seen.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ampipe bench``."""
    parser.description = (
        "Measure forward and backward of MoE blocks: Megatron's own layers and AMPipe's, in turns."
    )
    parser.epilog = _EPILOG
    add = parser.add_argument
    grid = "blocks to measure: a YAML file or a name in configs/bench"
    degrees = "numbers of chunks; 4:2 is 4 in the forward pass and 2 in the backward pass"
    shares = "also measure chunks of these shares of the sequence (0.4,0.3,0.3); can be repeated"
    schedules = f"of {', '.join(SCHEDULE_NAMES)}"
    timeout = "fail after so many seconds without an answer of any rank"
    end_to_end = (
        "train models of these blocks with Megatron's own loop instead, on CPUs: --repeats iterations after "
        "--warmup ones"
    )
    layers = (
        "consecutive blocks that are measured together, each with its own weights "
        f"(default: 1; {LAYERS_OF_TRAINING} with --end-to-end)"
    )
    stack = (
        "how many of these layers share a schedule, so that a chunk enters the next layer before the others "
        "have left this one: 1 is block by block; numbers, or 'all' (default: 1,all)"
    )
    memory = (
        f"what the experts keep for their backward pass: of {', '.join((*STRATEGIES, *PAPER_NAMES))}, or one "
        "for each chunk (keep/rebuild/rebuild/rebuild); several are compared"
    )
    exchange = (
        "how the all-to-all groups copies of a token: rows (one per expert, as Megatron), ranks (one per "
        "rank with some of them), nodes (one per node, with --nodes), several of these, or auto for all; "
        "each is measured in cases where it saves something"
    )
    wire = (
        f"how rows are cast for the transfer: {UNCHANGED}, {', '.join(SHIPPED_WIRES)} or a class; several "
        "are compared, their numbers with those of Megatron's layers"
    )
    rounds = f"trainings of each kind, in turns (default: {ROUNDS}; with --end-to-end only)"
    gloo = (
        "also measure Megatron's layers with gloo's own all-to-all, in place of the one that Megatron's and "
        "AMPipe's layers share on a CPU (stock-gloo)"
    )
    pretend = (
        "run one rank; what the others would send is made from what it sends. Only with an emulated link, "
        "and chosen automatically if there are fewer GPUs than ranks"
    )
    samples = "write every sample and figure, versions and hardware, whenever a case is finished"
    predict = "also show what the planner predicts from this cluster file (ampipe profile writes one)"
    planned = "also measure what the planner chooses for each case and stack on this cluster"
    chosen = " (default: %(default)s)"
    add("--grid", metavar="NAME|FILE", default="cpu-small", help=grid + chosen)
    add("--cases", metavar="NAME,NAME", help="only these cases of the grid (default: all)")
    add_link_arguments(parser, fewest_ranks=1)
    add("--degrees", metavar="N,N", default="1,2,4,8", help=degrees + chosen)
    add("--chunks", metavar="SHARE,SHARE", action="append", default=[], help=shares)
    add("--planned", metavar="CLUSTER", help=planned)
    add("--schedules", metavar="S,S", default="moe-only,ampipe", help=schedules + chosen)
    add("--repeats", metavar="N", type=at_least(1), default=10, help="timed passes of each layer" + chosen)
    add("--warmup", metavar="N", type=at_least(0), default=2, help="passes before those" + chosen)
    add(
        "--seed",
        metavar="N",
        type=at_least(0, at_most=LARGEST_SEED),
        default=1,
        help="of weights and inputs" + chosen,
    )
    add("--timeout", metavar="S", type=at_least(1), default=300, help=timeout + chosen)
    add("--pretend-peers", action="store_true", help=pretend)
    add("--end-to-end", action="store_true", help=end_to_end)
    add("--layers", metavar="N", type=at_least(1), help=layers)
    add("--stack", metavar="N,N", help=stack)
    add("--memory", metavar="M,M", default=KEEP, help=memory + chosen)
    add("--exchange", metavar="E,E", default="rows", help=exchange + chosen)
    add("--wire", metavar="W,W", default=UNCHANGED, help=wire + chosen)
    add("--gloo-all-to-all", action="store_true", help=gloo)
    add("--rounds", metavar="N", type=at_least(1), help=rounds)
    add("--json", metavar="FILE", type=Path, help=samples)
    add("--plot", metavar="PREFIX", type=Path, help="write PREFIX-by-case.svg, .png and others")
    add("--predict", metavar="FILE", help=predict)
    add("--from", metavar="FILE", type=Path, dest="source", help="show and draw this result; measure nothing")


def run(arguments: argparse.Namespace) -> int:
    """Measure, or read a result; then print the table and draw.

    Raises:
        BadInput: an argument, a grid or an output is refused.
        EnvironmentMissing: the link needs what is not there.
        DifferenceFound: the layers do not compute the same.
        RunFailed: a rank was lost, or an output cannot be written any more.
    """
    from megatron_ampipe.tools.measuring import show

    if arguments.plot is not None:
        show.check_target(arguments.plot)
    if arguments.json is not None:
        outputs.check(arguments.json, flag="--json")
    _check_together(arguments)
    cluster = None if arguments.predict is None else read_cluster(find_cluster(arguments.predict))
    document = _measure(arguments) if arguments.source is None else _read(arguments.source)
    emulated = " (emulated link)" * document["emulated"]
    if not arguments.end_to_end:
        prediction.predict_peaks(document)
    if cluster is not None:
        prediction.predict(document, cluster)
    try:
        if arguments.json is not None:
            result.write(document, arguments.json)
    finally:
        # Also if the disk has become full meanwhile.
        _show(document)
    if arguments.json is not None:
        print(f"wrote {arguments.json}{emulated}")
    if arguments.plot is not None:
        for path in (written := show.draw(document, arguments.plot)):
            print(f"wrote {path}{emulated}")
        if not written:
            print("not drawn: no degree above 1 was measured")
    return 0


def _read(path: Path) -> dict[str, Any]:
    try:
        return result.read(path)
    except (OSError, ValueError) as error:
        rule = "is not a result of ampipe bench"
        if isinstance(error, OSError):
            rule = f"cannot be read ({error.strerror})"
        _refuse("--from", path, rule, "Give a file that ampipe bench --json wrote, not one of --end-to-end.")


def _show(document: dict[str, Any]) -> None:
    from rich.console import Console

    from megatron_ampipe.tools.measuring import show

    # A table in a file or a pipe may be wider than this terminal.
    show.show(document, Console(width=None if sys.stdout.isatty() else 170))


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Check everything and run the ranks; the document.

    It is written whenever a case is finished. If the run ends early, what is finished is shown, and a note of
    the exception says where it is.
    """
    grid = read_grid(find_grid(arguments.grid)).only(arguments.cases)
    job = _job(arguments, grid)
    if job.link.kind is LinkKind.NETWORK:
        network.check_usable()
    hardware = machine.hardware()
    document: dict[str, Any] = {
        "format": result.FORMAT,
        "command": shlex.join(["ampipe", *sys.argv[1:]]),
        "begin": _now(),
        "end": None,
        "grid": grid.name,
        "link": job.link.text,
        "emulated": job.link.emulated,
        "ranks": job.num_ranks,
        "clean": machine.is_clean(),
        "cuts": list(map(str, job.cuts)),
        **{key: getattr(job, key) for key in _WRITTEN},
        "versions": machine.versions(),
        "hardware": hardware,
        "missing_cases": [case.name for case in job.cases],
        "cases": [],
    }
    num_written = 0

    def finished(case: dict[str, Any]) -> None:
        nonlocal num_written
        document["cases"].append(case)
        document["missing_cases"].remove(case["name"])
        document["end"] = _now()
        hardware["load_average_after"] = machine.hardware()["load_average"]
        if arguments.json is not None:
            result.write(document, arguments.json)
            num_written += 1

    try:
        if arguments.end_to_end:
            rounds = arguments.rounds or ROUNDS
            document |= {"format": training.FORMAT, "rounds": rounds, "micro_batches": training.MICRO_BATCHES}
            document |= {"loss_tolerance": training.TOLERANCE}
            _train(job, rounds=rounds, finished=finished)
        else:
            _time_blocks(job, hardware, finished=finished)
    except (AMPipeError, KeyboardInterrupt) as error:
        if document["cases"]:
            _show(document)
            error.add_note(_what_is_finished(document, arguments.json, num_written=num_written))
        raise
    return document


_WRITTEN = ("pretended", "device", "cores", "schedules", "layers", "stacks", "memories", "exchanges", "wires",
            "gloo_all_to_all", "repeats", "warmup", "seed")  # fmt: skip
"""Fields of a job that its document holds."""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _what_is_finished(document: dict[str, Any], path: Path | None, *, num_written: int) -> str:
    """Where the finished cases of a run that has ended early are, and how the others are measured."""
    num_finished, missing = len(document["cases"]), document["missing_cases"]
    text = f"{num_finished} of {num_finished + len(missing)} cases are finished, and in the table"
    if num_written:
        text += f"; {path} has {num_written} of them"
        if document["format"] == result.FORMAT:
            text += f" (ampipe bench --from {shlex.quote(str(path))})"
    if missing:
        text += f". Measure the others with --cases {','.join(missing)}"
        text += " and another --json file" * (path is not None)
    return f"{text}."


def _time_blocks(
    job: BenchJob, hardware: dict[str, Any], *, finished: Callable[[dict[str, Any]], None]
) -> None:
    """Time blocks; ``finished`` is given each entry of ``cases``."""
    reports: list[dict[int, Any]] = [{} for _ in job.cases]
    with progress_bar(sum(map(job.num_passes, range(len(job.cases))))) as bar:
        cases = iter(job.cases)

        def on_message(rank: int, event: str, value: Any) -> None:
            if event == "case":
                number, report = value
                reports[number][rank] = report
                if len(reports[number]) == job.num_processes:
                    of_ranks = [reports[number][each] for each in sorted(reports[number])]
                    case, variants = job.cases[number], job.variants_of(number)
                    finished(result.case_result(case, job, variants, of_ranks))
            if rank == 0 and event == "progress":
                bar(advance=1)
            elif rank == 0:
                hardware.update(value if event == "ready" else {})
                case = next(cases, None)
                bar(description=case.name if case else "writing")

        run_ranks(job, measure_blocks, on_message=on_message)


def measure_blocks(rank: Rank[BenchJob]) -> None:
    """Measure every case of the job, in a rank; each is a message ``case`` with its index and the report."""
    emulation = rank.start_megatron()
    # Imports Megatron, which must not come before the link is emulated.
    import torch

    from megatron_ampipe.tools.measuring import blocks, timed_passes

    # All of them before the first is measured.
    for case in rank.job.cases:
        blocks.require(case, on_cuda=rank.job.on_cuda)
    gpu = {}
    if rank.job.on_cuda:
        gpu = {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    rank.say("ready", gpu)
    for index, case in enumerate(rank.job.cases):
        if emulation is not None:
            emulation.num_experts = case.experts
        report = timed_passes.measure(rank, case, rank.job.variants_of(index))
        rank.say("case", (index, report | {"clock": emulation and emulation.clock}))


def _train(job: BenchJob, *, rounds: int, finished: Callable[[dict[str, Any]], None]) -> None:
    """Train whole models; ``finished`` is given each entry of ``cases``."""
    trainings = sum(len(job.variants_of(number)) for number in range(len(job.cases))) * rounds
    with progress_bar(trainings * (job.warmup + job.repeats)) as bar:
        for case in training.measure(
            job, rounds=rounds, on_iteration=lambda what: bar(advance=1, description=what)
        ):
            finished(case)


def _refuse(flag: str, value: object, rule: str, remedy: str) -> NoReturn:
    raise BadInput(flag, value, rule=rule, remedy=remedy)


def _check_together(arguments: argparse.Namespace) -> None:
    """Refuse flags that could have no effect together."""
    blocks_only = {"--plot": arguments.plot, "--from": arguments.source, "--predict": arguments.predict,
                   "--planned": arguments.planned}  # fmt: skip
    if arguments.end_to_end:
        for flag, value in blocks_only.items():
            if value is not None:
                rule = "works with results of blocks, not with --end-to-end"
                _refuse(flag, value, rule, f"Leave {flag} out; --json holds every sample.")
    elif arguments.rounds is not None:
        rule = "belongs to --end-to-end: without it, nothing is trained"
        _refuse("--rounds", arguments.rounds, rule, "Add --end-to-end, or leave --rounds out.")
    if arguments.source is not None and (arguments.planned or arguments.gloo_all_to_all):
        flag = "--planned" if arguments.planned else "--gloo-all-to-all"
        rule = "is for what will be measured, and --from measures nothing"
        _refuse(flag, arguments.planned or "", rule, "Leave one of the two out.")
    alone = not (arguments.end_to_end or arguments.planned or arguments.predict)
    if arguments.wire != UNCHANGED and not alone:
        rule = "changes the losses of trainings, and predictions do not know it"
        _refuse("--wire", arguments.wire, rule, "Leave out --end-to-end, --planned and --predict.")


def _job(arguments: argparse.Namespace, grid: Grid) -> BenchJob:
    link, count, end_to_end = link_of(arguments), num_ranks(arguments), arguments.end_to_end
    num_gpus = 0 if link.kind is LinkKind.NETWORK or end_to_end else machine.num_gpus()
    layers = arguments.layers or (LAYERS_OF_TRAINING if end_to_end else 1)
    cuts = _cuts(arguments.degrees, arguments.chunks)
    job = BenchJob(
        cases=grid.cases,
        layers=layers,
        stacks=_stacks(arguments.stack, layers=layers),
        memories=_memories(arguments.memory, cuts),
        exchanges=parse_exchanges(arguments.exchange, flag="--exchange"),
        wires=_wires(arguments.wire),
        schedules=_schedules(arguments.schedules),
        cuts=cuts,
        link=link,
        num_ranks=count,
        pretended=arguments.pretend_peers or (link.emulated and 0 < num_gpus < count),
        device="cuda" if num_gpus else "cpu",
        repeats=arguments.repeats,
        warmup=arguments.warmup,
        seed=arguments.seed,
        timeout_s=arguments.timeout,
        cores=() if num_gpus else machine.cores_of(count),
        gloo_all_to_all=arguments.gloo_all_to_all,
    )
    _check_link(job, end_to_end=end_to_end)
    if 0 < num_gpus < job.num_processes:
        raise EnvironmentMissing(
            f"{count} ranks need as many GPUs, and there are {num_gpus}. Use --link emulated:RATE, "
            "which pretends the missing ranks."
        )
    grid.check_ranks(count)
    for case in grid.cases:
        if end_to_end and case.expert_kind != "sequential":
            rule = f"expert_kind {case.expert_kind} of case {case.name} needs a GPU in a training"
            _refuse("--end-to-end", "", rule, "Choose another case, or write expert_kind: sequential.")
        for cut in cuts:
            rows, degree = case.sequence_length, cut.num_chunks
            if degree > rows:
                rule = f"is above the {rows} rows of case {case.name} in {grid.path}"
                _refuse("--degrees", degree, rule, "Use --degrees 1,2,4.")
            chunk_sequence(rows, degree=degree, shares=cut.shares, flag="--chunks")
    _check_exchanges(job, grid, asked=arguments.exchange)
    if arguments.planned is None:
        return job
    cluster = read_cluster(find_cluster(arguments.planned))
    fused = has_fused_weight_gradients(on_gpu=job.on_cuda)
    plans = [prediction.planned(job, case, cluster, fused_gradients=fused) for case in job.cases]
    return dataclasses.replace(job, planned=tuple(plans))


def _check_link(job: BenchJob, *, end_to_end: bool) -> None:
    emulated, text = job.link.emulated, job.link.text
    if end_to_end and (emulated or job.pretended):
        rule = (
            "a training needs real ranks: what it learns depends on every token that arrives, and an "
            "emulated link would not slow its other collectives"
        )
        flag, value = ("--link", text) if emulated else ("--pretend-peers", "")
        _refuse(flag, value, rule, "Use --link 200mbit, or --link none.")
    if job.pretended and not emulated:
        _refuse("--pretend-peers", "", f"--link {text} needs real ranks", "Use --link emulated:RATE.")
    if job.gloo_all_to_all and (job.on_cuda or emulated):
        rule = f"has no effect with --link {text}, on which every all-to-all takes the same time"
        if job.on_cuda:
            rule = "is for CPUs: on GPUs, Megatron's and AMPipe's layers call NCCL's all-to-all"
        _refuse("--gloo-all-to-all", "", rule, "Use --link 200mbit or, without GPUs, none; or leave it out.")


def _check_exchanges(job: BenchJob, grid: Grid, *, asked: str) -> None:
    two_hops = [exchange for exchange in job.exchanges if exchange.has_two_hops]
    if two_hops and job.ranks_per_node is None and asked != AUTO:
        remedy = "Use --link inter=50mbit,intra=400mbit --nodes 2 --ranks-per-node 2."
        _refuse("--exchange", ",".join(two_hops), f"--link {job.link.text} has no nodes", remedy)
    if not any(set(job.useful_exchanges(case)) & set(job.exchanges) for case in job.cases):
        rule = f"saves nothing in the cases of {grid.path}: no rank gets a token twice"
        remedy = "Use cases with several experts per token and rank, or --exchange rows."
        _refuse("--exchange", ",".join(job.exchanges), rule, remedy)


def _cuts(degrees: str, chunks: Sequence[str]) -> tuple[Cut, ...]:
    """The values of ``--degrees`` (``4``, or ``4:2``) and ``--chunks``, each once."""
    cuts = []
    for word in degrees.split(","):
        # Python does not read a number of thousands of digits.
        parts = [int(part) if part.isascii() and part.isdecimal() and len(part) < 10 else 0
                 for part in word.split(":")]  # fmt: skip
        if len(parts) > 2 or min(parts) < 1 or max(parts) % min(parts):
            rule = "is not a list of whole numbers of at least 1, or pairs of which one divides the other"
            remedy = "Use --degrees 1,2,4,8, or 4:2 for a backward pass of degree 2."
            _refuse("--degrees", degrees or "(empty)", rule, remedy)
        cuts.append(Cut(parts[0], parts[-1]))
    for text in chunks:
        shares = parse_shares(text, flag="--chunks")
        cuts.append(Cut.of(len(shares), shares=shares))
    return tuple(dict.fromkeys(cuts))


def _schedules(text: str) -> tuple[str, ...]:
    words = text.split(",")
    for word in words:
        if word not in SCHEDULE_NAMES:
            rule, remedy = f"is not one of {', '.join(SCHEDULE_NAMES)}", "Use --schedules moe-only,ampipe."
            _refuse("--schedules", word or "(empty)", rule, remedy)
    return tuple(dict.fromkeys(words))


def _memories(text: str, cuts: Sequence[Cut]) -> tuple[str, ...]:
    """The value of ``--memory``; strategies of single chunks must be for one of the cuts."""
    words = text.split(",")
    degrees = {cut.backward_degree for cut in cuts}
    for word in words:
        fits = len(of_chunks(word)) in {1, *degrees}
        check_memory(word, flag="--memory", backward_degree=None if fits else max(degrees))
    return tuple(dict.fromkeys(words))


def _stacks(text: str | None, *, layers: int) -> tuple[int, ...]:
    """The value of ``--stack``, ``all`` as a number; block by block and all layers together if None."""
    sizes = []
    for word in (text if text is not None else "1,all").split(","):
        size = parse_stack(word, flag="--stack") or layers
        if size > layers:
            rule = f"is above the number of layers ({layers}), which cannot share a schedule with others"
            _refuse("--stack", word, rule, f"Use --layers {size}, or --stack all.")
        sizes.append(size)
    return tuple(dict.fromkeys(sizes))


def _wires(text: str) -> tuple[str | None, ...]:
    words = dict.fromkeys(text.split(","))
    for word in words:
        if word != UNCHANGED:
            check_wire(word, flag="--wire")
    return tuple(None if word == UNCHANGED else word for word in words)
