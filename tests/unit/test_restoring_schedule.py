"""Schedules of blocks whose experts do not keep all that their backward needs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from megatron_ampipe.errors import BadInput
from megatron_ampipe.schedule import (
    SCHEDULE_NAMES,
    STRATEGIES,
    BlockFeatures,
    Direction,
    Pipeline,
    Schedule,
    Stage,
    check,
    data_flow,
    from_text,
    issue_order,
    kinds,
    needs_of,
    of_chunks,
    period,
    to_text,
    unrolled,
    with_memory,
)

PLAIN = BlockFeatures(losses=True, shared=True, ordered_routing=True, chunked_qkv=True)
DENSE = BlockFeatures(dense=True, chunked_qkv=True)
RESTORING = {
    "keep": set(),
    "rebuild": {kinds.REBUILD},
    "redispatch": {kinds.REPERMUTE, kinds.REDISPATCH, kinds.REBUILD},
    "offload": {kinds.LOAD},
    "S2": {kinds.REPERMUTE, kinds.REDISPATCH, kinds.RESORT, kinds.LOAD},
    "S3": {kinds.LOAD_TOKENS, kinds.REBUILD},
}
STORING = {"offload": {kinds.STORE}, "S2": {kinds.STORE}, "S3": {kinds.STORE_TOKENS}}
DEGREES = ((4, 4), (2, 4), (6, 3), (4, 1), (1, 1))
MIXED = {4: "offload/redispatch/S3/keep", 3: "rebuild/S2/keep"}


def stacks(memory: str) -> list[list[BlockFeatures]]:
    one = with_memory(PLAIN, memory)
    return [[one], [one] * 3, [with_memory(DENSE, memory), one, one], [replace(one, chunked_qkv=False)] * 2]


def schedules(layers: list[BlockFeatures], memory: str) -> list[Schedule]:
    return [
        Pipeline.of(degree, backward_degree=backward, schedule=name, stack=0, memory=memory).schedule_of(
            layers
        )
        for name in SCHEDULE_NAMES
        for degree, backward in DEGREES
        if len(of_chunks(memory)) in (1, backward)
    ]


@pytest.mark.parametrize("memory", [*STRATEGIES, *MIXED.values()])
def test_what_restores_runs_in_the_backward_pass_of_every_chunk(memory: str) -> None:
    for layers in stacks(memory):
        for schedule in schedules(layers, memory):
            names = of_chunks(memory) * (schedule.backward_degree if memory in STRATEGIES else 1)
            found = [stage for stage in schedule.backward.stages if stage.kind.restores is not None]
            assert set(found) == {
                Stage(kind, chunk, layer)
                for layer, features in enumerate(layers)
                if features.experts
                for chunk, name in enumerate(names)
                for kind in RESTORING[name]
            }
            assert not any(stage.kind.restores for stage in schedule.forward.stages)
            # A chunk of a pass with fewer chunks is stored if any of its parts is.
            assert {stage for stage in schedule.forward.stages if stage.kind.copies} == {
                Stage(kind, chunk * schedule.degree // len(names), layer)
                if schedule.degree <= len(names)
                else Stage(kind, part, layer)
                for layer, features in enumerate(layers)
                if features.experts
                for chunk, name in enumerate(names)
                for kind in STORING.get(name, ())
                for part in range(schedule.degree)
                if part * len(names) // schedule.degree == chunk or schedule.degree <= len(names)
            }
            assert from_text(to_text(schedule)) == schedule


def test_restoring_stages_wait_for_each_other_and_the_experts_for_them() -> None:
    schedule = Pipeline.of(2, memory="redispatch").schedule_of([with_memory(PLAIN, "redispatch")])
    needs = needs_of(schedule, [with_memory(PLAIN, "redispatch")], Direction.BACKWARD)
    assert needs[Stage(kinds.REPERMUTE, 1)] == ()
    assert needs[Stage(kinds.REDISPATCH, 1)] == (Stage(kinds.REPERMUTE, 1),)
    assert needs[Stage(kinds.REBUILD, 1)] == (Stage(kinds.REDISPATCH, 1),)
    assert {Stage(kinds.REBUILD, 1), Stage(kinds.COMBINE, 1)} <= set(needs[Stage(kinds.EXPERT, 1)])
    # Of what arrived, only the probabilities are kept for longer than the forward pass of the experts.
    flow = data_flow(with_memory(PLAIN, "redispatch"))
    taken = {value.name: source.giver for value, source in flow.taken[kinds.REBUILD]}
    assert taken == {"tokens": kinds.REDISPATCH, "probs": kinds.DISPATCH}


def test_experts_are_rebuilt_while_their_gradient_travels() -> None:
    features = with_memory(PLAIN, "rebuild")
    schedule = Pipeline.of(4, memory="rebuild").schedule_of([features])
    needs = needs_of(schedule, [features], Direction.BACKWARD)
    compute = next(lane.stages for lane in schedule.backward.lanes if lane.lane == "compute")
    first = compute.index(Stage(kinds.EXPERT, 3))
    assert compute[first - 1] == Stage(kinds.REBUILD, 3)
    assert Stage(kinds.COMBINE, 3) not in needs[Stage(kinds.REBUILD, 3)]


def test_tokens_are_sent_again_before_the_gradients_of_their_chunk() -> None:
    features = with_memory(PLAIN, "redispatch")
    for name in ("ampipe", "moe-only"):
        schedule = Pipeline.of(4, schedule=name, memory="redispatch").schedule_of([features])
        comm = [
            stage.name for lane in schedule.backward.lanes if lane.lane == "comm" for stage in lane.stages
        ]
        for chunk in range(4):
            assert comm.index(f"redispatch.{chunk}") == comm.index(f"combine.{chunk}") - 1


def test_a_chunk_that_is_rebuilt_takes_what_arrived_and_one_that_is_sent_again_what_arrives() -> None:
    memory = MIXED[4]
    features = with_memory(PLAIN, memory)
    needs = needs_of(Pipeline.of(4, memory=memory).schedule_of([features]), [features], Direction.BACKWARD)
    assert needs[Stage(kinds.REBUILD, 1)] == (Stage(kinds.REDISPATCH, 1),)
    assert needs[Stage(kinds.REBUILD, 2)] == (Stage(kinds.LOAD_TOKENS, 2),)
    assert needs[Stage(kinds.LOAD, 0)] == (Stage(kinds.EXPERT, 2),)
    assert Stage(kinds.REBUILD, 0) not in needs and Stage(kinds.REPERMUTE, 2) not in needs


@pytest.mark.parametrize("lane", ["comm", "comm.intra"])
def test_what_comes_back_is_gathered_once_more_and_what_was_kept_is_not(lane: str) -> None:
    """``rebuild`` keeps the gathered tokens; the others gather what was sent once more, or stored."""
    memory = "rebuild/redispatch/S2/S3"
    features = with_memory(replace(PLAIN, gathers=lane), memory)
    schedule = Pipeline.of(4, memory=memory).schedule_of([features])
    needs = needs_of(schedule, [features], Direction.BACKWARD)
    again = kinds.REGATHER
    assert needs[Stage(kinds.REBUILD, 0)] == ()
    for chunk, source, taker in (
        (1, kinds.REDISPATCH, kinds.REBUILD),
        (2, kinds.REDISPATCH, kinds.RESORT),
        (3, kinds.LOAD_TOKENS, kinds.REBUILD),
    ):
        assert needs[Stage(again, chunk)] == (Stage(source, chunk),)
        assert needs[Stage(taker, chunk)] == (Stage(again, chunk),)
    assert {one.lane for one in schedule.backward.lanes} - {"comm.intra"} == {"compute", "comm", "copy"}
    (own,) = (one for one in schedule.backward.lanes if one.lane == lane)
    assert {Stage(again, chunk) for chunk in (1, 2, 3)} <= set(own.stages)
    # What is stored is what has arrived, before it is gathered.
    stored = needs_of(schedule, [features], Direction.FORWARD)[Stage(kinds.STORE_TOKENS, 3)]
    assert stored == (Stage(kinds.DISPATCH, 3),)


@pytest.mark.parametrize(
    ("made_for", "run_as"), itertools.permutations([*STRATEGIES, "rebuild/keep", "redispatch/rebuild"], 2)
)
def test_an_order_of_another_strategy_gets_the_stages_that_it_lacks(made_for: str, run_as: str) -> None:
    """A plan that was made by hand, and an evaluation, which restores nothing."""
    order = period(Pipeline.of(2, memory=made_for).schedule_of([with_memory(PLAIN, made_for)]))
    layers = [with_memory(PLAIN, run_as)] * 2
    found = unrolled(order, layers)
    check(found, layers)
    for direction in Direction:
        program = found.program(direction)
        issue_order(program, needs_of(found, layers, direction), host_waits=True)


def test_copies_keep_pace_with_the_experts_from_block_to_block() -> None:
    memory = "offload/keep/S3"
    layers = [with_memory(features, memory) for features in (PLAIN, DENSE, PLAIN)]
    schedule = Pipeline.of(3, stack=0, memory=memory).schedule_of(layers)
    forward, backward = (needs_of(schedule, layers, direction) for direction in Direction)
    assert Stage(kinds.STORE, 0) in forward[Stage(kinds.EXPERT, 2)]
    assert Stage(kinds.STORE_TOKENS, 2) in forward[Stage(kinds.EXPERT, 1, 2)]
    assert forward[Stage(kinds.STORE_TOKENS, 2, 2)] == (Stage(kinds.DISPATCH, 2, 2),)
    assert backward[Stage(kinds.LOAD_TOKENS, 2, 2)] == ()
    assert backward[Stage(kinds.LOAD, 0, 2)] == (Stage(kinds.EXPERT, 2, 2),)
    assert backward[Stage(kinds.LOAD_TOKENS, 2)] == (Stage(kinds.EXPERT, 1, 2),)
    copies = {
        direction: [
            str(stage)
            for order in schedule.program(direction).lanes
            if order.lane == "copy"
            for stage in order.stages
        ]
        for direction in Direction
    }
    assert copies[Direction.FORWARD] == ["store.0", "store-tokens.2", "store.0@2", "store-tokens.2@2"]
    assert copies[Direction.BACKWARD] == ["load-tokens.2@2", "load.0@2", "load-tokens.2", "load.0"]


def test_a_rebuild_after_its_experts_is_refused() -> None:
    features = with_memory(PLAIN, "rebuild")
    text = to_text(Pipeline.of(2, schedule="sequential", memory="rebuild").schedule_of([features]))
    wrong = text.replace("rebuild.1 expert.1", "expert.1 rebuild.1")
    assert wrong != text
    with pytest.raises(BadInput, match=r"compute waits at expert\.1 for rebuild\.1"):
        check(from_text(wrong), [features])


def test_blocks_without_anything_to_restore_keep_their_features() -> None:
    for features in (DENSE, replace(PLAIN, recomputed=True)):
        assert with_memory(features, "redispatch") == features
    with pytest.raises(BadInput, match="--ampipe-memory forget: is not one of keep, rebuild, redispatch"):
        Pipeline.of(4, memory="forget")
    with pytest.raises(BadInput, match=r"keep/rebuild: names strategies of 2 chunks, and the .* has 4"):
        Pipeline.of(2, backward_degree=4, memory="keep/rebuild")
