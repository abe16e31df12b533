"""``ampipe bench``: compares Megatron's layers with AMPipe's, interleaved in one run, over a chosen link.

Arguments and their checks, the job, the document. Imports no torch: only the ranks that it starts do.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from tqdm import tqdm

from megatron_ampipe.block.settings import AUTO, PARTNER_ORDERS, SHIPPED_WIRES, class_path
from megatron_ampipe.compat import has_fused_weight_gradients
from megatron_ampipe.errors import AMPipeError
from megatron_ampipe.files import outputs
from megatron_ampipe.files.inputs import adder, at_least, matching, several
from megatron_ampipe.files.outputs import Report
from megatron_ampipe.plan.block import Block
from megatron_ampipe.plan.cluster import find_cluster, read_cluster
from megatron_ampipe.plan.recorded_routing import read_routing
from megatron_ampipe.schedule import (
    KEEP,
    PAPER_NAMES,
    SCHEDULE_NAMES,
    STRATEGIES,
    Exchange,
    Partner,
    Pipeline,
    build,
    check_memory,
    is_custom,
    parse_exchanges,
    parse_stack,
)
from megatron_ampipe.tools import pictures, result_picture
from megatron_ampipe.tools.measuring import machine, prediction, result, training
from megatron_ampipe.tools.measuring.bench_job import (
    CONTROL,
    EXACT,
    FIXED,
    STOCK,
    STOCK_GRAPHS,
    BenchJob,
    Variant,
)
from megatron_ampipe.tools.measuring.grid import Case, block_of_case, find_grid, read_grid
from megatron_ampipe.tools.measuring.network import RANKS, add_link_arguments, check_nodes
from megatron_ampipe.tools.measuring.ranks import Rank, run_ranks
from megatron_ampipe.tools.measuring.reports import CaseReport

DEGREES = "1,2,4,8"
"""The default of ``--degrees``."""
OFF = "off"
"""The value of ``--partner`` without partners."""
UNCHANGED = "none"
"""The value of ``--wire`` that sends rows unchanged."""
NO_GRAPHS, LOCAL_GRAPHS = "none", "local"
"""Values of ``--cuda-graph-impl``, which are Megatron's."""
_FUNCTION = r"[\w.]+:\w+"
LAYERS_OF_TRAINING, ROUNDS = 2, 3
"""Defaults of ``--end-to-end``."""

EPILOG = """\
examples:
  ampipe bench --grid cpu-small --link 200mbit --json bench.json
      two ranks over a real 200 Mbit/s network between network namespaces (needs root)
  ampipe bench --grid cpu-small --link emulated:200mbit:50us
      the same without root: every all-to-all, of both layers, takes as much longer
  ampipe bench --grid paper --link emulated:20GB/s --json paper.json
      on one GPU: the paper's cases; the other ranks are emulated, and the output says so
  ampipe bench --grid mixtral --ranks 8 --link emulated:20GB/s --rows fixed --cuda-graph-impl local
      on one GPU: every pass as one CUDA graph, next to Megatron's layers with its own graphs
  ampipe bench --ranks 4 --ranks-per-node 2 --link inter=50mbit,intra=400mbit --exchange rows,ranks,nodes
      two nodes of two ranks: a slow network between them, and a faster one within each
  ampipe bench --end-to-end --link 100mbit --schedules ampipe --degrees 4 --json training.json
      iterations per second of Megatron's whole training loop, and whether the losses are the same
  ampipe bench --ranks 4 --link emulated:200mbit --imbalance 2
      as in a training where the busiest rank gets twice the mean
  ampipe bench --from bench.json --predict cluster.yaml
      table of an earlier result, next to what the planner predicts
  ampipe bench --from 100mbit.json 200mbit.json --plot speedups.png --csv speedups.csv
      the tables of earlier results, a picture of all of them, and their rows for a spreadsheet

Before anything is timed, outputs and gradients of all layers are compared; a difference ends with code 4.
Close other work first: the row 'control', Megatron's layer measured a second time, shows how quiet the
machine was. A speedup that is nearer to 1 than its spread is marked as no difference seen.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ampipe bench``."""
    add = adder(parser)
    add("--grid", "NAME|FILE", "blocks to measure: a file or a name in configs/bench", default="cpu-small")
    add("--cases", "NAME,NAME", "only these cases of the grid (default: all)")
    add_link_arguments(parser, fewest_ranks=1)
    _add_variants(add)
    _add_routing(adder(parser.add_mutually_exclusive_group()))
    _add_repeats(add)
    _add_outputs(add)


def _add_variants(add: Callable[..., None]) -> None:
    """What is compared: all combinations."""
    chunks = "numbers of chunks; 4:2 is 4 forward and 2 backward"
    add("--degrees", "N,N", chunks, type=several(_degree), default=DEGREES)
    schedules = several(matching("|".join((*SCHEDULE_NAMES, _FUNCTION)), "ampipe"))
    named = f"of {', '.join(SCHEDULE_NAMES)}, or a function package.module:function that returns an order"
    add("--schedules", "S,S", named, type=schedules, default="moe-only,ampipe")
    layers = f"consecutive blocks measured together (default: 1; {LAYERS_OF_TRAINING} with --end-to-end)"
    add("--layers", "N", layers, type=at_least(1))
    stacks = "how many of these layers share a schedule: numbers (1 is block by block), or all"
    add("--stack", "N,N", stacks, default="1,all")
    memories = ", ".join((*STRATEGIES, *PAPER_NAMES))
    memory = f"what the experts keep for their backward: {memories}, or one for each chunk (keep/rebuild)"
    add("--memory", "M,M", memory, default=KEEP)
    exchange = (
        f"how the all-to-all groups copies of a token: {', '.join(Exchange)}, or {AUTO} for all; each is "
        "measured where it saves something, those for nodes with --ranks-per-node"
    )
    add("--exchange", "E,E", exchange, default="rows")
    wires = f"how rows are cast for the transfer: {UNCHANGED}, {', '.join(SHIPPED_WIRES)} or a class"
    add("--wire", "W,W", wires, default=UNCHANGED)
    rows = (
        f"how many rows a chunk sends, as --ampipe-rows: {EXACT}, {FIXED}, with budgets learned before timing"
    )
    add("--rows", "R,R", rows, type=several(matching(f"{EXACT}|{FIXED}", EXACT)), default=EXACT)
    graphs = (
        f"{NO_GRAPHS}, or {LOCAL_GRAPHS} for CUDA graphs: whole passes with --rows {FIXED}, otherwise stages "
        "of attention and router; next to Megatron's layers with its own graphs of these; needs a GPU"
    )
    impl = several(matching(f"{NO_GRAPHS}|{LOCAL_GRAPHS}", NO_GRAPHS))
    add("--cuda-graph-impl", "I,I", graphs, type=impl, default=NO_GRAPHS)
    orders = " or ".join(PARTNER_ORDERS)
    partners = f"with --end-to-end: partners, {OFF} or their order, {orders} (default: {OFF})"
    add("--partner", "P,P", partners, type=several(matching("|".join((OFF, *PARTNER_ORDERS)), OFF)))


def _add_routing(add: Callable[..., None]) -> None:
    """How unevenly experts are used."""
    busiest = "rows of the busiest rank over the mean, by a bias of the router (default: as the grid says, 1)"
    add("--imbalance", "X", busiest, type=float)
    recorded = "take that from a training that ran with --ampipe-routing-dir"
    add("--routing", "DIR", recorded, type=Path)


def _add_repeats(add: Callable[..., None]) -> None:
    """How it is measured, and how often."""
    positive = at_least(1)
    add("--repeats", "N", "timed passes of each layer", type=positive, default=10)
    add("--warmup", "N", "passes before those", type=at_least(0), default=2)
    add("--seed", "N", "of weights and inputs", type=at_least(0), default=1)
    emulate = (
        "run one rank; what the others would send is made from what it sends. Only with an emulated link; "
        "the default where there are fewer GPUs than ranks"
    )
    add("--emulate-peers", None, emulate, action="store_true")
    # As the commands of older results name it.
    add("--pretend-peers", None, argparse.SUPPRESS, action="store_true", dest="emulate_peers")
    end_to_end = (
        "train models of these blocks with Megatron's own loop instead, on CPUs: --repeats iterations after "
        "--warmup ones"
    )
    add("--end-to-end", None, end_to_end, action="store_true")
    add("--micro-batches", "N", "with --end-to-end: of each rank in an iteration (default: 2)", type=positive)
    rounds = f"with --end-to-end: trainings of each kind, in turns (default: {ROUNDS})"
    add("--rounds", "N", rounds, type=positive)


def _add_outputs(add: Callable[..., None]) -> None:
    """What is written and shown."""
    add("--json", "FILE", "write all samples, versions and hardware after every case", type=Path)
    add("--predict", "FILE", "show what the planner predicts from this file of ampipe profile")
    add("--from", "FILE", "show these results; measure nothing", type=Path, dest="sources", nargs="+")
    suffixes = " or ".join(pictures.SUFFIXES)
    plot = f"draw the speedups with their spread; the suffix, {suffixes}, gives the format"
    add("--plot", "FILE", plot, type=Path)
    csv = "write the rows of the table, and of stock, as comma-separated values with a line of names"
    add("--csv", "FILE", csv, type=Path)


def run(arguments: argparse.Namespace) -> int:
    """Measure, or read results; then print the table, and write the other outputs."""
    for flag, path in (("--json", arguments.json), ("--csv", arguments.csv)):
        if path is not None:
            outputs.check(path, flag=flag)
    if arguments.plot is not None:
        pictures.check(arguments.plot, flag="--plot")
    _check_together(arguments)
    cluster = None if arguments.predict is None else read_cluster(find_cluster(arguments.predict))
    if arguments.sources is None:
        documents = [_measure(arguments)]
    else:
        documents = [result.read(source) for source in arguments.sources]
    for document in documents:
        if cluster is not None:
            if document["format"] == training.FORMAT:
                arguments.refuse("--predict is for results of blocks, and --from names one of a training")
            prediction.predict(document, cluster)
        _show(document)
    if arguments.json is not None:
        result.write(documents[0], arguments.json)
    if arguments.csv is not None:
        outputs.write_text(arguments.csv, result.csv_text(documents))
    if arguments.plot is not None:
        result_picture.draw(documents, target=arguments.plot)
    emulated = " (emulated link)" * any(document["emulated"] for document in documents)
    unknown = machine.without_commit(documents[0]["versions"])
    for path in (arguments.json, arguments.csv, arguments.plot):
        if path is not None:
            print(f"wrote {path}{emulated}{unknown}")
    return 0


def _show(document: Report) -> None:
    if document.get("format") != training.FORMAT:
        prediction.predict_peaks(document)
    # A table in a file or a pipe may be wider than this terminal.
    result.show(document, Console(width=None if sys.stdout.isatty() else 170))


def _measure(arguments: argparse.Namespace) -> Report:
    """Run the ranks; returns the document, written after each case, and shown also after a failure."""
    job = _job(arguments)
    job_fields = ("device", "cores", "layers", "repeats", "warmup", "seed")
    document: Report = {
        "format": training.FORMAT if arguments.end_to_end else result.FORMAT,
        "command": arguments.command_line,
        "begin": _now(),
        "grid": Path(arguments.grid).stem,
        "link": job.link.text,
        "emulated": job.link.emulated,
        "ranks": job.num_ranks,
        "ranks_per_node": job.ranks_per_node,
        "pretended": job.emulates_peers,
        **{key: getattr(job, key) for key in job_fields},
        "versions": machine.versions(),
        "hardware": machine.hardware(),
        "cases": [],
    }

    def finished(case: Report) -> None:
        document["cases"].append(case)
        document["end"] = _now()
        document["hardware"]["load_average_after"] = machine.hardware()["load_average"]
        if arguments.json is not None:
            result.write(document, arguments.json)

    try:
        unit = " iterations" if arguments.end_to_end else " passes"
        with tqdm(desc=f"{job.num_ranks} ranks start", leave=False, disable=None, unit=unit) as bar:

            def on_pass() -> None:
                if not bar.n:
                    bar.set_description_str("ampipe bench")
                bar.update()

            if arguments.end_to_end:
                document["rounds"] = rounds = arguments.rounds or ROUNDS
                trainings = rounds * sum(map(len, job.variants))
                bar.reset(total=trainings * (job.warmup + job.repeats))
                document |= {"micro_batches": job.micro_batches, "loss_tolerance": training.TOLERANCE}
                for case in training.measure(job, rounds=rounds, on_iteration=on_pass):
                    finished(case)
            else:
                _time_blocks(job, document["hardware"], on_pass=on_pass, finished=finished)
    except (AMPipeError, KeyboardInterrupt) as error:
        if document["cases"]:
            _show(document)
            error.add_note("The finished cases are in the table, and in the file of --json if there is one.")
        raise
    return document


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _time_blocks(
    job: BenchJob,
    hardware: Report,
    *,
    on_pass: Callable[[], object],
    finished: Callable[[Report], None],
) -> None:
    """Time blocks; ``finished`` is called with each entry of ``cases``."""
    reports: list[dict[int, CaseReport]] = [{} for _ in job.cases]

    def on_message(rank: int, event: str, value: Any) -> None:
        if event == "case":
            index, reports[index][rank] = value
            if len(reports[index]) == (1 if job.emulates_peers else job.num_ranks):
                finished(result.case_result(job, index, [reports[index][n] for n in sorted(reports[index])]))
        elif rank == 0 and event == "gpu":
            hardware.update(value)
        elif rank == 0:
            on_pass()

    run_ranks(job, measure_blocks, on_message=on_message)


def measure_blocks(rank: Rank[BenchJob]) -> None:
    """Measure every case of the job in a rank; sends a message ``case`` with index and report for each."""
    job, emulation = rank.job, rank.start_megatron()
    # Imports Megatron, so it must come after the link is emulated.
    import torch

    from megatron_ampipe.tools.measuring import timed_passes

    if job.on_cuda:
        rank.say("gpu", {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)})
    for index, case in enumerate(job.cases):
        if emulation is not None:
            emulation.num_experts = case.experts
        rank.say("case", (index, timed_passes.measure(rank, case, job.variants[index])))


def _check_together(arguments: argparse.Namespace) -> None:
    """Refuse flags that could have no effect together."""
    if arguments.end_to_end:
        if arguments.sources is not None:
            arguments.refuse("--from shows results, and --end-to-end measures one; leave one of them out")
        if arguments.predict is not None:
            arguments.refuse(
                f"--predict {arguments.predict} works with results of blocks; leave out --end-to-end"
            )
    else:
        for flag in ("rounds", "partner", "micro-batches"):
            value = getattr(arguments, flag.replace("-", "_"))
            if value is not None:
                arguments.refuse(f"--{flag} {value} is for trainings; add --end-to-end")
    if arguments.json is not None and len(arguments.sources or ()) > 1:
        arguments.refuse(f"--json {arguments.json} holds one result; give one file to --from, or use --csv")
    if arguments.wire != UNCHANGED and (arguments.end_to_end or arguments.predict):
        arguments.refuse(
            f"--wire {arguments.wire} changes the losses of trainings, and predictions do not know it; leave "
            "out --end-to-end and --predict"
        )


def _job(arguments: argparse.Namespace) -> BenchJob:
    link, end_to_end, count = arguments.link, arguments.end_to_end, arguments.ranks or RANKS
    num_gpus = 0 if link.is_network or end_to_end else machine.num_gpus()
    _check_graphs(arguments, num_gpus)
    emulates_peers = arguments.emulate_peers or (link.emulated and 0 < num_gpus < count)
    if end_to_end and emulates_peers:
        arguments.refuse("--emulate-peers: a training needs every rank's gradients; leave out --end-to-end")
    check_nodes(arguments, count)
    if emulates_peers and arguments.ranks_per_node is not None:
        arguments.refuse(
            f"--ranks-per-node {arguments.ranks_per_node} with emulated peers, which pass no rows on within "
            "a node; leave --ranks-per-node out, or use a --link that needs no emulated peers"
        )
    if emulates_peers and not link.emulated:
        arguments.refuse(f"--emulate-peers with --link {link.text}; use --link emulated:RATE")
    cases = read_grid(find_grid(arguments.grid), only=arguments.cases, num_ranks=count)
    imbalance = _imbalance(arguments, count)
    if imbalance is not None:
        cases = tuple(replace(case, imbalance=imbalance) for case in cases)
    if (end_to_end or emulates_peers) and any(case.imbalance > 1 for case in cases):
        arguments.refuse(
            "--imbalance: emulated peers send what they get, and a training changes the bias of its routers; "
            "leave it out with --emulate-peers and --end-to-end"
        )
    if FIXED in arguments.rows:
        _check_fixed_rows(arguments, cases, on_gpu=num_gpus > 0)
    layers = arguments.layers or (LAYERS_OF_TRAINING if end_to_end else 1)
    fused = has_fused_weight_gradients(on_gpu=num_gpus > 0)
    blocks = [block_of_case(case, num_ranks=count, fused_gradients=fused) for case in cases]
    return BenchJob(
        cases=cases,
        variants=tuple(
            _variants(arguments, case, block, layers) for case, block in zip(cases, blocks, strict=True)
        ),
        layers=layers,
        link=link,
        num_ranks=count,
        ranks_per_node=arguments.ranks_per_node,
        emulates_peers=emulates_peers,
        device="cuda" if num_gpus else "cpu",
        repeats=arguments.repeats,
        warmup=arguments.warmup,
        seed=arguments.seed,
        micro_batches=arguments.micro_batches or 2,
    )


def _check_graphs(arguments: argparse.Namespace, num_gpus: int) -> None:
    """Refuse ``--cuda-graph-impl local`` where nothing can be captured."""
    if LOCAL_GRAPHS not in arguments.cuda_graph_impl:
        return
    for flag, value, usual in (
        ("--memory", arguments.memory, KEEP),
        ("--wire", arguments.wire, UNCHANGED),
        ("--exchange", arguments.exchange, Exchange.ROWS),
    ):
        if value != usual:
            arguments.refuse(
                f"--cuda-graph-impl {LOCAL_GRAPHS} with {flag} {value}: no graph can have both; leave one out"
            )
    if not num_gpus:
        arguments.refuse(
            f"--cuda-graph-impl {LOCAL_GRAPHS} needs a GPU, and a link that is none or emulated; leave it out"
        )


def _check_fixed_rows(arguments: argparse.Namespace, cases: Sequence[Case], *, on_gpu: bool) -> None:
    """Refuse ``--rows fixed`` where AMPipe's layers cannot have them."""
    flag = f"--rows {FIXED}"
    if arguments.end_to_end:
        arguments.refuse(f"{flag} is for blocks; leave out --end-to-end, or use --ampipe-rows in a training")
    if arguments.exchange != Exchange.ROWS:
        arguments.refuse(f"{flag} with --exchange {arguments.exchange}; leave out --exchange")
    for case in cases:
        if case.grouped:
            arguments.refuse(
                f"{flag}: case {case.name} has grouped products of experts, which run with exact rows here; "
                "choose --cases with transformer_impl: local and expert_kind: sequential"
            )
        if on_gpu and case.dtype == "fp32":
            arguments.refuse(
                f"{flag}: case {case.name} is in fp32, and on a GPU only experts in 16 bit take numbers of "
                "rows from the device; choose --cases with dtype: bf16"
            )


def _imbalance(arguments: argparse.Namespace, num_ranks: int) -> float | None:
    """The imbalance that replaces that of the grid; None to leave it."""
    if arguments.routing is None:
        given: float | None = arguments.imbalance
        return given
    routing = read_routing(arguments.routing, flag="--routing")
    if routing.num_experts % num_ranks:
        arguments.refuse(
            f"--routing {arguments.routing} is of {routing.num_experts} experts, which --ranks {num_ranks} "
            "cannot share equally"
        )
    return routing.imbalance(num_ranks)


def _variants(arguments: argparse.Namespace, case: Case, block: Block, layers: int) -> tuple[Variant, ...]:
    """The variants to compare in a case: stock, its control, and each schedule with all combinations."""
    useful = set(block.exchanges(arguments.ranks_per_node))
    exchanges = parse_exchanges(arguments.exchange, flag="--exchange")
    if not useful & set(exchanges):
        arguments.refuse(
            f"--exchange {arguments.exchange} saves nothing in case {case.name}: no rank gets a token twice, "
            "or there are no nodes (--ranks-per-node); choose --cases with several experts per token and "
            "rank, or rows,ranks"
        )
    variants = [Variant(STOCK), Variant(CONTROL)]
    if LOCAL_GRAPHS in arguments.cuda_graph_impl:
        variants.append(Variant(STOCK_GRAPHS, graphs=True))
    for rows_kind, graphs, schedule, cut, stack, memory, wire, exchange, partner in itertools.product(
        *(arguments.rows, arguments.cuda_graph_impl),
        *(arguments.schedules, arguments.degrees, arguments.stack.split(",")),
        *(arguments.memory.split(","), arguments.wire.split(","), exchanges),
        arguments.partner or [OFF],
    ):
        rows = case.sequence_length
        if cut.num_chunks > rows:
            arguments.refuse(f"--degrees {cut.num_chunks} is above the {rows} rows of case {case.name}")
        is_cut = cut.num_chunks > 1
        check_memory(memory, flag="--memory", backward_degree=cut.backward_degree if is_cut else None)
        size = parse_stack(stack, flag="--stack") or layers
        if size > layers:
            arguments.refuse(f"--stack {stack} is above the number of layers; use --layers {size}, or all")
        pipeline = replace(
            cut,
            schedule=schedule,
            stack=size,
            # With one chunk, no activation is restored.
            memory=memory if is_cut else KEEP,
            exchange=exchange,
        )
        if partner != OFF and stack != "1":
            pipeline = replace(pipeline, partner=Partner(order=partner))
        elif not pipeline.overlaps:
            # Layers without overlap share no schedule, send all rows unchanged, and have no graphs.
            pipeline, wire = replace(pipeline, stack=1), UNCHANGED
            rows_kind, graphs = EXACT, NO_GRAPHS
        if is_custom(schedule) and pipeline.overlaps and not arguments.end_to_end:
            # With the result, so that --from and the ranks need not import the function.
            degrees = {"degree": cut.degree, "backward_degree": cut.backward_degree}
            pipeline = replace(pipeline, order=build(schedule, features=block.features, **degrees))
        if wire != UNCHANGED:
            class_path(wire, SHIPPED_WIRES, flag="--wire")
        if exchange in useful:
            encoded = None if wire == UNCHANGED else wire
            captures = graphs == LOCAL_GRAPHS
            variants.append(Variant(schedule, pipeline, encoded, rows=rows_kind, graphs=captures))
    return tuple(dict.fromkeys(variants))


def _degree(word: str) -> Pipeline:
    """A type for ``argparse``: ``4``, or ``4:2``."""
    forward, _, backward = word.partition(":")
    try:
        return Pipeline.of(int(forward), backward_degree=int(backward or forward))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{word!r} is no whole number of at least 1, and no pair of which one divides the other; write "
            f"for example {DEGREES}, or 4:2 for a backward pass of degree 2"
        ) from None
