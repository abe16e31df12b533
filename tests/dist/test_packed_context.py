"""Packed documents over context-parallel ranks: all that one rank computes of the whole sequence (fp32).

Megatron's attention of such rows is Transformer Engine's. So the reference is the same sequence without
context parallelism, in Megatron's layers: two data-parallel ranks compute it, each all of it.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from tests.dist.cases import (
    ATTENTION_AGAIN,
    CP,
    GQA,
    LARGE,
    LATENT,
    SEQ_AUX,
    SINKS,
    TOP2,
    TP_CP,
    TWO_DEGREES,
    UNEQUAL,
    Case,
    Z,
    cases,
)

TOLERANCE = 1e-5
SHARED = (0, 8, 24, 28)
"""Documents of lengths that two ranks can share."""
ANY = (0, 1, 2, 9, 27)

COMMON = {"parallel": CP, "documents": (SHARED,), "rope": True, "kernel": "cpu-flash", "model": LARGE}
OF_DOCUMENTS = cases("", COMMON, {
    "degree4": {},
    "degree3-gqa-losses": {"degree": 3, "model": SEQ_AUX | Z | GQA},
    "unequal-one-call": {"shares": UNEQUAL, "kernel": "reference-documents"},
    "two-degrees": TWO_DEGREES,
    "moe-only": {"schedule": "moe-only"},
    "lancet": {"schedule": "lancet", "degree": 2},
    "core-attn": {"kernel": "reference-pieces", "model": LARGE | ATTENTION_AGAIN},
    "latent": {"rope": False, "kernel": "exact", "model": LATENT | LARGE},
    "window-sinks": {"rope": False, "kernel": "sdpa", "model": {"window_size": (5, 0)} | SINKS},
    "cuda-executor": {"executor": "cuda"},
    "tensor-ranks": {"world_size": 4, "parallel": TP_CP, "sequence_length": 64, "model": TOP2 | Z | GQA},
})  # fmt: skip
OF_SEQUENCES = cases("slices-of-the-sequence-", COMMON | {"documents": (ANY,)}, {
    "degree4": {},
    "degree2-one-call": {"degree": 2, "kernel": "reference-documents"},
    "latent": {"rope": False, "kernel": "exact", "model": LATENT | LARGE},
})  # fmt: skip


def rows_of(rank: int, ranks: int, bounds: Sequence[int]) -> list[int]:
    """The rows of the sequence that a rank holds: the ``rank``-th slice from either end of each part."""
    rows: list[int] = []
    for start, end in itertools.pairwise(bounds):
        length, rest = divmod(end - start, 2 * ranks)
        assert not rest
        for index in (rank, 2 * ranks - 1 - rank):
            rows += range(start + index * length, start + (index + 1) * length)
    return rows


def computed(layer: Any, case: Case, rows: Sequence[int]) -> dict[str, Any]:
    """All results of a pass over these rows of the sequence; tensor-parallel ranks share them."""
    import torch
    from megatron.core import parallel_state

    from tests.dist import logged_losses
    from tests.dist.blocks import inputs_of, run_pass, summed_results

    one = Case("whole", documents=case.documents, sequence_length=case.sequence_length, rope=case.rope)
    whole = inputs_of(one, rank=0, dtype=next(layer.parameters()).dtype)
    group = parallel_state.get_tensor_model_parallel_group()
    own = torch.tensor(rows).chunk(group.size())[group.rank()]
    inputs = whole._replace(hidden=whole.hidden[own], gradient=whole.gradient[own])
    logged_losses.clear()
    output, hidden = run_pass(layer, inputs)
    found = {}
    for name, part in (("output", output.detach()), ("input gradient", hidden.grad)):
        parts = [torch.empty_like(part) for _ in range(group.size())]
        torch.distributed.all_gather(parts, part.contiguous(), group=group)
        found[name] = torch.cat(parts)
    sums = summed_results(layer)
    return found | {name: value for name, value in sums.items() if name.startswith("gradient")}


def reference_of(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights of Megatron's layer, and its results for the whole sequence, the same on both ranks."""
    from dataclasses import replace

    from tests.dist.blocks import build_layers

    sizes = {name: size for name, size in case.parallel.items() if name != "context_parallel_size"}
    stock, _ = build_layers(replace(case, parallel=sizes))
    found = computed(stock, case, range(case.sequence_length))
    for name, parameter in stock.named_parameters():
        if not getattr(parameter, "allreduce", True):
            # Experts have the rows of both ranks, which are the same.
            found[f"gradient of {name}"] /= 2
    return stock.state_dict(), found


def wrong_of(layer: Any, case: Case, rows: Sequence[int], expected: dict[str, Any]) -> dict[str, float]:
    """What differs from the reference in the results of these rows."""
    import torch
    from megatron.core import parallel_state

    from tests.dist.blocks import wrong

    found = computed(layer, case, rows)
    of_rows = {name: value[rows] for name, value in expected.items() if name in ("output", "input gradient")}
    for name, parameter in layer.named_parameters():
        if getattr(parameter, "allreduce", True):
            group = parallel_state.get_context_parallel_group()
            torch.distributed.all_reduce(found[f"gradient of {name}"], group=group)
    return wrong(expected | of_rows, found, TOLERANCE)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=pytest.mark.ranks(case.world_size)) for case in OF_DOCUMENTS],
)
def test_ranks_that_share_documents_compute_what_one_computes(case: Case) -> None:
    from tests.dist.blocks import build_layers

    _compare(build_layers, case, (*SHARED, case.sequence_length), slices_sequence=False)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in OF_SEQUENCES])
@pytest.mark.ranks(2)
def test_ranks_with_slices_of_the_sequence_compute_what_one_computes(case: Case) -> None:
    from tests.dist.blocks import build_layers

    _compare(build_layers, case, (0, case.sequence_length), slices_sequence=True)


def _compare(build: Any, case: Case, bounds: Sequence[int], *, slices_sequence: bool) -> None:
    from megatron.core import parallel_state

    from megatron_ampipe.layers.documents import DocumentReader

    weights, expected = reference_of(case)
    stock, ours = build(case)
    rows = rows_of(parallel_state.get_context_parallel_rank(), 2, bounds)
    compare = functools.partial(wrong_of, case=case, rows=rows, expected=expected)
    if not slices_sequence:
        # Megatron's rotation of packed rows expects shared documents.
        stock.load_state_dict(weights)
        assert compare(stock) == {}, "the reference of trainings"
    ours.load_state_dict(weights)
    ours._block.context.documents = DocumentReader(slices_sequence=slices_sequence)
    assert compare(ours) == {}


@pytest.mark.ranks(2)
def test_documents_that_ranks_cannot_share_are_refused() -> None:
    import torch

    from megatron_ampipe.errors import BadInput
    from tests.dist.blocks import build_layers

    case = Case("odd", documents=((0, 6),), parallel=CP)
    _, ours = build_layers(case)
    rows = rows_of(torch.distributed.get_rank(), 2, (0, case.sequence_length))
    with pytest.raises(BadInput, match="cu_seqlens 0 to 6: 2 context-parallel ranks hold two slices of each"):
        computed(ours, case, rows)
