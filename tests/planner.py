"""Writes the tables of ``docs/planner.md``.

They are the predictions for the shipped models and clusters, and the simulator compared with the strategies
of the papers. ``python -m tests.planner`` rewrites the parts of the page between markers; a test checks that
they are up to date.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_ampipe.plan.cluster import Cluster, find_cluster, read_cluster
from megatron_ampipe.plan.model_file import read_model
from megatron_ampipe.plan.model_workload import layers_of, workload_of
from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.plan.planner import Plans, make_plans
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.problem import Lanes, OrderProblem
from megatron_ampipe.plan.workload import Workload
from megatron_ampipe.schedule import (
    BlockFeatures,
    Direction,
    Stage,
    build,
    dependencies,
    even_chunks,
    kinds,
)
from megatron_ampipe.shipped import config_names
from tests.strategies import FsmoeLayer, ampipe_time, stock_time

PAGE = Path(__file__).resolve().parents[1] / "docs" / "planner.md"
END = "<!-- end -->"
PLAIN = BlockFeatures(chunked_qkv=True)

IDEAL = ((8.0, 4.0, 6.0), (4.0, 8.0, 2.0), (3.0, 6.0, 9.0), (9.0, 1.0, 1.0))
"""Attention, communication and experts of the first table."""
FSMOE_ROWS = (128, 512, 2048)
"""Tokens of one rank in the third table."""
REAL = (
    ("gpt-moe medium", 16, 1024, 24576),
    ("gpt-moe medium", 16, 1024, 32768),
    ("gpt-moe large", 20, 1280, 32768),
)
"""Name, heads, hidden size and sequence of the second table: those of AMPipe's table 2."""


def appendix_c_problem(
    attention: float, communication: float, experts: float, degree: int
) -> tuple[OrderProblem, Lanes]:
    """A forward pass as in appendix C: three kinds of stages, equal chunks, no cost for splitting."""
    schedule = build("ampipe", degree=degree, features=PLAIN)
    needs = dependencies([PLAIN], degree=degree, whole_attention=False, direction=Direction.FORWARD)
    whole = {
        kinds.ATTENTION: attention,
        kinds.DISPATCH: communication,
        kinds.COMBINE: communication,
        kinds.EXPERT: experts,
    }
    times = {stage: whole.get(stage.kind, 0.0) / degree for stage in needs}
    problem = OrderProblem.from_graph(needs, times)
    return problem, problem.lanes_of(schedule.forward)


def gpt_moe(heads: int, hidden: int, rows: int) -> Workload:
    """A block of AMPipe's table 1, 8 experts over 8 ranks."""
    return Workload(
        sequence_length=rows,
        batch=1,
        hidden=hidden,
        heads=heads,
        head_size=hidden // heads,
        value_size=hidden // heads,
        projections=((hidden, 3 * hidden),),
        key_value_width=2 * hidden,
        experts=8,
        topk=1,
        ffn=4 * hidden,
        gated=False,
        dtype="fp16",
        expert=8,
    )


def fsmoe_workload(rows: int, *, expert_tensor: int = 4) -> Workload:
    """A layer from the ranges of FSMoE's table 4: M = 2048, H = 3 M, no token dropped."""
    return Workload(
        sequence_length=rows,
        batch=1,
        hidden=2048,
        heads=16,
        head_size=128,
        value_size=128,
        projections=((2048, 6144),),
        key_value_width=4096,
        experts=8,
        topk=2,
        ffn=6144,
        gated=False,
        dtype="fp16",
        expert=8,
        expert_tensor=expert_tensor,
    )


def stacks() -> Iterator[str]:
    """Every shipped model on every shipped cluster, block by block and with all layers as one schedule."""
    clusters = {name: read_cluster(find_cluster(name)) for name in config_names("clusters")}
    yield f"| model | {' | '.join(clusters)} |"
    yield "|---" * (1 + len(clusters)) + "|"
    for name, path in config_names("models").items():
        cells = (_cell(_planned(path, cluster)) for cluster in clusters.values())
        yield f"| {name} | {' | '.join(cells)} |"


def _planned(path: Path, cluster: Cluster) -> tuple[float, Plans]:
    """The speedup block by block over all layers, and the plans."""
    model = read_model(path)
    workload, _ = workload_of(model, cluster)
    layers = layers_of(model)
    predictor = Predictor(workload, cluster, num_layers=layers.num_layers, dense=layers.dense)
    plans = make_plans(predictor, full=False)
    stock = predictor.stock()
    return (stock.forward + stock.backward) / 1e3 / plans.blocks_ms, plans


def _cell(planned: tuple[float, Plans]) -> str:
    blocks, plans = planned
    cell = f"{blocks:.2f} ({_degrees(plans.alone)})"
    if plans.shared is None:
        return f"{cell}, no"
    shared = f"{plans.shared.predicted_speedup:.2f} ({_degrees(plans.shared)})"
    return f"{cell}, {f'**{shared}**' if plans.chosen.stack != 1 else shared}"


def _degrees(plan: Plan) -> str:
    forward, backward = plan.forward_degree, plan.backward_degree
    return str(forward) if forward == backward else f"{forward}:{backward}"


def strategies() -> Iterator[str]:
    """The simulator compared with the strategies of the papers."""
    yield from _ideal()
    yield ""
    yield from _real()
    yield ""
    yield from _fsmoe()


def _ideal() -> Iterator[str]:
    yield "| A, C, M | stock | formula, degree 1 | simulated | formula, degree 4 | simulated |"
    yield "|---|---|---|---|---|---|"
    for sizes in IDEAL:
        cells = [f"{sizes[0]:g}, {sizes[1]:g}, {sizes[2]:g}", f"{stock_time(*sizes):g}"]
        for degree in (1, 4):
            problem, lanes = appendix_c_problem(*sizes, degree)
            cells += [f"{ampipe_time(*sizes, degree=degree):g}", f"{problem.time(lanes):g}"]
        yield f"| {' | '.join(cells)} |"


def _real() -> Iterator[str]:
    yield "| block, forward | degree | formula, speedup | simulated, speedup |"
    yield "|---|---|---|---|"
    cluster = read_cluster(find_cluster("a800x8-20gbps"))
    for name, heads, hidden, rows in REAL:
        workload = gpt_moe(heads, hidden, rows)
        predictor = Predictor(workload, cluster)
        whole = predictor.costs((rows,), 1, False)
        # In the formula, attention is everything before the dispatch; O is left out, as in the paper.
        attention = sum(whole[Stage(kind, 0)].forward for kind in (kinds.QKV, kinds.ATTENTION))
        travel, experts = (
            whole[Stage(kinds.DISPATCH, 0)].forward,
            whole[Stage(kinds.EXPERT, 0)].forward,
        )
        stock = predictor.stock().forward
        for degree in (2, 4, 8):
            formula = stock_time(attention, travel, experts) / ampipe_time(
                attention, travel, experts, degree=degree
            )
            schedule = build("ampipe", degree=degree, features=workload.features)
            time = predictor.direction_us(schedule, even_chunks(rows, degree), Direction.FORWARD)
            yield f"| {name}, {rows // 1024}K rows | {degree} | {formula:.2f} | {stock / time:.2f} |"


def _fsmoe() -> Iterator[str]:
    yield "| testbed, rows | forward: case, degree | backward: case, degree |"
    yield "|---|---|---|"
    for testbed, expert_tensor in (("fsmoe-testbed-a", 8), ("fsmoe-testbed-b", 4)):
        cluster = read_cluster(find_cluster(testbed))
        for rows in FSMOE_ROWS:
            forward = FsmoeLayer.of(fsmoe_workload(rows, expert_tensor=expert_tensor), cluster)
            cells = []
            for layer in (forward, forward.backward(reduction=0.0)):
                degree = layer.degree(largest=16)
                cells.append(f"{layer.case(degree)}, {degree}")
            yield f"| {testbed}, {rows} | {cells[0]} | {cells[1]} |"


SECTIONS = {"stacks": stacks, "strategies": strategies}
"""The name of a part of the page, in its marker, and the function that gives its lines."""


def page() -> str:
    """The page with new tables."""
    text = PAGE.read_text(encoding="utf-8")
    for name, lines in SECTIONS.items():
        begin = f"<!-- begin: python -m tests.planner ({name}) -->"
        head, _, rest = text.partition(begin)
        _, _, tail = rest.partition(END)
        assert tail, f"the page has no {begin}"
        text = f"{head}{begin}\n\n" + "\n".join(lines()) + f"\n\n{END}{tail}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
