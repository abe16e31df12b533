"""Writes the table of ``docs/planner.md``: predictions for shipped models and clusters.

``python -m tests.planner`` rewrites the part of the page between markers; a test checks that it is current.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_ampipe.files.inputs import config_names
from megatron_ampipe.plan.cluster import Cluster, find_cluster, read_cluster
from megatron_ampipe.plan.model_file import block_of, layers_of, read_model
from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.plan.planner import Plans, make_plans
from megatron_ampipe.plan.predict import Predictor

PAGE = Path(__file__).resolve().parents[1] / "docs" / "planner.md"
BEGIN, END = "<!-- begin: python -m tests.planner -->", "<!-- end -->"

MODELS = ("deepseek-v2-lite", "deepseek-v3-like", "gpt-moe-base", "mixtral-8x7b", "qwen3-30b-a3b-like")
CLUSTERS = ("a800x8-20gbps", "ampipe-g5", "dgx-h100", "fsmoe-testbed-a", "gb200-nvl72")
"""Models and clusters in the table."""


def stacks() -> Iterator[str]:
    """Models on clusters, block by block and with all layers as one schedule."""
    clusters = {name: read_cluster(find_cluster(name)) for name in CLUSTERS}
    yield f"| model | {' | '.join(clusters)} |"
    yield "|---" * (1 + len(clusters)) + "|"
    for name in MODELS:
        cells = (_cell(_planned(config_names("models")[name], cluster)) for cluster in clusters.values())
        yield f"| {name} | {' | '.join(cells)} |"


def _planned(path: Path, cluster: Cluster) -> tuple[float, Plans]:
    """The speedup block by block over all layers, and the plans."""
    model = read_model(path)
    block, _ = block_of(model, cluster)
    layers = layers_of(model)
    predictor = Predictor(block, cluster, num_layers=layers.num_layers, dense=layers.dense)
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


def page() -> str:
    """The page with a new table."""
    head, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, tail = rest.partition(END)
    assert end, f"the page has no {BEGIN}"
    return f"{head}{begin}\n\n" + "\n".join(stacks()) + f"\n\n{end}{tail}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
