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
