"""Partners: the order in which two passes share lanes, and how the two passes of a step meet."""

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.host.torch_calls import HostStream
from megatron_ampipe.plan.partners import as_megatron, best_partners, both_passes
from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.plan.planner import make_plan
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.runtime import partners
from megatron_ampipe.runtime.compile import TapeOptions, compiled
from megatron_ampipe.runtime.partners import Partners
from megatron_ampipe.schedule import KEEP, LISTED, Direction, Exchange, Partner, Pipeline, program_from_text
from megatron_ampipe.schedule.partners import merge_passes
from megatron_ampipe.tools.plan_command import PrintedFunctions
from tests.plan_cases import cluster, sized_block


def test_the_stage_that_can_begin_first_is_next_in_its_lane() -> None:
    """Of a backward pass (0 to 2) and a forward pass (3 to 5); of equal ones the smaller number is first."""
    lanes = {("compute", False): [0, 2], ("comm", False): [1], ("compute", True): [3, 5], ("comm", True): [4]}
    needs: dict[int, list[int]] = {0: [], 1: [0], 2: [1], 3: [], 4: [3], 5: [4]}
    times, rank = dict.fromkeys(range(6), 2.0), {number: number for number in range(6)}
    assert merge_passes(lanes, needs, times, rank) == {"compute": [0, 3, 2, 5], "comm": [1, 4]}
    # A transfer that waits for nothing ends before a long computation.
    needs[1], times[0] = [], 4.0
    assert merge_passes(lanes, needs, times, rank)["compute"] == [0, 2, 3, 5]


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


@pytest.mark.parametrize(
    ("num_microbatches", "chains"),
    [(1, [1]), (16, [16]), (32, [16, 16]), (40, [10] * 4), (34, [12, 11, 11]), (17, [9, 8])],
)
def test_a_long_step_is_several_chains_of_graphs(num_microbatches: int, chains: list[int]) -> None:
    from megatron_ampipe.launch.partners import MAX_CHAIN, chains_of

    assert chains_of(num_microbatches) == chains
    assert sum(chains) == num_microbatches and max(chains) <= MAX_CHAIN


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
    best, megatron = best_partners(predictor, (1, 2)), as_megatron(predictor)
    assert best.bound_us(predictor) <= best.time_us <= megatron.time_us
    for partner in (best.partner, megatron.partner, Partner(1, best.partner.schedule, LISTED)):
        program = both_passes(predictor, partner).compiled
        pipeline = Pipeline.of(1, stack=0, memory=KEEP, partner=partner)
        of_pass = pipeline.with_partners(forward=True, backward=True)
        tapes = compiled(
            of_pass.schedule_of(predictor.layers),
            predictor.layers,
            chunks=of_pass.chunks(predictor.block.rows),
            functions=[PrintedFunctions()] * 3,
            options=TapeOptions(keep_graph=True, host_waits=True, threads=False),
        ).passes
        joint = partners.merged(tapes[Direction.BACKWARD], tapes[Direction.FORWARD], partner, host_waits=True)
        lanes: dict[str, list[str]] = {}
        for call in joint.calls:
            lanes.setdefault(call.lane, []).append(str(call.stage))
        assert lanes == {
            lane: [str(program.stages[place]) for place in places] for lane, places in program.lanes
        }


def test_a_plan_with_partners_is_read_back_unchanged(tmp_path: Path) -> None:
    plan = make_plan(Predictor(sized_block(topk=4), cluster(), num_layers=4), full=False, with_partner=1.0)
    searched = plan.pipeline.partner
    stages = "next:expert.0@-1 expert.0 next:merge.0@-1 next:qkv.0 next:attention.0 route.0 qkv.0"
    by_hand = program_from_text(f"compute: {stages}\ncomm: combine.0@1 next:combine.0\n", degree=1)
    for period in (searched.period, by_hand):
        pipeline = replace(plan.pipeline, partner=replace(searched, period=period))
        replace(plan, pipeline=pipeline).write(tmp_path / "plan.yaml", head="a test")
        assert Plan.read(tmp_path / "plan.yaml").pipeline.partner == pipeline.partner
    wrong = (tmp_path / "plan.yaml").read_text().replace("next:qkv.0", "next:qkw.0")
    (tmp_path / "plan.yaml").write_text(wrong)
    with pytest.raises(BadInput, match=r"plan\.yaml:\d+: schedule line 1 next:qkw\.0: is not a stage"):
        Plan.read(tmp_path / "plan.yaml")


class Step:
    """A step whose passes are lists of blocks, each with a number of layers; tells what ran with what."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[str] = []
        self.partners = Partners()
        monkeypatch.setattr("torch.cuda.current_stream", HostStream)
        monkeypatch.setattr("torch.cuda.stream", mock.MagicMock())
        monkeypatch.setattr("torch.cuda.set_device", mock.MagicMock())
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

        def back() -> None:
            for place, num_layers in enumerate(backward):
                fails(f"b{place}")
                self.partners.backward(self.call(f"b{place}", num_layers), "gradient")

        return self.partners.run(ahead, back)


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
    assert_undisturbed(step)


def assert_undisturbed(step: Step) -> None:
    """The passes of the next step run as if nothing had failed, alone and in pairs."""
    step.ran.clear()
    step.partners.forward(step.call("f", 1), "hidden")
    step.run([1, 1], [1, 1])
    step.run([1], [1])
    step.partners.backward(step.call("b", 1), "gradient")
    assert step.ran == ["f", "b0+f0", "b1+f1", "b0+f0", "b"]
    step.ran.clear()
    # Without a pair in between: one micro-batch.
    step.partners.forward(step.call("f", 1), "hidden")
    step.partners.backward(step.call("b", 1), "gradient")
    assert step.ran == ["f", "b"]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("failing", ["f0", "f1", "b0", "b1"])
def test_a_lone_backward_pass_after_a_failure_runs(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(place: str) -> None:
        if place == failing:
            raise ZeroDivisionError(place)

    step = Step(monkeypatch)
    with pytest.raises(ZeroDivisionError):
        step.run([1, 1], [1, 1], fails=fails)
    step.ran.clear()
    step.partners.backward(step.call("b", 1), "gradient")
    assert step.ran == ["b"]
    assert_undisturbed(step)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_interrupted_pair_does_not_disturb_the_next(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal arrives while the forward pass waits for the backward pass, for the ``at``-th time."""
    waits = iter(range(100))

    class Interrupted(threading.Semaphore):
        def acquire(self, *args: Any, **kwargs: Any) -> bool:
            if threading.current_thread() is threading.main_thread() and next(waits) == at:
                raise KeyboardInterrupt
            return super().acquire(*args, **kwargs)

    names = {"Semaphore": Interrupted, "Thread": threading.Thread}
    monkeypatch.setattr(partners, "threading", SimpleNamespace(**names))
    step = Step(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        step.run([1, 1], [1, 1])
    step.ran.clear()
    step.run([1, 1], [1, 1])
    assert step.ran == ["b0+f0", "b1+f1"]
    assert_undisturbed(step)


def test_the_thread_of_the_backward_pass_uses_the_device_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's own context of a stream, and a device for each thread as in CUDA: a new one is on 0."""
    of_thread, used = threading.local(), []
    rank_device = torch.device("cuda", 3)

    def current_device() -> int:
        return getattr(of_thread, "device", 0)

    def set_device(device: Any) -> None:
        of_thread.device = torch.device(device).index
        used.append(of_thread.device)

    def current_stream(device: Any = None) -> SimpleNamespace:
        index = current_device() if device is None else torch.device(device).index
        return SimpleNamespace(device=torch.device("cuda", index))

    class OnDevice(contextlib.AbstractContextManager[None]):
        """Does not make a context on a device that it leaves, as ``torch.cuda.device``."""

        def __init__(self, device: Any) -> None:
            self.device = torch.device(device).index

        def __enter__(self) -> None:
            self.before, of_thread.device = current_device(), self.device

        def __exit__(self, *_: object) -> None:
            of_thread.device = self.before

    replaced = {
        "current_stream": current_stream, "set_device": set_device, "device": OnDevice,
        "set_stream": lambda stream: set_device(stream.device), "stream": torch.cuda.StreamContext,
        "_get_device_index": lambda *_: current_device(),
    }  # fmt: skip
    for name, replacement in replaced.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    set_device(rank_device)
    joined, seen = Partners(), []
    for device in (3, 3, 2):
        set_device(torch.device("cuda", device))
        joined.run(lambda: None, lambda: seen.append(current_device()))
    assert seen == [3, 3, 2]
    assert set(used) == {2, 3}, "the rank has made a context on another GPU"
