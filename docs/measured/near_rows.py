"""What the planner predicts where experts begin with the rows that stay near, while the others travel.

Rows are near that stay on their node, or on their rank where there is one node. The package does not run
this. Here the stages from the dispatch to the combine are divided in two, near and far: two groups of
products, and a transfer for each class of links. Orders are searched as the planner searches them, and
compared with what the planner chooses among what there is.

    python docs/measured/near_rows.py docs/measured/results/near-rows.json [PART OF A LABEL]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_ampipe.plan.block import Block, Rows, chunk_rows
from megatron_ampipe.plan.cluster import Cluster, find_cluster, read_cluster
from megatron_ampipe.plan.model_block import block_of
from megatron_ampipe.plan.model_file import find_model, read_model
from megatron_ampipe.plan.operation_times import Pair
from megatron_ampipe.plan.order_search import OrderProblem, improve_order
from megatron_ampipe.plan.planner import make_plans
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.search import Candidate, named, reorder, short_stack
from megatron_ampipe.plan.simulate import TimedProgram, compile_program
from megatron_ampipe.plan.stage_costs import COSTS, Work, facts_of
from megatron_ampipe.schedule import WEIGHTS, Direction, Program, Stage, StageKind, needs_of
from megatron_ampipe.schedule.kinds import COLLECT, COMBINE, DISPATCH, EXPERT, SPREAD
from megatron_ampipe.schedule.stage_kind import INTRA, INTRA_LANE
from megatron_ampipe.tools.measuring.grid import block_of_case, find_grid, read_grid

RESULTS = Path(__file__).parent / "results"
LAYERS, DEGREES = 8, (2, 3)
NEAR, FAR = "near", "far"
TRANSFERS = (DISPATCH, COMBINE)
DIVIDED = (*TRANSFERS, SPREAD, EXPERT, COLLECT)
"""Kinds that are divided. Gradients of weights of both parts are one stage where they are separate."""
MODELS = ("deepseek-v2-lite", "deepseek-v3-like", "gpt-moe-base", "mixtral-8x7b", "qwen3-30b-a3b-like")
LARGE = ("deepseek-v2-lite", "deepseek-v3-like", "qwen3-30b-a3b-like")
PLACES = {
    "a800x8-20gbps": (8,),
    "ampipe-g5": (4,),
    "dgx-h100": (8, 16, 32),
    "fsmoe-testbed-a": (8, 16),
    "fsmoe-testbed-b": (4, 8, 16),
}
"""Shipped clusters with numbers of expert-parallel ranks."""
ROWS = (1024, 2048, 8192)
"""Other lengths, on two nodes of ``dgx-h100``."""


def near_ranks(block: Block, cluster: Cluster) -> int:
    """Of how many ranks rows are near: those of a node, or the rank itself where there is one node."""
    return cluster.ranks_per_node if cluster.ranks_per_node < block.expert else 1


def times_of_parts(predictor: Predictor, kind: StageKind, rows: Rows, *, apart: bool) -> dict[str, Pair]:
    """Times of both parts of a stage; without the near one if it does nothing.

    With ``apart``, gradients of weights are another stage.
    """
    block, cluster = predictor.block, predictor.cluster
    near = near_ranks(block, cluster)

    def of(share: float) -> Pair:
        work = Work(replace(rows, hidden=rows.hidden * share))
        pair = COSTS[kind](predictor.times, work)
        if not kind.lane.computes:
            return pair
        products = facts_of(kind).products
        assert products is not None
        for product in products(block, work.rows.hidden) if apart else ():
            both = predictor.times.products(*product, chunked=True)
            pair += Pair(0.0, both.forward - both.backward)
        fixed = cluster.stage_overhead(kind.name)
        return Pair(
            pair.forward * fixed.forward_factor + fixed.forward_us,
            pair.backward * fixed.backward_factor + fixed.backward_us,
        )

    if kind not in TRANSFERS:
        return {NEAR: of(near / block.expert), FAR: of(1 - near / block.expert)}
    if block.exchange.has_two_hops or near == 1:
        return {FAR: of(1.0)}
    size = predictor.times.sent(rows) * block.row_bytes(block.arriving_probabilities)
    between, share = predictor.times.links()[-1]
    within = cluster.collective("all_to_all", across_nodes=False).time_us(size * (near - 1) / block.expert)
    across = between.time_us(size * share)
    return {NEAR: Pair(within, within), FAR: Pair(across, across)}


type Parts = Mapping[Stage, Mapping[Stage, float]]
"""Every stage with its parts, or itself, and their times."""


def divided_us(predictor: Predictor, candidate: Candidate) -> float:
    """The time of both passes in the best order that is found, with a candidate's stages divided."""
    return sum(_direction_us(predictor, candidate, direction) for direction in Direction)


def _direction_us(predictor: Predictor, candidate: Candidate, direction: Direction) -> float:
    schedule, lengths = predictor.whole(candidate.schedule), candidate.lengths
    timed = predictor.timed(schedule, lengths, direction)
    rows = chunk_rows(predictor.block, lengths, shares_schedule=len(predictor.layers) > 1)
    apart = WEIGHTS[EXPERT] in schedule.backward.weights
    parts: dict[Stage, Mapping[Stage, float]] = {}
    issue_us: dict[Stage, float] = {}
    for place, stage in enumerate(timed.compiled.stages):
        parts[stage] = {stage: timed.durations[place]}
        if stage.kind in DIVIDED:
            kind_of = {name: _part(stage.kind, name) for name in (NEAR, FAR)}
            times = times_of_parts(predictor, stage.kind, rows[stage.chunk], apart=apart)
            parts[stage] = {
                replace(stage, kind=kind_of[name]): pair.of(direction) for name, pair in times.items()
            }
        issue_us |= dict.fromkeys(parts[stage], timed.issue_us[place] if timed.issue_us else 0.0)
    needs = _needs(needs_of(schedule, predictor.layers, direction), parts)
    both = compile_program(_program(schedule.program(direction), parts), needs)
    alone = {part: time for of_stage in parts.values() for part, time in of_stage.items()}
    issue = tuple(issue_us[stage] for stage in both.stages) if timed.issue_us else None
    times = tuple(alone[stage] for stage in both.stages)
    divided = TimedProgram(both, times, issue, predictor.cluster.overlap)
    problem = OrderProblem(divided, direction=direction)
    # A period has relative layers.
    first = candidate.schedule.program(direction)
    of_period = {
        stage: {replace(part, layer=stage.layer): 0.0 for part in parts[replace(stage, layer=0)]}
        for stage in first.stages
    }
    stages = dict(_program(first, of_period).lanes)
    period = Program.of({lane: stages[lane] for lane, _ in both.lanes})
    best = improve_order(problem, problem.period_of(period))
    return problem.time(best) + predictor.calls_us(direction)


def _part(kind: StageKind, name: str) -> StageKind:
    near = name == NEAR and kind in TRANSFERS
    return replace(kind, name=f"{kind.name}-{name}", lane=INTRA_LANE if near else kind.lane)


def _needs(needs: Mapping[Stage, Sequence[Stage]], parts: Parts) -> dict[Stage, tuple[Stage, ...]]:
    """Near parts wait for near ones, far for far ones, others for both."""

    def givers(earlier: Stage, name: str) -> Iterator[Stage]:
        if earlier.kind not in DIVIDED:
            yield earlier
            return
        for wanted in (name,) if name else (NEAR, FAR):
            given = [part for part in parts[earlier] if part.kind.name.endswith(wanted)]
            yield from given
            if not given:
                # What is not sent waits for what its transfer would wait for.
                for before in needs[earlier]:
                    yield from givers(before, wanted)

    return {
        part: tuple(
            dict.fromkeys(
                given
                for other in earlier
                for given in givers(other, part.kind.name.rpartition("-")[2] if stage.kind in DIVIDED else "")
            )
        )
        for stage, earlier in needs.items()
        for part in parts[stage]
    }


def _program(program: Program, parts: Parts) -> Program:
    """The program with the parts of each stage in its place, near ones first."""
    lanes: dict[str, list[Stage]] = {lane: [] for lane, _ in program.lanes}
    for lane, stages in program.lanes:
        for stage in stages:
            for part in parts[stage]:
                own = INTRA if part.kind.lane == INTRA_LANE else lane
                lanes.setdefault(own, []).append(part)
    return Program.of(lanes)


def compare(block: Block, cluster: Cluster) -> dict[str, object]:
    """How many times as fast as Megatron's layers: what there is, and near rows first; best exchanges."""
    stock_us = Predictor(block, cluster).stock().total
    exchanges = block.exchanges(cluster.ranks_per_node)
    divides = block.splits_weights
    near: dict[str, float] = {}
    uncut = 0.0
    for exchange in exchanges:
        alone = Predictor(replace(block, exchange=exchange), cluster)
        whole = named(alone, "lancet" if divides else "ampipe", 1, 1)
        uncut = max(uncut, stock_us / reorder(alone, whole).total_us)
        near[f"{exchange} 1"] = stock_us / divided_us(alone, whole)
        for degree in filter(block.splits_into, DEGREES):
            names = ("ampipe", "moe-only", *(["joined"] if divides else []))
            ways = (named(alone, name, degree, degree) for name in names)
            near[f"{exchange} {degree}"] = max(stock_us / divided_us(alone, way) for way in ways)
            stack = short_stack(Predictor(alone.block, cluster, num_layers=LAYERS))
            us = divided_us(stack, named(stack, "ampipe", degree, degree)) / len(stack.layers)
            near[f"{exchange} {degree} stack"] = stock_us / us
    layers = Predictor(block, cluster, num_layers=LAYERS)
    stock_ms = layers.stock().total / 1e3
    plans = make_plans(layers, exchanges=exchanges)
    partners = make_plans(layers, exchanges=exchanges, with_partner=1.0)
    first = max((key for key in near if key.endswith(" 1")), key=near.__getitem__)
    best = max(near, key=near.__getitem__)
    chosen = plans.chosen.pipeline
    return {
        "near_share": near_ranks(block, cluster) / block.expert,
        "uncut": round(uncut, 3),
        "near_uncut": round(near[first], 3),
        "near_uncut_way": first,
        "plan": round(stock_ms / plans.step_ms, 3),
        "plan_way": f"{chosen.exchange} {chosen.num_chunks}" + " stack" * (chosen.stack != 1),
        "near": round(near[best], 3),
        "near_way": best,
        "partners": round(stock_ms / partners.step_ms, 3),
    }


def cases() -> Iterator[tuple[str, Block, Cluster]]:
    """Shipped models on shipped clusters, and small blocks on CPUs over two classes of links."""
    for name, ranks in PLACES.items():
        cluster = read_cluster(find_cluster(name))
        for expert in ranks:
            two_nodes = name == "dgx-h100" and expert == 2 * cluster.ranks_per_node
            for model in MODELS if expert <= cluster.ranks_per_node else LARGE:
                for rows in (4096, *(ROWS if two_nodes else ())):
                    overrides = {"expert-model-parallel-size": expert, "seq-length": rows}
                    read = read_model(find_model(model), overrides=overrides)
                    block, _ = block_of(read, cluster, ranks=expert)
                    yield f"{model}, {name}, {expert} ranks, {rows} rows", block, cluster
    cluster = read_cluster(RESULTS / "profile-50mbit-400mbit.yaml")
    for case in read_grid(find_grid("cpu-small"), num_ranks=4):
        block = block_of_case(case, num_ranks=4, fused_gradients=False)
        yield f"{case.name}, two CPU nodes, 50 and 400 Mbit/s", block, cluster


def main() -> None:
    """Compare, print a table, and write the document."""
    target, *only = sys.argv[1:]
    found: dict[str, object] = {"command": ["python", *sys.argv]}
    print("| case | near rows | uncut | near | plan | near, any degree | partners |\n|" + "---|" * 7)
    for label, block, cluster in cases():
        if all(part in label for part in only):
            found[label] = one = compare(block, cluster)
            print(
                f"| {label} | {one['near_share']:.0%} | {one['uncut']:.2f} | {one['near_uncut']:.2f} | "
                f"{one['plan']:.2f} ({one['plan_way']}) | {one['near']:.2f} ({one['near_way']}) | "
                f"{one['partners']:.2f} |",
                flush=True,
            )
            Path(target).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
