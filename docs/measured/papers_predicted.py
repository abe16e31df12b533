"""What the planner predicts for the cases of five papers, on the machines that the papers name.

Nothing is measured, and no GPU is needed: the times are simulated from cluster files in ``configs/clusters``,
whose figures are from data sheets where a paper gives none. ``papers.py`` makes the tables of
``docs/papers.md``.

    python docs/measured/papers_predicted.py

takes two minutes of one core, and writes ``results/papers-predicted.json``.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ampipe.plan.block import Block
from megatron_ampipe.plan.cluster import Cluster, find_cluster, read_cluster
from megatron_ampipe.plan.kept import equation_10_us, fitting, simulated
from megatron_ampipe.plan.memory import peak_bytes
from megatron_ampipe.plan.model_block import block_of
from megatron_ampipe.plan.model_file import find_model, read_model
from megatron_ampipe.plan.operation_times import Pair
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.search import SHORT
from megatron_ampipe.plan.simulate import TimedProgram, run
from megatron_ampipe.schedule import KEEP, Direction, Pipeline, even_chunks
from megatron_ampipe.tools.measuring import machine
from megatron_ampipe.tools.measuring.grid import Case, block_of_case, find_grid, read_grid

DEGREES = (2, 4, 8)
SCHEDULES = ("moe-only", "ampipe")
OUTPUT = Path(__file__).parent / "results" / "papers-predicted.json"
LINK_FACTORS = (1, 2, 4)
"""How many times as long as in the cluster file an all-to-all takes."""
TABLE_2_LAYERS = 12
STRATEGIES = (KEEP, "S1", "S2", "S3", "S4")
MPIPEMOE_RANKS = (8, 64)
MPIPEMOE_DEGREES = (2, 4)
MPIPEMOE_LAYERS = 8
"""In one layer, chunks that are brought back are most of what S1 and S2 hold. Times are of fewer layers."""
FSMOE_DEGREES = (1, 2, 3, 4, 6, 8)
FSMOE_LENGTHS = {"fsmoe-testbed-a": (512, 1024, 2048), "fsmoe-testbed-b": (256, 512, 1024)}
FSMOE_NODES = {"fsmoe-testbed-a": 6, "fsmoe-testbed-b": 8}
COLUMNS = (
    *("case", "stock_us", "moe_only_us", "equal_us", "two_us"),
    *("equal", "forward", "backward", "forward_alone", "backward_alone"),
)
LANCET_MODELS = ("gpt-moe-base", "gpt-moe-medium", "gpt-moe-large", "gpt-moe-xl")
LANCET_CLUSTERS = {"ampipe-g5": 4, "a800x8-20gbps": 8, "aws-p5-efa": 32}
"""Clusters, and their numbers of ranks."""
LANCET_LAYERS = 12


def main() -> None:
    """Predict all of it and write the document."""
    document = {
        "command": ["python", *sys.argv],
        "versions": machine.versions(),
        "ampipe figure 7": figure_7(),
        "ampipe table 2": table_2(),
        "mpipemoe": mpipemoe(),
        "fsmoe": fsmoe(),
        "lancet": lancet(),
    }
    OUTPUT.write_text(json.dumps(document, indent=None, separators=(",", ":")) + "\n")


def cluster_of(name: str) -> Cluster:
    """A cluster file of this repository."""
    return read_cluster(find_cluster(name))


def slower_links(cluster: Cluster, factor: int) -> Cluster:
    """The cluster with all-to-alls that take ``factor`` times as long."""
    assert cluster.intra is not None
    cost = cluster.intra["all_to_all"]
    slower = dataclasses.replace(
        cost, alpha_us=factor * cost.alpha_us, beta_us_per_mb=factor * cost.beta_us_per_mb
    )
    return dataclasses.replace(cluster, intra={**cluster.intra, "all_to_all": slower})


def both_us(predictor: Predictor, pipeline: Pipeline) -> Pair:
    """Forward and backward of all layers of the predictor as one schedule, or of Megatron's layers."""
    if pipeline.is_stock:
        return predictor.stock()
    schedule = pipeline.schedule_of(predictor.layers)
    return predictor.pass_us(schedule, even_chunks(predictor.block.rows, pipeline.num_chunks))


def total_us(predictor: Predictor, pipeline: Pipeline) -> float:
    """The sum of both."""
    return both_us(predictor, pipeline).total


def figure_7() -> dict[str, Any]:
    """Of each of the 56 blocks and each rate of the link: Megatron's time, its all-to-alls, ours."""
    found: dict[str, Any] = {"cluster": "ampipe-g5", "ranks": 4, "links": {}}
    for factor in LINK_FACTORS:
        cluster = slower_links(cluster_of("ampipe-g5"), factor)
        found["links"][str(factor)] = {
            case.name: _schedules(Predictor(_block(case, ranks=4), cluster))
            for case in read_grid(find_grid("paper"), num_ranks=4)
        }
    return found


def _block(case: Case, *, ranks: int) -> Block:
    return block_of_case(case, num_ranks=ranks, fused_gradients=True)


def _schedules(predictor: Predictor) -> dict[str, float]:
    times = {"stock": predictor.stock().total, "exchanges": predictor.stock_exchanges().total}
    for schedule in SCHEDULES:
        for degree in DEGREES:
            pipeline = Pipeline.of(degree, schedule=schedule)
            times[f"{schedule} {degree}"] = total_us(predictor, pipeline)
    return _rounded(times)


def _rounded(times: Mapping[str, float]) -> dict[str, float]:
    return {name: round(time_us, 1) for name, time_us in times.items()}


def table_2() -> dict[str, Any]:
    """Twelve layers over 20 GB/s: Megatron's time, and ours block by block and as one schedule."""
    cluster = cluster_of("a800x8-20gbps")
    cases = {}
    for case in read_grid(find_grid("paper-layers"), num_ranks=8):
        block = _block(case, ranks=8)
        one = Predictor(block, cluster)
        every = Predictor(block, cluster, num_layers=TABLE_2_LAYERS)
        times = {"stock": every.stock().total}
        for degree in (2, 4):
            pipeline = Pipeline.of(degree)
            times[f"ampipe {degree}"] = TABLE_2_LAYERS * total_us(one, pipeline)
            times[f"stack {degree}"] = total_us(every, pipeline)
        cases[case.name] = _rounded(times)
    return {"cluster": "a800x8-20gbps", "ranks": 8, "layers": TABLE_2_LAYERS, "cases": cases}


def mpipemoe() -> dict[str, Any]:
    """Of each layer, number of ranks and of chunks: peaks and times by strategy, and what is chosen.

    ``auto`` is chosen once for each strategy, with the peak of that strategy as the budget.
    """
    cluster = cluster_of("mpipemoe-a100")
    cases = []
    for case in read_grid(find_grid("mpipemoe"), num_ranks=8):
        for ranks in MPIPEMOE_RANKS:
            predictor = Predictor(_block(case, ranks=ranks), cluster, num_layers=MPIPEMOE_LAYERS)
            for degree in MPIPEMOE_DEGREES:
                found = _strategies(predictor, Pipeline.of(degree))
                bound = equation_6(case, degree)
                cases.append({"case": case.name, "ranks": ranks, "degree": degree, "bound": bound, **found})
    return {
        "cluster": "mpipemoe-a100",
        "layers of peaks": MPIPEMOE_LAYERS,
        "layers of times": SHORT,
        "cases": cases,
    }


def _strategies(predictor: Predictor, pipeline: Pipeline) -> dict[str, Any]:
    def peak(memory: str) -> float:
        strategy = dataclasses.replace(pipeline, memory=memory)
        return peak_bytes(predictor.block, strategy, num_layers=MPIPEMOE_LAYERS)

    times, peaks = {}, {name: peak(name) for name in STRATEGIES}
    for name in STRATEGIES:
        strategy = dataclasses.replace(pipeline, memory=name)
        times[name] = total_us(predictor.of_layers(SHORT, memory=name), strategy)
    combinations = simulated(predictor, pipeline, peak)
    auto = {}
    for name in STRATEGIES[1:]:
        chosen = fitting(combinations, peaks[name])
        assert chosen is not None and chosen.time_us is not None
        auto[name] = {"memory": chosen.memory, "us": round(chosen.time_us, 1)}
    costs = equation_10_us(predictor, degree=pipeline.degree)
    return {
        "stock_us": round(predictor.of_layers(SHORT).stock().total, 1),
        "stock_bytes": round(peak_bytes(predictor.block, Pipeline.of(1), num_layers=MPIPEMOE_LAYERS)),
        "us": _rounded(times),
        "bytes": {name: round(size) for name, size in peaks.items()},
        "auto": auto,
        "equation 10": min(costs, key=lambda name: costs[name]),
    }


def equation_6(case: Case, degree: int) -> float:
    """MPipeMoE's bound of the share of memory that is saved, from its equations 1 and 4 to 6.

    One expert on a rank, as the paper assumes; all terms in elements.
    """
    tokens, hidden, ffn = case.sequence_length * case.batch, case.hidden, case.ffn
    states = 4 * (case.experts * hidden + 2 * ffn * hidden)
    activations = 4 * tokens * hidden + tokens * ffn
    saved = tokens * (2 * hidden * (degree - 2) / degree + ffn * (degree - 1) / degree)
    return round(2 * saved / (states + 2 * activations), 4)


def fsmoe() -> dict[str, Any]:
    """Of each testbed the 1458 layers: Megatron's time, the best ``moe-only``, the best one and two degrees.

    Tensor parallelism and sharded experts inside a node, one expert a node, two experts a token. Capacity is
    predicted as the load of the busiest rank, because AMPipe's exchange sends no padding.
    """
    found: dict[str, Any] = {}
    for name, nodes in FSMOE_NODES.items():
        cluster = cluster_of(name)
        layers = []
        for case in read_grid(find_grid("fsmoe")):
            length = FSMOE_LENGTHS[name][FSMOE_LENGTHS["fsmoe-testbed-a"].index(case.sequence_length)]
            block = _sharded(dataclasses.replace(case, sequence_length=length), cluster, nodes)
            layers.append([case.name, *_two_degrees(Predictor(block, cluster))])
        found[name] = {
            "nodes": nodes,
            "columns": COLUMNS,
            "layers": layers,
        }
    return found


def _sharded(case: Case, cluster: Cluster, nodes: int) -> Block:
    block = _block(dataclasses.replace(case, capacity=None, dtype="fp16"), ranks=1)
    shards = cluster.ranks_per_node
    return dataclasses.replace(
        block,
        experts=nodes,
        expert=nodes,
        tensor=shards,
        expert_tensor=shards,
        ranks_per_node=shards,
        imbalance=case.capacity or 1.0,
    )


def _two_degrees(predictor: Predictor) -> list[float]:
    """Times, then the best equal degree, the best pair of degrees, and the best degree of each direction.

    Of a pair, one degree divides the other. The last two are each of a direction alone, without that rule.
    """
    rows = predictor.block.rows
    degrees = [degree for degree in FSMOE_DEGREES if predictor.block.splits_into(degree) and rows > degree]

    def pass_us(forward: int, backward: int, schedule: str) -> Pair:
        pipeline = Pipeline.of(forward, backward_degree=backward, schedule=schedule)
        return both_us(predictor, pipeline)

    equal = {degree: pass_us(degree, degree, "ampipe") for degree in degrees}
    two = {
        (forward, backward): pass_us(forward, backward, "ampipe")
        for forward in degrees
        for backward in degrees
        if max(forward, backward) % min(forward, backward) == 0
    }
    moe_only = min(pass_us(degree, degree, "moe-only").total for degree in degrees)
    best = min(equal, key=lambda degree: equal[degree].total)
    # Of equally fast ones, equal degrees.
    both = min(two, key=lambda pair: (round(two[pair].total, 3), pair[0] != pair[1]))
    times = (predictor.stock().total, moe_only, equal[best].total, two[both].total)
    apart = [min(equal, key=lambda degree: equal[degree].of(way)) for way in Direction]
    return [*(round(time_us, 1) for time_us in times), best, *both, *apart]


def lancet() -> list[dict[str, Any]]:
    """Of models and clusters: microseconds of communication that computation does not hide, by schedule.

    ``moe-only`` is the fastest of several degrees; the others as they are named, all layers as one schedule.
    """
    found = []
    for name, ranks in LANCET_CLUSTERS.items():
        cluster = cluster_of(name)
        for model in LANCET_MODELS:
            overrides = {"expert-model-parallel-size": min(ranks, 8), "transformer-impl": "local"}
            file = read_model(find_model(model), overrides=overrides)
            block, _ = block_of(file, cluster, ranks=ranks)
            exposed = _exposed(block, cluster)
            found.append(
                {"cluster": name, "ranks": ranks, "model": model, "layers": LANCET_LAYERS, **exposed}
            )
    return found


def _exposed(block: Block, cluster: Cluster) -> dict[str, Any]:
    one = Predictor(block, cluster)
    every = Predictor(block, cluster, num_layers=LANCET_LAYERS)
    stock_us, exchanges_us = every.stock().total, LANCET_LAYERS * one.stock_exchanges().total
    ways = {
        "moe-only": [Pipeline.of(degree, schedule="moe-only") for degree in DEGREES],
        "lancet": [Pipeline.of(1, schedule="lancet")],
        "ampipe": [Pipeline.of(degree) for degree in DEGREES],
        "joined": [Pipeline.of(degree, schedule="joined") for degree in DEGREES],
    }
    rows: dict[str, Any] = {}
    for name, pipelines in ways.items():
        # Layers share a schedule where chunks of the next layer can run during an exchange.
        predictor, times = (one, LANCET_LAYERS) if name == "moe-only" else (every, 1)
        candidates = [_way(predictor, pipeline, times) for pipeline in pipelines]
        rows[name] = min(candidates, key=lambda row: row["us"])
    return {"stock_us": round(stock_us, 1), "exchanges_us": round(exchanges_us, 1), "ways": rows}


def _way(predictor: Predictor, pipeline: Pipeline, times: int) -> dict[str, float]:
    schedule = predictor.whole(pipeline.schedule_of(predictor.layers))
    lengths = even_chunks(predictor.block.rows, pipeline.num_chunks)
    exposed_us = sum(_exposed_us(predictor.timed(schedule, lengths, way)) for way in Direction)
    return {
        "degree": pipeline.degree,
        "us": round(times * predictor.pass_us(schedule, lengths).total, 1),
        "exposed_us": round(times * exposed_us, 1),
    }


def _exposed_us(timed: TimedProgram) -> float:
    """The time during which something is sent and nothing computes, whatever the lanes."""
    begin, end = run(timed)
    events = []
    for number, sends in enumerate(timed.compiled.communicates):
        events += [(begin[number], 1, sends), (end[number], -1, sends)]
    sending = computing = 0
    exposed_us = before = 0.0
    for time_us, change, sends in sorted(events):
        if sending and not computing:
            exposed_us += time_us - before
        before = time_us
        if sends:
            sending += change
        else:
            computing += change
    return exposed_us


if __name__ == "__main__":
    main()
