"""Partners: the order in which two passes share lanes, and how the two passes of a step meet."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.host.torch_calls import HostStream
from megatron_ampipe.plan.model_file import block_of, find_model, layers_of, read_model
from megatron_ampipe.plan.partners import as_megatron, best_together, both_passes
from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.plan.planner import make_plan
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.runtime import partners
from megatron_ampipe.runtime.compile import compiled
from megatron_ampipe.runtime.partners import Partners
from megatron_ampipe.schedule import (
    KEEP,
    LISTED,
    Direction,
    Exchange,
    Partner,
    Pipeline,
    Program,
    program_from_text,
)
from megatron_ampipe.schedule.partners import together
from megatron_ampipe.tools.plan_command import UNNAMED
from tests.plan_cases import cluster, sized_block

LANES = ("compute", "comm")


class Task(NamedTuple):
    """A stage of one of two passes: its lane, the numbers of those that it needs, its time, its pass."""

    lane: str
    needs: tuple[int, ...]
    time: float
    ahead: bool


def ordered(tasks: list[Task]) -> dict[str, list[int]]:
    lanes: dict[tuple[str, bool], list[int]] = {}
    for number, task in enumerate(tasks):
        lanes.setdefault((task.lane, task.ahead), []).append(number)
    needs, times = (dict(enumerate(column)) for column in list(zip(*tasks, strict=True))[1:3])
    return together(lanes, needs, times, {number: number for number in range(len(tasks))})


@st.composite
def two_passes(draw: st.DrawFn) -> list[Task]:
    """Tasks of a backward and a forward pass, each in the order in which it would be issued."""
    tasks: list[Task] = []
    for ahead in (False, True):
        first = len(tasks)
        for number in range(first, first + draw(st.integers(1, 8))):
            needs = draw(st.sets(st.integers(first, number - 1), max_size=2)) if number > first else set()
            time = draw(st.integers(1, 5))
            tasks.append(Task(draw(st.sampled_from(LANES)), tuple(sorted(needs)), float(time), ahead))
    return tasks


@given(two_passes())
def test_each_pass_keeps_its_order_and_no_lane_waits_for_itself(tasks: list[Task]) -> None:
    order = ordered(tasks)
    assert sorted(number for lane in order.values() for number in lane) == list(range(len(tasks)))
    for lane, numbers in order.items():
        assert {tasks[number].lane for number in numbers} == {lane}
        for ahead in (False, True):
            of_pass = [number for number in numbers if tasks[number].ahead is ahead]
            assert of_pass == sorted(of_pass)
    alone = sum(makespan([task for task in tasks if task.ahead is ahead], tasks) for ahead in (False, True))
    assert makespan_of(order, tasks) <= alone


def makespan(some: list[Task], tasks: list[Task]) -> float:
    """The time of one pass alone."""
    numbers = [number for number, task in enumerate(tasks) if task in some and task.ahead is some[0].ahead]
    lanes = {lane: [number for number in numbers if tasks[number].lane == lane] for lane in LANES}
    return makespan_of(lanes, tasks)


def makespan_of(order: dict[str, list[int]], tasks: list[Task]) -> float:
    """When the last task ends; fails if lanes wait for one another."""
    ends: dict[int, float] = {}
    free = dict.fromkeys(order, 0.0)
    left = {lane: list(numbers) for lane, numbers in order.items()}
    while any(left.values()):
        ready = [
            lane
            for lane, numbers in left.items()
            if numbers and all(needed in ends for needed in tasks[numbers[0]].needs)
        ]
        assert ready, "lanes wait for one another"
        for lane in ready:
            number = left[lane].pop(0)
            begin = max([free[lane], *(ends[needed] for needed in tasks[number].needs)])
            ends[number] = free[lane] = begin + tasks[number].time
    return max(ends.values())


def test_a_transfer_of_one_pass_travels_while_the_other_computes() -> None:
    passes = [("compute", 2.0, ()), ("comm", 2.0, (0,)), ("compute", 2.0, (1,))]
    tasks = [
        Task(lane, tuple(3 * ahead + needed for needed in needs), time, bool(ahead))
        for ahead in (0, 1)
        for lane, time, needs in passes
    ]
    assert makespan_of(ordered(tasks), tasks) == 8.0


@pytest.mark.parametrize(
    ("forward", "backward", "degrees", "memory"),
    [
        (False, False, (4, 4), "keep/keep/keep/rebuild"),
        (False, True, (4, 1), "keep"),
        (True, False, (1, 4), "keep/keep/keep/rebuild"),
        (True, True, (1, 1), "keep"),
    ],
)
def test_only_passes_with_a_partner_are_not_cut(
    forward: bool, backward: bool, degrees: tuple[int, int], memory: str
) -> None:
    usual = Pipeline.of(
        4, shares=(0.4, 0.3, 0.2, 0.1), memory="keep/keep/keep/rebuild", stack=0, partner=Partner()
    )
    found = usual.with_partners(forward=forward, backward=backward)
    assert (found.degree, found.backward_degree) == degrees
    assert (found.memory, found.stack) == (memory, 0)
    assert found.shares == (usual.shares if 4 in degrees else None)
    assert found.schedule == ("lancet" if forward or backward else "ampipe")


@pytest.mark.parametrize(
    ("num_models", "num_alone", "partners_of_passes"),
    [
        (1, 1, ["- b", "f b", "f b", "f -"]),
        # Two virtual stages, by groups of two micro-batches: forward 0 1, 0 1, 2 3, 2 3.
        (2, 3, ["- b", "- b", "- b", "f b", "f -", "f -", "f b", "f -"]),
    ],
)
def test_which_passes_of_a_step_have_a_partner(
    num_models: int, num_alone: int, partners_of_passes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_ampipe.launch import partners as launched

    monkeypatch.setattr(launched.parallel_state, "get_pipeline_model_parallel_world_size", lambda: num_models)
    monkeypatch.setattr(launched, "get_pp_rank_microbatches", lambda *_, **__: (0, False, num_alone, 0))
    found = launched.partners_of(4, num_models, 2 if num_models > 1 else 4)
    shown = [f"{'f' if forward else '-'} {'b' if backward else '-'}" for forward, backward in found]
    assert shown == partners_of_passes


PREDICTED = {
    "dense, losses, shared": sized_block(shared_ffn=2048, losses=True, dense_ffn=8192),
    "local, tensor-parallel": sized_block(tensor=2, local=True, splits_weights=True),
    "recomputed": sized_block(recomputes=True, splits_weights=True),
    "two hops": sized_block(experts=64, expert=16, topk=4, exchange=Exchange.NODES),
}


@pytest.mark.parametrize("name", PREDICTED)
def test_what_the_planner_predicts_is_what_runs(name: str) -> None:
    dense = (0,) if "dense" in name else ()
    predictor = Predictor(PREDICTED[name], cluster("dgx-h100"), num_layers=3, dense=dense)
    best, megatron = best_together(predictor, (1, 2)), as_megatron(predictor)
    assert best.bound_us <= best.time_us <= megatron.time_us
    for partner in (best.partner, megatron.partner, Partner(1, best.partner.schedule, LISTED)):
        program = both_passes(predictor, partner).compiled
        pipeline = Pipeline.of(1, stack=0, memory=KEEP, partner=partner)
        of_pass = pipeline.with_partners(forward=True, backward=True)
        tapes = compiled(
            of_pass.schedule_of(predictor.layers),
            predictor.layers,
            chunks=of_pass.chunks(predictor.block.rows),
            functions=[UNNAMED] * 3,
            keep_graph=True,
            host_waits=True,
            threads=False,
        ).passes
        joint = partners.merged(tapes[Direction.BACKWARD], tapes[Direction.FORWARD], partner, host_waits=True)
        lanes: dict[str, list[str]] = {}
        for call in joint.calls:
            lanes.setdefault(call.lane, []).append(str(call.stage))
        assert lanes == {
            lane: [str(program.stages[place]) for place in places] for lane, places in program.lanes
        }


@pytest.mark.parametrize(
    ("model", "cluster_name", "least"),
    [("qwen3-30b-a3b-like", "dgx-h100", 1.20), ("deepseek-v2-lite", "dgx-h100", 1.15)],
)
def test_partners_pay_within_a_node(model: str, cluster_name: str, least: float) -> None:
    source = cluster(cluster_name)
    file = read_model(find_model(model))
    layers = layers_of(file)
    predictor = Predictor(block_of(file, source)[0], source, num_layers=layers.num_layers, dense=layers.dense)
    plan = make_plan(predictor, full=False, with_partner=1.0)
    assert plan.pipeline.partner is not None and plan.predicted_speedup >= least
    assert best_together(predictor, (1,)).bound_us >= 0.95 * 1e3 * plan.partner_ms


def test_a_plan_with_partners_is_read_back_unchanged(tmp_path: Path) -> None:
    plan = make_plan(Predictor(sized_block(topk=4), cluster(), num_layers=4), full=False, with_partner=1.0)
    searched = plan.pipeline.partner
    for period in (searched.period, best_period()):
        pipeline = replace(plan.pipeline, partner=replace(searched, period=period))
        replace(plan, pipeline=pipeline).write(tmp_path / "plan.yaml", head="a test")
        assert Plan.read(tmp_path / "plan.yaml").pipeline.partner == pipeline.partner
    wrong = (tmp_path / "plan.yaml").read_text().replace("next:qkv.0", "next:qkw.0")
    (tmp_path / "plan.yaml").write_text(wrong)
    with pytest.raises(BadInput, match=r"plan\.yaml:\d+: schedule line 1 next:qkw\.0: is not a stage"):
        Plan.read(tmp_path / "plan.yaml")


def best_period() -> Program:
    """That of Megatron, as text says it."""
    stages = "next:expert.0@-1 expert.0 next:merge.0@-1 next:qkv.0 next:attention.0 route.0 qkv.0"
    return program_from_text(f"compute: {stages}\ncomm: combine.0@1 next:combine.0\n", degree=1)


class Step:
    """A step whose passes are lists of blocks, each with a number of layers; tells what ran with what."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[str] = []
        self.partners = Partners()
        monkeypatch.setattr("torch.cuda.current_stream", HostStream)
        monkeypatch.setattr("torch.cuda.stream", mock.MagicMock())
        monkeypatch.setattr(partners, "run_together", self._together)

    def _together(self, backward: Any, gradient: Any, forward: Any, hidden: Any, partner: Any) -> Any:
        self.ran.append(f"{backward.name}+{forward.name}")
        return "output", ["gradient"]

    def call(self, name: str, num_layers: int) -> Any:
        def alone(_: Any) -> Any:
            self.ran.append(name)
            return "alone"

        return SimpleNamespace(name=name, numbers=range(num_layers), forward=alone, backward=alone)

    def run(self, forward: list[int], backward: list[int], *, fails: Callable[[str], None] = str) -> Any:
        def ahead() -> str:
            for place, num_layers in enumerate(forward):
                fails(f"f{place}")
                self.partners.forward(self.call(f"f{place}", num_layers), "hidden")
            return "loss"

        def behind() -> None:
            for place, num_layers in enumerate(backward):
                fails(f"b{place}")
                self.partners.backward(self.call(f"b{place}", num_layers), "gradient")

        return self.partners.run(ahead, behind)


@pytest.mark.parametrize(
    ("forward", "backward", "ran"),
    [
        ([2], [2], "b0+f0"),
        ([1, 1, 1], [1, 1, 1], "b0+f0 b1+f1 b2+f2"),
        # Multi-token prediction: one layer more at the end.
        ([4, 1], [1, 4], "b0 b1+f0 f1"),
        # Virtual pipeline stages of different sizes, and one without blocks.
        ([1, 1, 1], [1], "b0+f0 f1 f2"),
        ([2], [1, 2, 1], "b0 b1+f0 b2"),
        ([], [1, 1], "b0 b1"),
        ([1, 1], [], "f0 f1"),
    ],
)
def test_blocks_of_as_many_layers_run_together(
    forward: list[int], backward: list[int], ran: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step(monkeypatch)
    for _ in range(2):
        step.ran.clear()
        assert step.run(forward, backward) == "loss"
        assert step.ran == ran.split()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("failing", ["f0", "f1", "b0", "b1"])
def test_a_failure_in_one_pass_ends_the_other(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(place: str) -> None:
        if place == failing:
            raise ZeroDivisionError(place)

    step = Step(monkeypatch)
    with pytest.raises(ZeroDivisionError, match=failing):
        step.run([1, 1], [1, 1], fails=fails)
    assert step.ran == (["b0+f0"] if failing.endswith("1") else [])
    # The next step is not disturbed.
    step.ran.clear()
    step.run([1], [1])
    assert step.ran == ["b0+f0"]
