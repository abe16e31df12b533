"""Schedules of one block and of several: text form, checks, issue order, what runs again.

The orders themselves are golden texts (test_golden.py).
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ampipe.errors import BadInput
from megatron_ampipe.schedule import (
    SCHEDULE_NAMES,
    STRATEGIES,
    BlockFeatures,
    Direction,
    Pipeline,
    Program,
    RecomputeRequest,
    Schedule,
    Stage,
    build,
    check,
    decide,
    from_text,
    issue_order,
    kinds,
    needs_of,
    period,
    to_text,
    unrolled,
    with_memory,
)
from tests import schedules
from tests.schedules import interleaved

PLAIN = BlockFeatures(chunked_qkv=True)
DENSE = BlockFeatures(dense=True, chunked_qkv=True)
RECOMPUTED = decide(RecomputeRequest(full=True))
EXPERTS = BlockFeatures(losses=True, shared=True, ordered_routing=True, chunked_qkv=True)

INTERLEAVED = f"{interleaved.__module__}:{interleaved.__name__}"
"""The example of docs/schedules.md."""
names = st.sampled_from((*SCHEDULE_NAMES, INTERLEAVED))
memories = st.sampled_from(sorted(STRATEGIES))
degrees = st.tuples(st.integers(1, 5), st.integers(1, 4)).flatmap(
    lambda pair: st.sampled_from([(pair[0] * pair[1], pair[0]), (pair[0], pair[0] * pair[1])])
)
features = st.builds(
    BlockFeatures,
    losses=st.booleans(),
    shared=st.booleans(),
    ordered_routing=st.booleans(),
    chooses=st.booleans(),
    chunked_qkv=st.booleans(),
    reduces=st.booleans(),
    reduces_experts=st.booleans(),
    nodes=st.booleans(),
    gathers=st.sampled_from(("", "comm", "comm.intra")),
    row_links=st.sampled_from(("", "network", "node")),
    gathers_rows=st.booleans(),
    ring_ranks=st.sampled_from((1, 2, 4, 8)),
).map(
    lambda block: replace(
        block,
        chunked_qkv=block.chunked_qkv and not block.ring,
        gathers_rows=block.gathers_rows and bool(block.row_links),
        reduces_experts=block.reduces and block.reduces_experts,
    )
)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[BlockFeatures, ...]:
    """Consecutive blocks of one model, of which at least one has experts; dense ones stand anywhere."""
    block = draw(features)
    has_experts = draw(st.lists(st.booleans(), min_size=1, max_size=5).filter(any))
    return tuple(block if experts else block.without_experts for experts in has_experts)


@settings(deadline=None)
@given(names, degrees, blocks(), st.booleans(), st.booleans(), st.data())
def test_a_pipeline_schedules_any_blocks(
    name: str,
    degrees: tuple[int, int],
    layers: tuple[BlockFeatures, ...],
    again: bool,
    host_waits: bool,
    data: st.DataObject,
) -> None:
    forward, backward = degrees
    if again:
        layers = tuple(replace(layer, saved=RECOMPUTED) for layer in layers)
    memory = "/".join(data.draw(st.lists(memories, min_size=backward, max_size=backward)))
    pipeline = Pipeline.of(forward, backward_degree=backward, schedule=name, stack=0, memory=memory)
    layers = tuple(pipeline.trained(layer) for layer in layers)
    schedule = pipeline.schedule_of(layers)
    assert not schedule.repeats and from_text(to_text(schedule)) == schedule
    for direction in Direction:
        needs = needs_of(schedule, layers, direction)
        order = issue_order(schedule.program(direction), needs, host_waits=host_waits)
        place = {stage: position for position, (_, stage) in enumerate(order)}
        assert len(place) == len(order) == len(needs)
        assert all(place[earlier] < place[stage] for stage, needed in needs.items() for earlier in needed)
        for lane, stages in schedule.program(direction).lanes:
            assert [stage for name_, stage in order if name_ == lane] == list(stages)


@settings(deadline=None)
@given(st.sampled_from(SCHEDULE_NAMES), degrees, features)
def test_a_period_of_one_block_is_its_schedule(
    name: str, degrees: tuple[int, int], block: BlockFeatures
) -> None:
    """Of named schedules: a custom order may have stages after its last ``merge``, which a period moves."""
    schedule = build(name, degree=degrees[0], backward_degree=degrees[1], features=block)
    repeating = period(schedule)
    assert unrolled(repeating, [block]) == unrolled(schedule, [block]) == schedule
    assert to_text(repeating).splitlines()[0].endswith(" repeats")
    assert from_text(to_text(repeating)) == repeating and period(repeating) is repeating


ROWS = replace(PLAIN, row_links="network", gathers_rows=True)


def test_a_block_that_an_order_does_not_fit_runs_the_schedule_of_its_name() -> None:
    """Such as a layer without attention, or of multi-token prediction, with a plan for the others."""
    order = build("lancet", degree=2, features=PLAIN)
    alone = Pipeline.of(2, order=order).schedule_of([PLAIN.without_attention])
    assert alone.name == "lancet" and alone.backward.weights


@pytest.mark.parametrize(("made_for", "run_as"), [(ROWS, PLAIN), (PLAIN, ROWS)])
@pytest.mark.parametrize("layers", [1, 3])
def test_an_order_fits_any_linear_layers(made_for: BlockFeatures, run_as: BlockFeatures, layers: int) -> None:
    """As of a plan for Megatron's local ones that is run with Transformer Engine's, and in reverse."""
    schedule = build("ampipe", degree=3, features=made_for)
    schedule = unrolled(schedule if layers == 1 else period(schedule), [run_as] * layers)
    check(schedule, [run_as] * layers)
    for name in ("gather-rows", "scatter-rows", "add-norm"):
        assert (name in to_text(schedule)) is (run_as is ROWS)


def with_lane(schedule: Schedule, lane: str, stages: Sequence[Stage]) -> Schedule:
    lanes = dict(schedule.forward.lanes) | {lane: stages}
    return replace(schedule, forward=Program.of(lanes))


def test_a_wrong_order_is_refused() -> None:
    schedule = build("ampipe", degree=2, features=PLAIN)
    compute, comm = (stages for _, stages in schedule.forward.lanes)
    # The combines wait for the experts, and the experts for dispatches that come later in the lane.
    turned = with_lane(schedule, "comm", comm[4:] + comm[:4])
    moved = with_lane(with_lane(schedule, "compute", compute[:-1]), "comm", (*comm, compute[-1]))
    for wrong, message in (
        (turned, r"can never finish.*comm waits at combine\.0 for expert\.0"),
        (moved, r"computes merge\.1 in the communication lane"),
        (with_lane(schedule, "compute", compute[:-1]), r"merge\.1 0 times"),
        (with_lane(schedule, "compute", (*compute, compute[-1])), r"merge\.1 2 times"),
        (with_lane(schedule, "compute", (*compute, Stage(kinds.LOSSES))), "losses that this block does not"),
    ):
        with pytest.raises(BadInput, match=message):
            check(wrong, [PLAIN])
    with pytest.raises(BadInput, match="losses 0 times"):
        check(schedule, [EXPERTS])
    with pytest.raises(BadInput, match="has a stage again:"):
        check(Pipeline.of(2).schedule_of([replace(PLAIN, saved=RECOMPUTED)]), [PLAIN])
    routed = build("sequential", degree=2, features=BlockFeatures())
    first, *rest = routed.forward.stages
    half = len(rest) // 2
    turned = with_lane(routed, "compute", (first, *rest[half:], *rest[:half]))
    check(turned, [BlockFeatures()])
    with pytest.raises(BadInput, match="can never finish"):
        check(turned, [BlockFeatures(ordered_routing=True)])
    other = build("ampipe", degree=3, features=PLAIN)
    with pytest.raises(BadInput, match="has degree 3, which neither divides the forward degree 4"):
        check(Schedule("mine", 4, schedule.forward, other.backward, 3), [PLAIN])


def changed(*parts: tuple[str, str]) -> str:
    """The text of the example at degree 2, with parts replaced."""
    text = interleaved(2, PLAIN)
    for before, after in parts:
        assert before in text
        text = text.replace(before, after, 1)
    return text


TURNED = changed(
    ("dispatch.1 combine.0", "combine.0 dispatch.1"), ("expert.0 shared.1 expert.1", "expert.1 expert.0")
)
WRONG_ORDERS: dict[str, tuple[object, str]] = {
    "lost": (changed((" expert.1", "")), "the forward order lacks expert.1."),
    "lost-backward": (changed((" dispatch.1 dispatch.0", "")), "the backward order lacks"),
    "all-lost": ("schedule mine degree 2", "the forward order lacks qkv.0 qkv.1 attention.0 attention.1."),
    "early": (
        changed(("qkv.0 attention.0 route.0", "attention.0 qkv.0 route.0")),
        "the forward order can never finish: compute waits at attention.0 for qkv.0; comm waits at counts.0",
    ),
    "deadlock": (
        TURNED,
        "the forward order can never finish: compute waits at expert.1 for dispatch.1; comm waits at combine",
    ),
    "twice": (changed((" expert.1", " expert.1 expert.1")), "the forward order lists expert.1 twice."),
    "lane": (
        changed((" merge.0", ""), ("combine.1\n", "combine.1 merge.0\n")),
        "forward) computes merge.0 in the communication lane comm.",
    ),
    "unknown": (changed(("expert.1", "expret.1")), "expret.1 is not a stage of a block of degree 2."),
    "chunk": (changed(("expert.1", "expert.2")), "expert.2 is not a stage of a block of degree 2."),
    "degree": (interleaved(4, PLAIN), "the line 'degree 4 backward 4' is not 'degree 2'; the two"),
    "repeats": (changed(("degree 2", "degree 2 repeats")), "the word 'repeats' is for plan files: layers"),
    "counts-backward": (
        changed(("backward comm: ", "backward comm: counts.0 ")),
        "the backward order has a stage counts.0, which this block does not have in this pass.",
    ),
    "weights-forward": (
        changed(("forward compute: ", "forward compute: expert-weights.0 ")),
        "the forward order has a stage expert-weights.0, which this block does not have in this pass.",
    ),
    "other-layer": (changed(("qkv.0", "qkv.0@1")), "the forward order lacks qkv.0."),
    "nothing": (None, "NoneType is neither the text of a schedule nor a Schedule."),
    "error": (ZeroDivisionError("by zero"), "fails: ZeroDivisionError: by zero."),
}
"""What a function at degree 2 returns or raises, and why it is refused."""


@pytest.mark.parametrize("name", WRONG_ORDERS)
def test_a_wrong_custom_order_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    returned, message = WRONG_ORDERS[name]

    def wrong(degree: int, features: BlockFeatures) -> object:
        if isinstance(returned, Exception):
            raise returned
        return returned

    monkeypatch.setattr(schedules, "wrong", wrong, raising=False)
    # It knows a function by its name.
    build.cache_clear()
    with pytest.raises(BadInput) as error:
        build("tests.schedules:wrong", degree=2, features=PLAIN)
    assert (error.value.name, error.value.value) == ("--ampipe-schedule", "tests.schedules:wrong")
    assert error.value.rule.startswith("for degree 2: ") and message in f"{error.value.rule}."
    assert error.value.remedy.endswith("or use --ampipe-schedule ampipe.")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("interleave", "is neither package.module:function nor one of ampipe,"),
        ("ampip", "Did you mean ampipe?"),
        ("tests.schedules:absent", "cannot be imported: AttributeError: .*PYTHONPATH on every rank"),
        ("tests.no_schedules:absent", "cannot be imported: ModuleNotFoundError: "),
        ("tests.schedules:BlockFeatures", "is no function"),
    ],
)
def test_a_name_of_no_function_is_refused(name: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        build(name, degree=2, features=PLAIN)


def test_a_custom_order_may_be_a_schedule_and_may_name_what_a_block_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = build(INTERLEAVED, degree=2, features=PLAIN)
    monkeypatch.setattr(
        schedules, "other", lambda degree, features: from_text(interleaved(degree, features)), raising=False
    )
    assert replace(build("tests.schedules:other", degree=2, features=PLAIN), name=INTERLEAVED) == text
    assert "shared.0" in interleaved(2, PLAIN) and "shared" not in to_text(text)
    others = to_text(build(INTERLEAVED, degree=2, features=replace(EXPERTS, nodes=True)))
    assert {"losses", "spread.1", "collect.0", "shared.1"} <= set(others.split())


WRONG_OF_CHUNKS = ("qkv.2", "expert", "expert.2", "expert.-1", "moe.0", "mlp")
WRONG_STEPS = ("attend", "attend01", "attend-1", "attend99999")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1"),
        ("schedule mine degree 0", "line 1"),
        ("schedule mine degree two", "line 1"),
        ("schedule mine degree 2 repeated\nforward compute: qkv", "line 1"),
        ("schedule mine degree 2\nsideways compute: qkv", "line 2"),
        ("schedule mine degree 2\nforward compute qkv", "line 2"),
        *(
            (f"schedule mine degree 2\nforward compute: {stage}", f"{stage}: is not a stage")
            for stage in (*WRONG_OF_CHUNKS, *WRONG_STEPS)
        ),
    ],
)
def test_invalid_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        from_text(text)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("repeats", [False, True])
def test_an_incomplete_order_is_refused_and_not_completed(direction: Direction, repeats: bool) -> None:
    """Only what a period cannot know is added: stages of dense blocks."""
    schedule = build("ampipe", degree=2, features=PLAIN)
    whole = period(schedule) if repeats else schedule
    for stage in schedule.program(direction).stages:
        if repeats and stage.kind == kinds.MERGE:
            stage = replace(stage, layer=-1 if direction is Direction.FORWARD else 1)
        rest = whole.program(direction).mapped(lambda stages, stage=stage: (s for s in stages if s != stage))
        incomplete = replace(whole, **{direction.value: rest})
        for layers in ([PLAIN], [PLAIN, DENSE]) if repeats else ([PLAIN],):
            with pytest.raises(BadInput, match="0 times instead of once"):
                check(unrolled(incomplete, layers), layers)


@pytest.mark.parametrize(
    ("made_for", "run_as"),
    list(itertools.permutations([*STRATEGIES, "rebuild/keep", "redispatch/rebuild"], 2)),
)
def test_an_order_of_another_strategy_gets_the_stages_that_it_lacks(made_for: str, run_as: str) -> None:
    """A plan that was made by hand, and an evaluation, which restores nothing."""
    order = period(Pipeline.of(2, memory=made_for).schedule_of([with_memory(EXPERTS, made_for)]))
    layers = [with_memory(EXPERTS, run_as)] * 2
    check(unrolled(order, layers), layers)
