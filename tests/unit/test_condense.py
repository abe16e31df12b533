"""Which rows are sent, and which take another one's result."""

from __future__ import annotations

import torch

from megatron_ampipe.exchange.codecs import Condenser
from megatron_ampipe.launch.routing_recorder import compared_rows


def rows_of(*angles: float) -> torch.Tensor:
    """Rows whose cosine is that of the difference of their angles, in degrees; of different lengths."""
    radians = torch.tensor(angles).deg2rad()
    return torch.stack([radians.cos(), radians.sin()], dim=1) * torch.arange(1.0, len(angles) + 1)[:, None]


def test_a_row_takes_the_result_of_the_earliest_row_that_goes() -> None:
    # 20 degrees are similar. 15 follows 0, so 30 has none to follow and goes; 12 follows the first of two.
    routing_map = torch.ones(5, 1, dtype=torch.bool)
    condenser = Condenser(float(torch.tensor(20.0).deg2rad().cos()))
    found = condenser.condense(rows_of(0, 15, 30, 12, 90), routing_map, batch=1, counted=True)
    assert found.sent.tolist() == [0, 2, 4]
    assert found.sent[found.place].tolist() == [0, 0, 2, 0, 4]
    assert found.counts.tolist() == [3]
    assert condenser.take_share() == 1 - 3 / 5
    assert condenser.take_share() is None


def test_only_rows_of_one_expert_and_one_sequence_are_compared() -> None:
    # Tokens 0 and 2 are of sequence 0, tokens 1 and 3 of sequence 1; all are equal. Token 2 has two experts.
    routing_map = torch.tensor([[1, 0], [1, 0], [1, 1], [0, 1]], dtype=torch.bool)
    rows = torch.ones(5, 3)
    found = Condenser(1.0).condense(rows, routing_map, batch=2, counted=False)
    # Sorted by expert: tokens 0, 1, 2 of expert 0, then tokens 2, 3 of expert 1.
    assert found.sent.tolist() == [0, 1, 3, 4]
    assert found.place.tolist() == [0, 1, 0, 2, 3]
    assert found.counts.tolist() == [2, 2]


def test_later_rows_change_nothing_before_them() -> None:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(40, 3, generator=generator)
    routing_map = torch.ones(40, 1, dtype=torch.bool)
    whole = Condenser(0.8).condense(rows, routing_map, batch=1, counted=False)
    part = Condenser(0.8).condense(rows[:25], routing_map[:25], batch=1, counted=False)
    taken = whole.sent[whole.place]
    assert torch.equal(taken[:25], part.sent[part.place])
    assert (taken <= torch.arange(40)).all() and 0 < len(whole.sent) < 40


def test_experts_without_tokens() -> None:
    routing_map = torch.tensor([[0, 1, 0]], dtype=torch.bool)
    found = Condenser(0.5).condense(torch.ones(1, 4), routing_map, batch=1, counted=False)
    assert found.sent.tolist() == found.place.tolist() == [0] and found.counts.tolist() == [0, 1, 0]


def test_the_recorder_counts_the_rows_that_go_of_one_expert() -> None:
    generator = torch.Generator().manual_seed(3)
    batch, experts, thresholds = 2, 4, (0.6, 0.8, 0.95)
    hidden = torch.randn(30, batch, 3, generator=generator)
    hidden[10:12] = hidden[3]
    hidden[20, 0] = float("nan")
    chosen = torch.rand(30, batch, experts, generator=generator) < 0.5
    chosen[..., 1] = False
    routing_map = chosen.flatten(0, 1)
    rows = hidden.flatten(0, 1)[routing_map.T.nonzero()[:, 1]]
    sent = [
        Condenser(threshold).condense(rows, routing_map, batch=batch, counted=False).counts
        for threshold in thresholds
    ]
    for pick in range(5):
        expert = (0, 2, 3)[pick % 3]
        found = compared_rows(hidden, chosen, thresholds, pick=pick).tolist()
        assert found == [routing_map[:, expert].sum(), *(counts[expert] for counts in sent)]
    assert compared_rows(hidden, chosen, thresholds, pick=None).tolist() == [0] * 4
    assert compared_rows(hidden, chosen & False, thresholds, pick=0).tolist() == [0] * 4
