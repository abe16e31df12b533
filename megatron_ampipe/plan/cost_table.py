"""Which function of :mod:`.stage_costs` gives the time of each kind of stage, and which products it has.

A new kind of stage is a function there and a row here. Read by :mod:`.cost`, which adds overheads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_ampipe.plan import linear_products
from megatron_ampipe.plan.chunk_rows import Rows
from megatron_ampipe.plan.linear_products import Product
from megatron_ampipe.plan.operation_times import Pair
from megatron_ampipe.plan.stage_costs import StageCosts
from megatron_ampipe.schedule import MOE_BLOCK, WEIGHTS, StageKind, kinds


@dataclass(frozen=True, slots=True)
class Work:
    """The input of one stage.

    Attributes:
        rows: Rows of the chunk, or of the whole sequence.
        chunked: Whether the sequence is split into several chunks.
    """

    rows: Rows
    chunked: bool = True


CostFunction = Callable[[StageCosts, Work], Pair]
"""How long a stage takes alone, forward and backward, without its overhead."""

COSTS: Mapping[StageKind, CostFunction] = {
    kinds.INPUT_NORM: lambda costs, work: costs.input_norm(work.rows.hidden),
    kinds.GATHER_ROWS: lambda costs, work: costs.gather_rows(work.rows.hidden),
    kinds.QKV: lambda costs, work: costs.from_norm(work.rows.hidden, chunked=work.chunked),
    kinds.REGATHER_ROWS: lambda costs, work: costs.regather_rows(work.rows.hidden),
    kinds.ATTEND: lambda costs, work: costs.attend(work.rows.hidden),
    kinds.RING: lambda costs, work: costs.ring(),
    kinds.RERING: lambda costs, work: costs.rering(),
    kinds.ATTENTION: lambda costs, work: costs.until_norm(work.rows, chunked=work.chunked),
    kinds.SCATTER_ROWS: lambda costs, work: costs.scatter_rows(work.rows.hidden),
    kinds.ADD_NORM: lambda costs, work: costs.add_norm(work.rows.hidden),
    kinds.CHOOSE: lambda costs, work: costs.choose(work.rows.hidden),
    kinds.ROUTE: lambda costs, work: costs.route(work.rows.hidden, load=costs.load()),
    kinds.CONDENSE: lambda costs, work: costs.condense(work.rows.hidden, load=costs.load()),
    kinds.LOSSES: lambda costs, work: costs.losses(),
    kinds.SHARED: lambda costs, work: costs.shared(work.rows.hidden, chunked=work.chunked),
    kinds.COUNTS: lambda costs, work: costs.counts(),
    kinds.DISPATCH: lambda costs, work: costs.exchange(work.rows.hidden),
    kinds.SPREAD: lambda costs, work: costs.hop(work.rows.hidden),
    kinds.EXPERT: lambda costs, work: costs.expert(work.rows.hidden, load=costs.load(), chunked=work.chunked),
    kinds.GATHER: lambda costs, work: costs.gather(work.rows.hidden),
    kinds.SCATTER: lambda costs, work: costs.scatter(work.rows.hidden),
    kinds.COLLECT: lambda costs, work: costs.hop(work.rows.hidden),
    kinds.COMBINE: lambda costs, work: costs.exchange(work.rows.hidden),
    kinds.EXPAND: lambda costs, work: costs.expand(work.rows.hidden, load=costs.load()),
    kinds.MERGE: lambda costs, work: costs.merge(work.rows.hidden, load=costs.load()),
    kinds.MLP: lambda costs, work: costs.mlp(work.rows.hidden, chunked=work.chunked),
    kinds.REPERMUTE: lambda costs, work: costs.repermute(work.rows.hidden, load=costs.load()),
    kinds.REDISPATCH: lambda costs, work: costs.redispatch(work.rows.hidden),
    kinds.RESPREAD: lambda costs, work: costs.respread(work.rows.hidden),
    kinds.REGATHER: lambda costs, work: costs.regather(work.rows.hidden),
    kinds.REBUILD: lambda costs, work: costs.rebuild(work.rows.hidden, load=costs.load()),
    kinds.RESORT: lambda costs, work: costs.resort(work.rows.hidden, load=costs.load()),
    kinds.STORE_TOKENS: lambda costs, work: costs.copy(work.rows.hidden, inner=False, back=False),
    kinds.STORE: lambda costs, work: costs.copy(work.rows.hidden, inner=True, back=False),
    kinds.LOAD_TOKENS: lambda costs, work: costs.copy(work.rows.hidden, inner=False, back=True),
    kinds.LOAD: lambda costs, work: costs.copy(work.rows.hidden, inner=True, back=True),
}
"""The cost function of every kind of stage of the MoE block that transfers or computes rows."""
PRODUCTS: Mapping[StageKind, Callable[[StageCosts, int], Sequence[Product]]] = {
    kinds.QKV: lambda costs, rows: linear_products.qkv(costs.workload, rows),
    kinds.ATTENTION: lambda costs, rows: linear_products.attention(costs.workload, rows),
    kinds.SHARED: lambda costs, rows: linear_products.gated(costs.workload, rows, costs.workload.shared_ffn),
    kinds.EXPERT: lambda costs, rows: costs.expert_products(rows),
    kinds.MLP: lambda costs, rows: linear_products.gated(costs.workload, rows, costs.workload.dense_ffn),
}
"""The products with weights of each kind whose weight gradients can be separate stages."""
assert set(COSTS) == {kind for kind in MOE_BLOCK if not kind.of_parameters}
assert set(PRODUCTS) == set(WEIGHTS)
