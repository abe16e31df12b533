"""What gradients of weights as separate stages save: during a transfer, and joined over chunks.

``covers``: the blocks of ``cpu-lengths`` in one chunk, two ranks with a core each. Two orders of the same
stages, in turns, which differ in one point: in ``covered`` (``--ampipe-schedule lancet``) gradients of the
experts' weights are a stage that runs while the tokens travel back; in ``not covered`` the stage of the
experts computes them, before. So the difference of their backward passes is what is covered, and nothing of
the exchange or of what stages cost is in it. *Coverable* is the shorter one of the two alone: of the transfer
while nothing runs (its stage in ``not covered``), and of the products (the experts' stage in ``not covered``,
less that in ``covered``).

    python docs/measured/lancet.py covers docs/measured/results/lancet-covers-200mbit.json --repeats 120

``joined``: what gradients of weights of all chunks at once take back of what cutting costs: time of
degree 4 over that of Megatron's layer, on the blocks of ``cpu-small``.

    python docs/measured/lancet.py joined FILE --link none --repeats 24
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ampipe.schedule import WEIGHTS, BlockFeatures, Pipeline, build, from_text, to_text
from megatron_ampipe.schedule.kinds import EXPERT
from megatron_ampipe.tools.measuring import machine
from megatron_ampipe.tools.measuring.bench_job import STOCK, BenchJob, Variant
from megatron_ampipe.tools.measuring.grid import find_grid, read_grid
from megatron_ampipe.tools.measuring.network import parse_link
from megatron_ampipe.tools.measuring.ranks import Rank, run_ranks

WARMUP = 3
SILENCE_S = 120.0
COVERED, NOT_COVERED = "covered", "not covered"


@dataclass(frozen=True, slots=True, kw_only=True)
class LancetJob(BenchJob):
    """Which orders are compared."""

    what: str


def covers() -> dict[str, str | None]:
    """Two orders in one chunk, as text."""
    covered = build("lancet", degree=1, features=FEATURES)
    backward = covered.backward.mapped(
        lambda stages: (stage for stage in stages if stage.kind is not WEIGHTS[EXPERT])
    )
    not_covered = replace(covered, backward=backward)
    return {COVERED: to_text(covered), NOT_COVERED: to_text(not_covered)}


def joined() -> dict[str, str | None]:
    """Two named orders: gradients of weights by chunk, and of all chunks at once."""
    return {"ampipe": None, "joined": None}


FEATURES = BlockFeatures(chunked_qkv=True)
WHAT = {"covers": (covers, 1, "cpu-lengths", None), "joined": (joined, 4, "cpu-small", "top1,top2")}
"""Its orders, their degree, grid and cases."""


def variants(what: str) -> tuple[Variant, ...]:
    """Megatron's layer, and both orders."""
    orders, degree, _, _ = WHAT[what]
    texts = orders().items()
    return (
        Variant(STOCK),
        *(
            Variant.of(name, degree)
            if text is None
            else Variant(name, Pipeline.of(degree, order=from_text(text)))
            for name, text in texts
        ),
    )


def main() -> None:
    """Measure, and write and print what came out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("file", type=Path)
    parser.add_argument("--link", default="200mbit")
    parser.add_argument("--repeats", type=int, default=60)
    asked = parser.parse_args()
    orders, _, grid, names = WHAT[asked.what]
    cases = read_grid(find_grid(grid), only=names)
    job = LancetJob(
        what=asked.what,
        cases=cases,
        link=parse_link(asked.link),
        num_ranks=2,
        repeats=asked.repeats,
        warmup=WARMUP,
        seed=1,
        timeout_s=SILENCE_S,
    )
    found = list(zip(*run_ranks(job, work), strict=True))
    judge = of_covers if asked.what == "covers" else of_joined
    document = {
        "command": ["python", *sys.argv],
        "link": asked.link,
        "orders": orders(),
        "hardware": machine.hardware(),
        "versions": machine.versions(),
        "cases": {case.name: judge(found[index]) for index, case in enumerate(cases)},
    }
    asked.file.write_text(json.dumps(document, indent=1) + "\n")
    for name, case in document["cases"].items():
        print(name, {key: value for key, value in case.items() if not key.startswith("samples")})


def of_covers(ranks: Sequence[list[dict[str, Any]]]) -> dict[str, Any]:
    """The figures of one case, milliseconds, from what all ranks measured."""
    names = [variant.schedule for variant in variants("covers")]
    backward = {
        name: [1e3 * max(times) for times in zip(*(rank[index]["backward_s"] for rank in ranks), strict=True)]
        for index, name in enumerate(names)
    }

    def stage(name: str, stage: str) -> float:
        """Median over passes of the slowest rank."""
        of_ranks = (rank[names.index(name)]["stages"]["backward"][stage] for rank in ranks)
        return statistics.median(map(max, zip(*of_ranks, strict=True))) / 1e3

    saved = [a - b for a, b in zip(backward[NOT_COVERED], backward[COVERED], strict=True)]
    products = stage(NOT_COVERED, "expert.0") - stage(COVERED, "expert.0")
    transfer = stage(NOT_COVERED, "dispatch.0")
    coverable = min(products, transfer)
    return {
        "backward ms": {name: statistics.median(samples) for name, samples in backward.items()},
        "products ms": products,
        "transfer ms": transfer,
        "coverable ms": coverable,
        "covered ms": statistics.median(saved),
        "covered, quartiles ms": statistics.quantiles(saved, n=4)[::2],
        "share covered": statistics.median(saved) / coverable,
        "samples backward ms": backward,
    }


def of_joined(ranks: Sequence[list[dict[str, Any]]]) -> dict[str, Any]:
    """Likewise: times, of the slower rank."""
    names = [variant.schedule for variant in variants("joined")]
    times = {
        name: [max(one) for one in zip(*(rank[index]["wall_s"] for rank in ranks), strict=True)]
        for index, name in enumerate(names)
    }
    return {
        "ms": {name: 1e3 * statistics.median(found) for name, found in times.items()},
        "samples s": times,
    }


def work(rank: Rank[LancetJob]) -> list[dict[str, Any]]:
    """One rank: all layers in turns, case after case."""
    rank.start_megatron()
    from megatron_ampipe.tools.measuring.timed_passes import measure

    return [measure(rank, case, variants(rank.job.what))["variants"] for case in rank.job.cases]


if __name__ == "__main__":
    main()
