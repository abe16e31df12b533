"""One layer on two nodes of two ranks over two classes of links: uncut, near rows first, in chunks; in turns.

The package does not divide rows by where they go. But a sequence whose first half stays in its node and
whose second half leaves it, with one expert per token and attention whole (``moe-only``), is that in two
chunks, in an order that begins with the first one in both passes. In the sequence of the others, every second
row leaves.

    python docs/measured/near_rows_speed.py FILE BETWEEN_MBIT WITHIN_MBIT REPEATS [FIELD=VALUE ...]

The fields are those of a case of ``configs/bench``, such as ``ffn=4096``.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_ampipe.schedule import WEIGHTS, Program, Schedule, Stage, build
from megatron_ampipe.schedule.kinds import ATTENTION, COMBINE, DISPATCH, EXPERT, MERGE, QKV, ROUTE
from megatron_ampipe.schedule.stage_kind import COMM, COMPUTE
from megatron_ampipe.tools.measuring import machine
from megatron_ampipe.tools.measuring.bench_job import STOCK, Variant
from megatron_ampipe.tools.measuring.grid import Case, block_of_case, find_grid, read_grid
from megatron_ampipe.tools.measuring.network import INTERFACE, burst_bytes, parse_link
from megatron_ampipe.tools.measuring.ranks import Rank, RankJob, run_ranks

RANKS, NODE = 4, 2
FAR_APART = 16.0
"""What a row's first number is, with a sign: so much that the router follows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NearJob(RankJob):
    """A block and what is compared: by name the variant, and whether its rows are in halves."""

    case: Case
    between_mbit: float
    within_mbit: float
    repeats: int
    variants: tuple[tuple[str, Variant, bool], ...]


def near_first(case: Case) -> Schedule:
    """Two chunks of which the first stays in its node: it goes first in both passes."""
    features = block_of_case(case, num_ranks=RANKS, fused_gradients=False).features
    schedule = build("moe-only", degree=2, features=features)
    weights = WEIGHTS[EXPERT]
    compute = [
        *(Stage(MERGE, chunk) for chunk in (0, 1)),
        *(Stage(kind, 0) for kind in (EXPERT, weights)),
        *(Stage(kind, 1) for kind in (EXPERT, weights)),
        *(Stage(ROUTE, chunk) for chunk in (0, 1)),
        *(Stage(kind) for kind in (ATTENTION, QKV)),
    ]
    comm = [Stage(kind, chunk) for kind in (COMBINE, DISPATCH) for chunk in (0, 1)]
    backward = Program.of({COMPUTE: compute, COMM: comm})
    return replace(schedule, name="near first", backward=backward)


def variants_of(case: Case) -> tuple[tuple[str, Variant, bool], ...]:
    """What is compared; Megatron's layer and the uncut one with both sequences, as a control."""
    order = near_first(case)
    chunks = [("moe-only", 2), ("moe-only", 4), ("ampipe", 2), ("ampipe", 4), ("joined", 2)]
    return (
        ("Megatron", Variant(STOCK), False),
        ("Megatron, halves", Variant(STOCK), True),
        ("uncut", Variant.of("lancet", 1), False),
        ("uncut, halves", Variant.of("lancet", 1), True),
        ("near first, halves", Variant.of("moe-only", 2, order=order), True),
        *((f"{name} {degree}", Variant.of(name, degree), False) for name, degree in chunks),
    )


def measure(rank: Rank[NearJob]) -> dict[str, list[float]]:
    """Seconds of every pass of each variant on this rank."""
    job = rank.job
    _shape(rank)
    rank.start_megatron()
    import torch

    from megatron_ampipe.tools.measuring.blocks import BlockFactory
    from megatron_ampipe.tools.measuring.timed_passes import Passes, compare

    factory = BlockFactory(rank, job.case)
    with torch.no_grad():
        # Experts of the first node look at the first number of a row, those of the second at its opposite.
        router = factory.stock.layers[0].mlp.router.weight
        router[:, 0] = torch.where(torch.arange(job.case.experts) < job.case.experts // NODE, 1.0, -1.0)
    places = torch.arange(job.case.sequence_length)[:, None]
    stays = {True: places < job.case.sequence_length // 2, False: places % 2 == 0}
    node = 1 - 2 * (rank.number // NODE)
    passes = {halves: Passes(rank, job.case) for halves in stays}
    for halves, mask in stays.items():
        passes[halves]._hidden[..., 0] = FAR_APART * node * torch.where(mask, 1.0, -1.0)
    layers = [factory.build(one) if one.pipelined else factory.stock for _, one, _ in job.variants]
    for wanted in stays:
        of_halves = [place for place, (_, _, halves) in enumerate(job.variants) if halves == wanted]
        variants = [job.variants[place][1] for place in of_halves]
        chosen = [layers[place] for place in of_halves]
        compare(passes[wanted], chosen, variants, rank=rank.number, case=job.case)
    seconds: dict[str, list[float]] = {name: [] for name, _, _ in job.variants}
    for repeat in range(job.repeats):
        order = [(repeat + step) % len(layers) for step in range(len(layers))]
        for place in order:
            name, _, halves = job.variants[place]
            seconds[name].append(passes[halves].run(layers[place]).wall_s)
    return seconds


def _shape(rank: Rank[NearJob]) -> None:
    """Give what leaves the node its own rate; everything is shaped to that of the node already."""
    between, within = (rate * 1e6 for rate in (rank.job.between_mbit, rank.job.within_mbit))
    mate = rank.number // NODE * NODE + (rank.number + 1) % NODE
    for command in (
        "qdisc replace dev {0} root handle 1: htb default 2",
        f"class add dev {{0}} parent 1: classid 1:1 htb rate {within:.0f}bit burst {burst_bytes(within)}b",
        f"class add dev {{0}} parent 1: classid 1:2 htb rate {between:.0f}bit burst {burst_bytes(between)}b",
        f"filter add dev {{0}} parent 1: protocol ip u32 match ip dst 10.77.0.{mate + 1}/32 flowid 1:1",
    ):
        subprocess.run(["tc", *command.format(INTERFACE).split()], check=True, capture_output=True)


def main() -> None:
    """Measure, write the document, and print a table."""
    target, between, within, repeats, *changes = sys.argv[1:]
    (case,) = read_grid(find_grid("cpu-small"), only="top1", num_ranks=RANKS)
    fields = {name: int(value) for name, value in (change.split("=") for change in changes)}
    case = replace(case, **fields)
    job = NearJob(
        num_ranks=RANKS,
        link=parse_link(f"{within}mbit"),
        case=case,
        between_mbit=float(between),
        within_mbit=float(within),
        repeats=int(repeats),
        variants=variants_of(case),
    )
    before = machine.hardware()
    by_rank = run_ranks(job, measure)
    slowest = {
        name: [1e3 * max(of_pass) for of_pass in zip(*(seconds[name] for seconds in by_rank), strict=True)]
        for name, _, _ in job.variants
    }
    found = {
        "command": ["python", *sys.argv],
        "versions": machine.versions(),
        "hardware": before,
        "load_average_after": machine.hardware()["load_average"],
        "ms": slowest,
    }
    Path(target).write_text(json.dumps(found, indent=1) + "\n")
    _show(slowest)


def _show(slowest: dict[str, Sequence[float]]) -> None:
    uncut = statistics.median([*slowest["uncut"], *slowest["uncut, halves"]])
    print("| layer | ms, median (fastest) | over uncut |\n|---|---|---|")
    for name, ms in slowest.items():
        print(
            f"| {name} | {statistics.median(ms):.0f} ({min(ms):.0f}) | {uncut / statistics.median(ms):.2f} |"
        )


if __name__ == "__main__":
    main()
