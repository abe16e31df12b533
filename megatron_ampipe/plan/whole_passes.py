"""What fixed rows and CUDA graphs of whole passes would gain for layers that have neither.

Named are the flags that a launch accepts for these layers, as far as a block says it: the GPU's compute
capability, dropout and documents are not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from megatron_ampipe.block.settings import Settings
from megatron_ampipe.plan.block import FLEX_BACKENDS, Block
from megatron_ampipe.plan.cluster import Cluster
from megatron_ampipe.plan.planner import PlanOptions, make_plans
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.schedule import Exchange, Pipeline

GRAPH_FLAGS = ("--ampipe-rows", "fixed", "--cuda-graph-impl", "local")
_HYBRIDEP = ("--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "hybridep")
_ALLTOALL = ("--moe-token-dispatcher-type", "alltoall")
_GROUPED = ("--moe-grouped-gemm",)
_OF_GRAPHS = (2, 3, 4)
"""The degrees that are compared."""


@dataclass(frozen=True, slots=True)
class WholePasses:
    """Layers with further flags, whose passes are CUDA graphs.

    Attributes:
        flags: The flags that the model does not have.
        predictor: The predictor of these layers.
        has_same_dispatcher: Whether the dispatcher is that of the model.
    """

    flags: tuple[str, ...]
    predictor: Predictor
    has_same_dispatcher: bool

    @property
    def name(self) -> str:
        """In words."""
        return f"whole passes, {self.predictor.block.dispatcher}"


@dataclass(frozen=True, slots=True)
class Gain:
    """The fastest way to run these layers.

    Attributes:
        pipeline: How they run.
        time_us: The predicted time of all layers.
        padding: Rows that a rank gets of a chunk, over those that are counted.
    """

    pipeline: Pipeline
    time_us: float
    padding: float


def why_not(block: Block, cluster: Cluster) -> str | None:
    """Why a launch would refuse these flags for a block, or their gain is unknown; None if neither is so."""
    if cluster.trains_on_host:
        return "there is no GPU"
    if block.expert == 1:
        return "one rank has all experts"
    if block.dtype == "fp8":
        return (
            "graphs quantize weights in every micro-batch, and the time and memory of that are not predicted"
        )
    if block.dtype != "bf16":
        return f"layers have {block.dtype}, and not bf16"
    if block.condense is not None:
        return "the number of condensed tokens is read by the host"
    if block.chooses:
        return "the router compares all tokens"
    return None


def with_whole_passes(predictor: Predictor, *, other_dispatcher: bool) -> list[WholePasses]:
    """The layers over the all-to-all or HybridEP, whichever they have; or over both, with its figures.

    Empty if a launch would refuse them, or if the layers have graphs of whole passes already.
    """
    block, cluster = predictor.block, predictor.cluster
    if block.captures_passes or why_not(block, cluster) is not None:
        return []
    # Megatron's local experts, or grouped ones of Transformer Engine.
    flags = () if block.local or block.grouped else _GROUPED
    margin = Settings().rows_margin if block.rows_margin is None else block.rows_margin
    fields: dict[str, object] = {"rows_margin": margin, "captures_passes": True}
    fields["grouped"] = block.grouped or not block.local
    found = []
    for dispatcher in ("alltoall", "hybridep"):
        if dispatcher in FLEX_BACKENDS and not _has_figures(cluster, block, dispatcher):
            continue
        if dispatcher != block.dispatcher and not other_dispatcher:
            continue
        of_dispatcher = _HYBRIDEP if dispatcher in FLEX_BACKENDS else _ALLTOALL
        further = flags if dispatcher == block.dispatcher else (*flags, *of_dispatcher)
        changed = predictor.changed(dispatcher=dispatcher, exchange=Exchange.ROWS, **fields)
        is_same = dispatcher == block.dispatcher
        found.append(WholePasses((*further, *GRAPH_FLAGS), changed, is_same))
    return found


def _has_figures(cluster: Cluster, block: Block, backend: str) -> bool:
    needed = [cluster.intra]
    if block.expert * block.expert_tensor > cluster.ranks_per_node:
        needed.append(cluster.inter)
    return all(backend in (figures or {}) for figures in needed)


def fastest_way(whole: WholePasses, **options: Unpack[PlanOptions]) -> Gain:
    """The fastest way to run the layers, also if Megatron's are faster; equal chunks in named orders."""
    predictor = whole.predictor
    options["full"] = False
    options["exchanges"] = (Exchange.ROWS,)
    degrees = options.get("degrees", _OF_GRAPHS)
    options["degrees"] = tuple(degree for degree in degrees if degree in _OF_GRAPHS) or degrees
    plans, block = make_plans(predictor, **options), predictor.block
    ways: list[tuple[float, Pipeline]] = []
    if plans.shared is not None and plans.shared.predicted_ms is not None:
        ways.append((1e3 * plans.shared.predicted_ms, plans.shared.pipeline_of(block.rows)))
    if plans.alone.helps or not ways:
        ways.append((1e3 * plans.blocks_ms, plans.alone.pipeline_of(block.rows)))
    if plans.together is not None:
        partner, stack = plans.together.partner, ways[0][1].stack
        ways.append((plans.together.time_us, Pipeline.of(partner.degree, stack=stack, partner=partner)))
    time_us, pipeline = min(ways, key=lambda way: way[0])
    degree = pipeline.num_chunks if pipeline.partner is None else pipeline.partner.degree
    rows = block.rows // degree
    return Gain(pipeline, time_us, block.arriving(rows) / block.received(rows))
