"""Writes the table of ``docs/planner.md``: predictions for shipped models and clusters.

``python -m tests.planner`` rewrites the part of the page between markers; a test checks that it is current.
"""

from collections.abc import Iterator
from pathlib import Path

from megatron_ampipe.plan.cluster import Cluster, find_cluster, read_cluster
from megatron_ampipe.plan.model_file import ModelFile, block_of, find_model, layers_of, read_model
from megatron_ampipe.plan.planner import make_plans
from megatron_ampipe.plan.predict import Predictor

PAGE = Path(__file__).resolve().parents[1] / "docs" / "planner.md"
BEGIN, END = "<!-- begin: python -m tests.planner -->", "<!-- end -->"

MODELS = ("deepseek-v2-lite", "deepseek-v3-like", "gpt-moe-base", "mixtral-8x7b", "qwen3-30b-a3b-like")
CLUSTERS = ("a800x8-20gbps", "ampipe-g5", "dgx-h100", "fsmoe-testbed-a", "gb200-nvl72")
"""Models and clusters in the table."""


def stacks() -> Iterator[str]:
    """Models on clusters, block by block, with all layers as one schedule, and with partners."""
    clusters = {name: read_cluster(find_cluster(name)) for name in CLUSTERS}
    yield f"| model | {' | '.join(clusters)} |"
    yield "|---" * (1 + len(clusters)) + "|"
    for name in MODELS:
        model = read_model(find_model(name))
        yield f"| {name} | {' | '.join(_cell(model, cluster) for cluster in clusters.values())} |"


def _cell(model: ModelFile, cluster: Cluster) -> str:
    block, _ = block_of(model, cluster)
    layers = layers_of(model)
    predictor = Predictor(block, cluster, num_layers=layers.num_layers, dense=layers.dense)
    plans = make_plans(predictor, full=False, with_partner=1.0)
    assert plans.shared is not None and plans.together is not None and plans.as_megatron is not None
    stock_ms = predictor.stock().total / 1e3
    assert plans.shared.predicted_ms is not None
    cells = []
    for time_ms, plan in ((plans.blocks_ms, plans.alone), (plans.shared.predicted_ms, plans.shared)):
        degrees = dict.fromkeys([str(plan.forward_degree), str(plan.backward_degree)])
        cells.append(f"{stock_ms / time_ms:.2f} ({':'.join(degrees)})")
    cells.append(f"{1e3 * stock_ms / plans.as_megatron.time_us:.2f}")
    together = plans.together
    cells.append(f"{1e3 * stock_ms / together.time_us:.2f} ({together.partner.degree})")
    chosen = 3 if plans.chosen.partner is not None else int(plans.chosen.stack != 1)
    cells[chosen] = f"**{cells[chosen]}**"
    return ", ".join(cells)


def page() -> str:
    """The page with a new table."""
    head, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, tail = rest.partition(END)
    assert end, f"the page has no {BEGIN}"
    return f"{head}{begin}\n\n" + "\n".join(stacks()) + f"\n\n{end}{tail}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
