"""Made-up stages in schedules, predictions, searches and pictures."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields, replace
from pathlib import Path

import pytest

from megatron_ampipe.errors import BadInput
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.search import full_plan
from megatron_ampipe.plan.simulate import compile_named, compile_program, run
from megatron_ampipe.schedule import (
    ALL_KINDS,
    SCHEDULE_NAMES,
    BlockFeatures,
    Direction,
    Lane,
    LaneOrder,
    Program,
    Schedule,
    Stage,
    StageKind,
    build,
    check,
    dataflow,
    dependencies,
    even_chunks,
    from_text,
    kinds,
    needs_of,
    to_text,
)
from megatron_ampipe.schedule.kinds import ring_rows, rows
from megatron_ampipe.tools.timeline_picture import draw
from tests.added_stages import AUDIT, COPY, COSTS, DELAY
from tests.plan_cases import cluster, without_device, workload

FEATURES = BlockFeatures(losses=True, shared=True, chunked_qkv=True, added=(DELAY, COPY))
ALL_ROWS = (*ALL_KINDS, DELAY, COPY, AUDIT)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
@pytest.mark.parametrize("degrees", [(1, 1), (4, 4), (4, 2), (2, 4)])
@pytest.mark.parametrize("added", [(DELAY,), (DELAY, COPY), (AUDIT,), (DELAY, COPY, AUDIT)])
def test_every_named_schedule_places_them(name: str, degrees: tuple[int, int], added: tuple) -> None:  # type: ignore[type-arg]
    features = BlockFeatures(losses=True, shared=True, chunked_qkv=True, added=added)
    schedule = build(name, degree=degrees[0], backward_degree=degrees[1], features=features)
    check(schedule, [features])
    assert from_text(to_text(schedule), kinds=ALL_ROWS) == schedule
    with pytest.raises(BadInput, match="is not a stage"):
        from_text(to_text(schedule))
    plain = build(name, degree=degrees[0], backward_degree=degrees[1], features=BlockFeatures())
    with pytest.raises(BadInput):
        check(plain, [features])


def test_they_stand_between_their_neighbours_in_both_directions() -> None:
    schedule = build("ampipe", degree=2, features=FEATURES)
    forward, backward = (needs_of(schedule, [FEATURES], direction) for direction in Direction)
    assert forward[Stage(DELAY, 1)] == (Stage(kinds.EXPERT, 1),)
    assert forward[Stage(COPY, 1)] == (Stage(DELAY, 1),)
    assert forward[Stage(kinds.COMBINE, 1)] == (Stage(COPY, 1),)
    assert backward[Stage(COPY, 1)] == (Stage(kinds.COMBINE, 1),)
    assert backward[Stage(DELAY, 1)] == (Stage(COPY, 1),)
    assert backward[Stage(kinds.EXPERT, 1)] == (Stage(DELAY, 1),)


def test_a_prediction_counts_them_and_a_search_orders_them() -> None:
    block, figures = workload(), without_device(cluster())
    plain, predictor = Predictor(block, figures), Predictor(block, figures, added=COSTS)
    lengths = even_chunks(block.rows, 4)
    before = plain.pass_us(build("sequential", degree=4, features=plain.features), lengths)
    after = predictor.pass_us(build("sequential", degree=4, features=predictor.features), lengths)
    # In one lane everything adds up: four delays, all rows copied, one audit, five overheads.
    overhead = figures.stage_overhead("delay")
    forward = 4 * 2000 + 0.5 * block.rows + 5 + 5 * overhead.forward_us
    backward = 4 * 2000 + 0.25 * block.rows + 7 + 5 * overhead.backward_us
    assert after.forward - before.forward == pytest.approx(forward)
    assert after.backward - before.backward == pytest.approx(backward)
    overlapped = predictor.pass_us(build("ampipe", degree=4, features=predictor.features), lengths)
    assert overlapped.forward < after.forward
    planned = full_plan(predictor, (2, 4))
    check(planned.schedule, [predictor.features])
    assert planned.total_us <= min(
        sum(
            predictor.pass_us(
                build("ampipe", degree=degree, features=predictor.features), even_chunks(block.rows, degree)
            )
        )
        for degree in (2, 4)
    )


def test_lanes_of_one_resource_share_it_and_others_do_not() -> None:
    """Two transfers at once: twice as long on one wire, as long as the longer one on two."""

    def end(second: str) -> float:
        one = Stage(StageKind("one", lane=Lane("comm", "network")), 0)
        other = Stage(StageKind("other", lane=Lane("second", second)), 0)
        program = Program(
            (LaneOrder("compute", ()), LaneOrder("comm", (one,)), LaneOrder("second", (other,)))
        )
        _, ends = run(compile_program(program, {one: (), other: ()}), [10.0, 6.0])
        return max(ends)

    assert end("network") == pytest.approx(16.0)
    assert end("host link") == pytest.approx(10.0)


def test_a_picture_shows_them_in_their_lane(tmp_path: Path) -> None:
    predictor = Predictor(workload(), cluster(), added=COSTS)
    schedule = build("ampipe", degree=2, features=predictor.features)
    timeline = predictor.timeline(schedule, even_chunks(8192, 2))
    lanes = {span.stage: span.lane for span in timeline.spans}
    assert lanes["delay.1"] == "compute"
    assert lanes["copy.1"] == "copy"
    assert lanes["audit"] == "compute"
    picture = tmp_path / "timeline.svg"
    draw([timeline], targets=[picture], title="made up", split=False)
    text = picture.read_text()
    assert "copy" in text
    assert "delay" in text


@pytest.mark.parametrize("chunked_qkv", [False, True])
def test_one_schedule_can_hold_several_layers(chunked_qkv: bool) -> None:
    """A layer takes what the one before it returns: chunk by chunk where nothing needs the whole sequence."""
    features = BlockFeatures(chunked_qkv=chunked_qkv)
    one = build("ampipe", degree=2, features=features)

    def stacked(program: Program, layers: tuple[int, ...]) -> Program:
        return Program(
            tuple(
                LaneOrder(
                    order.lane,
                    tuple(replace(stage, layer=layer) for layer in layers for stage in order.stages),
                )
                for order in program.lanes
            )
        )

    two = Schedule("two", 2, stacked(one.forward, (0, 1)), stacked(one.backward, (1, 0)), 2)
    check(two, [features] * 2)
    text = to_text(two)
    assert "expert.1@1" in text
    assert from_text(text) == two
    needs = dependencies([features] * 2, degree=2, whole_attention=False, direction=Direction.FORWARD)
    first = Stage(kinds.QKV, 0 if chunked_qkv else None, 1)
    merged = (Stage(kinds.MERGE, 0), Stage(kinds.MERGE, 1))
    assert needs[first] == (merged[:1] if chunked_qkv else merged)
    back = needs_of(two, [features] * 2, Direction.BACKWARD)
    assert Stage(kinds.QKV, 1 if chunked_qkv else None, 1) in back[Stage(kinds.MERGE, 1)]
    assert Stage(kinds.ATTENTION, 1, 1) in back[Stage(kinds.MERGE, 1)]
    with pytest.raises(BadInput, match="can never finish"):
        check(replace(two, forward=stacked(one.forward, (1, 0))), [features] * 2)
    block = workload(context=1 if chunked_qkv else 2)
    alone, predictor = Predictor(block, cluster()), Predictor(block, cluster(), num_layers=2)
    assert predictor.layers == (features,) * 2
    lengths = even_chunks(block.rows, 2)
    assert len(compile_named(two, (features,) * 2, Direction.FORWARD).stages) == 2 * len(one.forward.stages)
    apart, together = alone.pass_us(one, lengths), predictor.pass_us(two, lengths)
    assert together.forward <= 2 * apart.forward
    timeline = predictor.timeline(two, lengths)
    assert {span.layer for span in timeline.spans} == {1, 2}


def test_a_kind_in_the_table_needs_no_change_of_a_builder(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """As if its row stood in ``schedule/kinds.py``."""

    def with_another(block: BlockFeatures) -> tuple[StageKind, ...]:
        found = list(rows(block))
        found.insert(found.index(kinds.EXPERT) + 1, DELAY)
        return tuple(found)

    monkeypatch.setattr(dataflow, "rows", with_another)
    for remembered in (dataflow.data_flow, build):
        remembered.cache_clear()
        request.addfinalizer(remembered.cache_clear)
    features = BlockFeatures(losses=True, ordered_routing=True)
    for name in SCHEDULE_NAMES:
        schedule = build(name, degree=3, features=features)
        check(schedule, [features])
        assert {Stage(DELAY, chunk) for chunk in range(3)} <= set(schedule.backward.stages)


def test_kinds_that_follow_the_same_row_keep_their_order() -> None:
    first, second = (
        StageKind(name, takes=DELAY.takes, gives=DELAY.gives, after=kinds.EXPERT)
        for name in ("first", "second")
    )
    rows = dataflow.data_flow(BlockFeatures(added=(first, second)))
    place = rows.kinds.index(kinds.EXPERT)
    assert rows.kinds[place + 1 : place + 3] == (first, second)


def test_a_copy_of_a_kind_is_the_kind() -> None:
    ways = [
        copy.copy,
        copy.deepcopy,
        *(
            lambda kind, protocol=protocol: pickle.loads(pickle.dumps(kind, protocol))
            for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
        ),
    ]
    for way in ways:
        for kind in (*ALL_KINDS, *ring_rows(4), DELAY):
            copied = way(kind)
            assert copied == kind and hash(copied) == hash(kind)
            assert all(getattr(copied, one.name) == getattr(kind, one.name) for one in fields(StageKind))
