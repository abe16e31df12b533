"""The matrix products of rows with weights in each kind of stage. Pure arithmetic, on one rank.

One each in the forward pass, and two in the backward pass: for the gradient of the rows, and for that of the
weight, which can be a separate stage. Used by :mod:`.stage_costs` and
:mod:`.cost_table`.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_ampipe.plan.workload import Workload

SUM_BYTES = 4
"""Of a number in a sum of gradients."""


class Product(NamedTuple):
    """``rows`` rows in total, spread over ``calls`` equal products with weights ``[n, k]``."""

    rows: float
    k: float
    n: float
    calls: int = 1


def is_one_product(whole: Product, num_chunks: int, *, element_bytes: int) -> bool:
    """Whether the weight gradients of all chunks are one product when they are joined.

    The rule of ``runtime.segment.is_one_product``.
    """
    copied = element_bytes * whole.rows / whole.calls * (whole.k + whole.n)
    return copied <= SUM_BYTES * (num_chunks - 1) * whole.k * whole.n


def qkv(work: Workload, rows: int) -> list[Product]:
    """Of the projections to queries, keys and values; ``rows`` of the residual stream of one rank."""
    gathered = rows * work.batch * work.tensor
    return [Product(gathered, k, n / work.tensor) for k, n in work.projections]


def attention(work: Workload, rows: int) -> list[Product]:
    """Of the output projection."""
    return [Product(rows * work.batch * work.tensor, work.heads * work.value_size / work.tensor, work.hidden)]


def expert(work: Workload, received: float) -> list[Product]:
    """Of all experts of a rank, which got so many rows."""
    inner = work.ffn / work.expert_tensor
    calls = 1 if work.grouped else work.local_experts
    return [
        Product(received, work.hidden, (2 if work.gated else 1) * inner, calls),
        Product(received, inner, work.hidden, calls),
    ]


def gated(work: Workload, rows: int, ffn: int | None) -> list[Product]:
    """Of shared experts or an MLP, with this width inside."""
    assert ffn is not None
    gathered = rows * work.batch * work.tensor
    inner = ffn / work.tensor
    return [
        Product(gathered, work.hidden, (2 if work.gated else 1) * inner),
        Product(gathered, inner, work.hidden),
    ]
