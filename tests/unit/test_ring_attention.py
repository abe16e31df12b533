"""Attention in the steps of a ring, all ranks in one process, against attention of the whole sequence."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ampipe.attention.kernels import KERNELS
from megatron_ampipe.attention.ring import RingAttention
from megatron_ampipe.runtime.segment import KeyValueSums
from megatron_ampipe.schedule import (
    BlockFeatures,
    Direction,
    Pipeline,
    Span,
    chunk_sequence,
    from_text,
    to_text,
)
from megatron_ampipe.schedule.chunks import SequenceLayout
from megatron_ampipe.schedule.dataflow import needs_of
from megatron_ampipe.schedule.kinds import ATTEND, RERING, RING, step_of
from megatron_ampipe.schedule.program import issue_order

ROWS, BATCH, HEADS, GROUPS, SIZE = 48, 2, 4, 2, 8
NAMES = ("ampipe", "moe-only", "lancet", "sequential")


def spans_of_rank(rank: int, num_ranks: int) -> tuple[Span, ...]:
    layout = SequenceLayout(context_ranks=num_ranks, context_rank=rank)
    return layout.spans(0, ROWS // num_ranks, sequence_length=ROWS)


def rows_of_rank(tensor: Tensor, rank: int, num_ranks: int) -> Tensor:
    return torch.cat([tensor[span.global_start : span.global_end] for span in spans_of_rank(rank, num_ranks)])


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("degree", [1, 3])
@pytest.mark.parametrize(
    ("kernel", "value_size", "dtype", "tolerance"),
    [
        ("exact-pieces", 12, torch.float64, 1e-13),
        ("exact-pieces", 8, torch.float32, 2e-6),
        ("cpu-flash", 8, torch.float64, 1e-13),
        ("cpu-flash", 8, torch.float32, 2e-6),
        ("cpu-flash", 8, torch.bfloat16, 1e-2),
    ],
)
def test_steps_equal_attention_of_the_whole_sequence(
    num_ranks: int, degree: int, kernel: str, value_size: int, dtype: torch.dtype, tolerance: float
) -> None:
    """Output, and the gradients of queries, keys and values, which the ring adds up over ranks and chunks."""
    torch.manual_seed(1)
    whole = [
        torch.randn(ROWS, BATCH, heads, size, dtype=torch.float64).to(dtype)
        for heads, size in ((HEADS, SIZE), (GROUPS, SIZE), (GROUPS, value_size))
    ]
    gradient = torch.randn(ROWS, BATCH, HEADS * value_size, dtype=torch.float64).to(dtype)
    reference = [tensor.double().detach().requires_grad_() for tensor in whole]
    heads_first = (tensor.permute(1, 2, 0, 3) for tensor in reference)
    attended = F.scaled_dot_product_attention(*heads_first, is_causal=True, scale=0.3, enable_gqa=True)
    expected = attended.permute(2, 0, 1, 3).reshape(gradient.shape)
    expected.backward(gradient.double())

    parts = [[rows_of_rank(tensor, rank, num_ranks) for tensor in whole] for rank in range(num_ranks)]
    sums = [KeyValueSums(key, value) for _, key, value in parts]
    worst = 0.0

    def compare(found: Tensor, right: Tensor, rank: int) -> None:
        nonlocal worst
        right = rows_of_rank(right, rank, num_ranks)
        worst = max(worst, float((found.double() - right).norm() / right.norm()))

    for rank, (query, key, value) in enumerate(parts):
        ring = RingAttention(KERNELS[kernel].pieces, scale=0.3, rank=rank, num_ranks=num_ranks)
        layout = SequenceLayout(context_ranks=num_ranks, context_rank=rank)
        chunks = chunk_sequence(ROWS, degree=degree, layout=layout)
        context: dict[int, Tensor] = {}
        for index, chunk in enumerate(chunks):
            rows = torch.cat([query[span.local_start : span.local_end] for span in chunk.queries])
            context[index] = ring.begin(index, rows, key, value, spans=chunk.queries)
        for step in range(1, num_ranks):
            _, far_key, far_value = parts[(rank - step) % num_ranks]
            for index in context:
                context[index] = ring.go_on(step, index, far_key, far_value, context[index])
        assert {part.dtype for part in context.values()} == {dtype}
        compare(torch.cat(list(context.values())).detach(), expected.detach(), rank)
        of_rank, of_query = rows_of_rank(gradient, rank, num_ranks), {}
        first = {index: chunk.queries[0].local_start for index, chunk in enumerate(chunks)}
        for step in reversed(range(num_ranks)):
            giver = (rank - step) % num_ranks
            for index in reversed(context):
                rows = of_rank[first[index] : first[index] + len(context[index])]
                found = ring.differentiate(step, index, rows, *parts[giver][1:], sums[giver])
                assert (found is None) is (step > 0)
                of_query[index] = found
        compare(torch.cat([of_query[index] for index in context]), reference[0].grad, rank)
    for rank in range(num_ranks):
        for total, whole_of in zip(sums[rank].totals(), reference[1:], strict=True):
            compare(total, whole_of.grad, rank)
    assert worst < tolerance


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_rank_holds_the_keys_of_two_others_at_most(name: str, num_ranks: int) -> None:
    """In any order that the dependencies allow: here communication runs as far ahead as it can."""
    features = BlockFeatures(ring_ranks=num_ranks)
    schedule = Pipeline.of(3, schedule=name).schedule_of([features])
    assert from_text(to_text(schedule)) == schedule
    for direction in Direction:
        needs = needs_of(schedule, [features], direction)
        bring = RING if direction is Direction.FORWARD else RERING
        order = [stage for _, stage in issue_order(schedule.program(direction), needs, host_waits=False)]
        arrived: list[int] = []
        most = 0
        for place, stage in enumerate(order):
            if stage.kind.row == bring:
                arrived.append(stage.kind.step)
            used = [
                step for step in arrived
                if not any(one.kind == step_of(ATTEND, step) for one in order[place:])
            ]  # fmt: skip
            most = max(most, len(arrived) - len(used))
        assert len(arrived) == num_ranks - 1
        assert most == min(2, num_ranks - 1)


def test_names_of_steps() -> None:
    text = "schedule mine degree 1\nforward compute: attend{}\n"
    for wrong in ("", "01", "-1", "99999"):
        with pytest.raises(ValueError, match="is not a stage"):
            from_text(text.format(wrong))
    assert from_text(text.format(12)).forward.stages[0].kind == step_of(ATTEND, 12)
    assert dataclasses.replace(BlockFeatures(), ring_ranks=1).ring is False
