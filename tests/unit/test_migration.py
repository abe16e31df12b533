"""The simulation of sequences that move, compared with every way over the ranks, and with cases by hand."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from megatron_ampipe.plan.migration import Layer, Residual, fewest, simulate
from megatron_ampipe.plan.recorded_routing import LayerRouting, RecordedRouting
from tests.unit.test_routing import RECORD

LAYERS = (
    Layer(rows=(1, 7), present=(1, 4), tokens=4),
    Layer(rows=(6, 2), present=(4, 2), tokens=4),
)


def routing_of(*rows: tuple[int, ...]) -> RecordedRouting:
    """One sequence of 4 tokens and as many layers, with one expert on each of four ranks."""
    layers = tuple(
        LayerRouting(
            layer=index + 1, counts=((counts,),), arrivals={2: ((0, 0),)}, rows_compared=0, rows_left={}
        )
        for index, counts in enumerate(rows)
    )
    return RecordedRouting((dataclasses.replace(RECORD, ranks=4, tokens=(4,), layers=layers),))


def test_what_follows_a_sequence_is_counted() -> None:
    layer = LAYERS[0]
    assert layer.dispatched(0) == 7 and layer.combined(0, 0, Residual.ALL) == 7
    assert [layer.combined(0, 1, residual) for residual in Residual] == [1 + 4, 1 + 0, 1]


@pytest.mark.parametrize("residual", Residual)
def test_no_way_over_the_ranks_sends_fewer_rows(residual: Residual) -> None:
    draw = random.Random(1)
    for _ in range(20):
        tokens, ranks, num_layers = 8, 3, 4
        layers = []
        for _ in range(num_layers):
            chosen = [draw.sample(range(6), 2) for _ in range(tokens)]
            places = [[expert // 2 for expert in experts] for experts in chosen]
            layers.append(
                Layer(
                    rows=[sum(one.count(rank) for one in places) for rank in range(ranks)],
                    present=[sum(rank in one for one in places) for rank in range(ranks)],
                    tokens=tokens,
                )
            )
        ways = []
        for way in itertools.product(range(ranks), repeat=num_layers):
            homes = (0, *way)
            ways.append(
                sum(
                    layer.dispatched(home) + layer.combined(home, new, residual)
                    for layer, home, new in zip(layers, homes, way, strict=False)
                )
            )
        assert fewest(layers, 0, residual) == min(ways)


def test_one_rank_that_has_everything() -> None:
    # All four tokens go to rank 2 in every layer. Without moving, three of four homes send 4 rows each way;
    # who moves pays the residual rows once, and sends nothing afterwards.
    routing = routing_of((0, 0, 4, 0), (0, 0, 4, 0), (0, 0, 4, 0))
    moves = simulate(routing, 4, once=False, residual=Residual.ALL)
    assert moves.dispatch == moves.combine == 3 * 4 * 3 / 4
    assert moves.most_combine == 3 / 4 * 4 and moves.most == 3 / 4 * (4 + 4) == moves.best
    assert moves.saved_of_combine == pytest.approx(2 / 3) == moves.saved_by_best
    free = simulate(routing, 4, once=False, residual=Residual.NONE)
    assert free.most_combine == 0


def test_moving_costs_more_where_tokens_go_everywhere() -> None:
    moves = simulate(routing_of((1, 1, 1, 1), (1, 1, 1, 1)), 4, once=True, residual=Residual.ALL)
    assert moves.saved_by_most == 0 == moves.saved_by_best, "nobody moves if no rank has more"
    moves = simulate(routing_of((0, 2, 1, 1), (2, 0, 1, 1)), 4, once=True, residual=Residual.ALL)
    assert moves.saved_by_most < 0 == moves.saved_by_best


def test_a_token_sent_once_never_saves_its_combine_with_all_residual_rows() -> None:
    # A rank has at most every token of a sequence once, and as many residual rows follow.
    draw = random.Random(2)
    for _ in range(100):
        present = [draw.randint(0, 16) for _ in range(4)]
        layer = Layer(rows=present, present=present, tokens=16)
        stays = layer.combined(0, 0, Residual.ALL)
        assert all(layer.combined(0, new, Residual.ALL) >= stays for new in range(4))
