"""Writes the table of ``docs/planner.md``: predictions for shipped models and clusters.

``python -m tests.planner`` rewrites the part of the page between markers; a test checks that it is current.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_ampipe.plan.cluster import Cluster, find_cluster, read_cluster
from megatron_ampipe.plan.host_times import in_words, with_graphs, with_host_times
from megatron_ampipe.plan.model_block import block_of, layers_of
from megatron_ampipe.plan.model_file import ModelFile, find_model, read_model
from megatron_ampipe.plan.planner import PlanOptions, alternatives, make_plans
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.whole_passes import fastest_way, with_whole_passes
from megatron_ampipe.schedule import Exchange

PAGE = Path(__file__).resolve().parents[1] / "docs" / "planner.md"
BETWEEN = """\
The same over four nodes of eight GPUs, as speed over Megatron's layers with the dispatcher `alltoall`: layers
of AMPipe with the best exchange; with another [dispatcher](#which-dispatcher) Megatron's and AMPipe's:"""
BEGIN, END = "<!-- begin: python -m tests.planner -->", "<!-- end -->"
BEGIN_SKEWED = "<!-- begin: python -m tests.planner, skewed routing -->"
BEGIN_GRAPHS = "<!-- begin: python -m tests.planner, whole passes -->"

MODELS = ("deepseek-v2-lite", "deepseek-v3-like", "gpt-moe-base", "mixtral-8x7b", "qwen3-30b-a3b-like")
CLUSTERS = ("a800x8-20gbps", "ampipe-g5", "dgx-h100", "fsmoe-testbed-a", "gb200-nvl72")
"""Models and clusters in the first table, on one node."""
OVER_NODES = ("qwen3-30b-a3b-like",)
NODES = ("dgx-h100", "aws-p5-efa", "h100-roce-400g", "h100-ethernet-100g")
"""That of the second, on 32 ranks."""
SKEWED = (("qwen3-30b-a3b-like", "gh200-slingshot"), ("mixtral-8x7b", "gh200-slingshot"))
IMBALANCES = (1.0, 1.5, 2.0, 4.0)
"""Those of the third, on 32 ranks."""
GRAPHED = (
    ("qwen3-30b-a3b-like", "dgx-h100", 8),
    ("qwen3-30b-a3b-like", "h100-roce-400g", 32),
    ("mixtral-8x7b", "gh200-slingshot", 32),
)
HOST_TIMES_US = (90.0, 400.0, 800.0)
"""Those of the last."""


def table(
    models: Sequence[str], clusters: Sequence[str], cell: Callable[[ModelFile, Cluster], str]
) -> Iterator[str]:
    """Models on clusters."""
    yield f"| model | {' | '.join(clusters)} |"
    yield "|---" * (1 + len(clusters)) + "|"
    of_names = [read_cluster(find_cluster(name)) for name in clusters]
    for name in models:
        model = read_model(find_model(name))
        yield f"| {name} | {' | '.join(cell(model, cluster) for cluster in of_names)} |"


def stacks(model: ModelFile, cluster: Cluster) -> str:
    """Block by block, with all layers as one schedule, and with partners."""
    block, _ = block_of(model, cluster)
    layers = layers_of(model)
    predictor = Predictor(block, cluster, num_layers=layers.num_layers, dense=layers.dense)
    plans = make_plans(predictor, full=False, with_partner=1.0)
    assert plans.shared is not None and plans.together is not None and plans.as_megatron is not None
    stock_ms = predictor.stock().total / 1e3
    assert plans.shared.predicted_ms is not None
    cells = []
    for time_ms, plan in ((plans.blocks_ms, plans.alone), (plans.shared.predicted_ms, plans.shared)):
        degrees = dict.fromkeys([str(plan.pipeline.degree), str(plan.pipeline.backward_degree)])
        cells.append(f"{stock_ms / time_ms:.2f} ({':'.join(degrees)})")
    cells.append(f"{1e3 * stock_ms / plans.as_megatron.time_us:.2f}")
    together = plans.together
    cells.append(f"{1e3 * stock_ms / together.time_us:.2f} ({together.partner.degree})")
    chosen = 3 if plans.chosen.pipeline.partner is not None else int(plans.chosen.pipeline.stack != 1)
    cells[chosen] = f"**{cells[chosen]}**"
    return ", ".join(cells)


def dispatchers(model: ModelFile, cluster: Cluster) -> str:
    """Speed over Megatron's all-to-all: Megatron's with DeepEP, AMPipe's exchanges, DeepEP and HybridEP."""
    block, _ = block_of(model, cluster, ranks=32)
    layers = layers_of(model)
    predictor = Predictor(block, cluster, num_layers=layers.num_layers, dense=layers.dense)
    options: dict[str, Any] = {"full": False, "with_partner": 1.0, "degrees": (2, 3, 4)}
    options["exchanges"] = (Exchange.ROWS, Exchange.RANKS, Exchange.NODES)
    plans, others = make_plans(predictor, **options), alternatives(predictor, **options)
    stock_ms = predictor.stock().total / 1e3
    cells = [f"{plans.chosen.pipeline.exchange} {stock_ms / plans.step_ms:.2f}"]
    for flags, plan in others.items():
        backend = flags.split()[-1]
        own = predictor.changed(dispatcher=backend).stock().total / 1e3
        cells.append(f"{backend} {stock_ms / own:.2f}, {stock_ms / plan.step_ms:.2f}")
    return "; ".join(cells)


def skewed(model: str, cluster: Cluster) -> Iterator[str]:
    """A row for each imbalance: Megatron's layers, and what chunks and partners gain."""
    file = read_model(find_model(model))
    layers = layers_of(file)
    for imbalance in IMBALANCES:
        block, _ = block_of(file, cluster, ranks=32, imbalance=imbalance)
        predictor = Predictor(block, cluster, num_layers=layers.num_layers, dense=layers.dense)
        plans = make_plans(predictor, full=False, degrees=(2, 3, 4), with_partner=1.0)
        assert plans.together is not None
        stock_ms = predictor.stock().total / 1e3
        shared_ms = None if plans.shared is None else plans.shared.predicted_ms
        chunks_ms = min(plans.blocks_ms, shared_ms or plans.blocks_ms)
        cells = [f"{imbalance:g}", f"{stock_ms:.0f}", f"{stock_ms - chunks_ms:.0f}"]
        cells += [f"{stock_ms / chunks_ms:.2f}", f"{1e3 * stock_ms / plans.together.time_us:.2f}"]
        yield f"| {model} on {Path(cluster.path).stem} | {' | '.join(cells)} |"


def skewed_table() -> Iterator[str]:
    """What overlap gains if experts are unevenly used."""
    yield "| model, cluster | imbalance | Megatron's ms | saved by chunks, ms | chunks | partners |"
    yield "|---|--:|--:|--:|--:|--:|"
    for model, name in SKEWED:
        yield from skewed(model, read_cluster(find_cluster(name)))


def graphed(model: str, cluster: Cluster, ranks: int) -> Iterator[str]:
    """A row for each host's time: without graphs, and with graphs of whole passes over each dispatcher."""
    file = read_model(find_model(model))
    layers = layers_of(file)
    block, _ = block_of(file, cluster, ranks=ranks)
    options: PlanOptions = {"full": False, "degrees": (2, 3, 4), "with_partner": 1.0}
    for host_us in HOST_TIMES_US:
        machines = with_host_times(cluster, host_us / cluster.host.issue.forward_us)
        predictor = Predictor(block, machines, num_layers=layers.num_layers, dense=layers.dense)
        stock_ms = predictor.stock().total / 1e3
        of_stages_us = predictor.on(with_graphs(machines)).stock().total
        plans = make_plans(predictor, **options)
        cells = [f"{host_us:.0f}", f"{stock_ms:.0f}", f"{1e3 * stock_ms / of_stages_us:.2f}"]
        cells.append(f"{stock_ms / plans.step_ms:.2f} ({in_words(plans.chosen.pipeline)})")
        for whole in with_whole_passes(predictor, other_dispatcher=True):
            if not whole.has_same_dispatcher:
                other = whole.predictor.changed(rows_margin=None, captures_passes=False)
                other_ms = make_plans(other, **options).step_ms
                cells.append(f"{1e3 * stock_ms / other.stock().total:.2f}, {stock_ms / other_ms:.2f}")
            gain = fastest_way(whole, **options)
            speedup = 1e3 * stock_ms / gain.time_us
            cells.append(f"{speedup:.2f} ({in_words(gain.pipeline)}, {gain.padding:.2f})")
        cells += [""] * (7 - len(cells))
        yield f"| {model} on {Path(cluster.path).stem} | {' | '.join(cells)} |"


def graphed_table() -> Iterator[str]:
    """What graphs of whole passes gain on slow hosts."""
    yield (
        "| model, cluster | host, us a stage | Megatron's ms | its layers with graphs of attention, routing "
        "| without graphs | whole passes | HybridEP without graphs: Megatron's, AMPipe's | whole passes |"
    )
    yield "|---|--:|--:|--:|--:|--:|--:|--:|"
    for model, name, ranks in GRAPHED:
        yield from graphed(model, read_cluster(find_cluster(name)), ranks)


def replaced(text: str, begin: str, lines: Sequence[str]) -> str:
    """The text with other lines after a marker."""
    head, begin, rest = text.partition(begin)
    _, end, tail = rest.partition(END)
    assert end, f"the page has no {begin}"
    tables = "\n".join(lines)
    return f"{head}{begin}\n\n{tables}\n\n{end}{tail}"


def page() -> str:
    """The page with new tables."""
    first, second = table(MODELS, CLUSTERS, stacks), table(OVER_NODES, NODES, dispatchers)
    text = replaced(PAGE.read_text(encoding="utf-8"), BEGIN, [*first, "", BETWEEN, "", *second])
    text = replaced(text, BEGIN_GRAPHS, [*graphed_table()])
    return replaced(text, BEGIN_SKEWED, [*skewed_table()])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
