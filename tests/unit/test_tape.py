"""Tapes of all golden blocks: what they say is safe, printed as text, and found wrong where it is."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ampipe.errors import BadInput
from megatron_ampipe.layers import attention_stages, moe_stages
from megatron_ampipe.layers.stage_functions import FUNCTIONS
from megatron_ampipe.runtime.compile import TapeOptions, compiled
from megatron_ampipe.runtime.streams import stream_plan
from megatron_ampipe.runtime.tape import Tapes
from megatron_ampipe.schedule import ALL_KINDS, Direction, RecomputeRequest, SequenceLayout, decide
from megatron_ampipe.tools.plan_command import PrintedFunctions
from tests import tapes
from tests.golden.write import BLOCKS, pipelines, schedule_of

ROWS = 64


def tapes_of(
    block: str,
    pipeline: dict[str, Any],
    *,
    threads: bool,
    keep_graph: bool = True,
    request: RecomputeRequest | None = None,
) -> Tapes | None:
    """The tapes of a golden block, with what Megatron's recompute flags ask for; None if there is no such
    schedule."""
    try:
        schedule, layers, chosen = schedule_of(BLOCKS[block], pipeline)
    except (BadInput, AssertionError):
        return None
    if request is not None:
        policies = [decide(request, memory=chosen.memory, uses_ring=layer.ring) for layer in layers]
        layers = [
            dataclasses.replace(layer, saved=saved) for layer, saved in zip(layers, policies, strict=True)
        ]
        schedule = chosen.schedule_of(layers)
    context = BLOCKS[block].get("context_parallel_size", 1)
    layout = SequenceLayout(context_ranks=context)
    return compiled(
        schedule,
        layers,
        chunks=chosen.chunks(ROWS * context, layout),
        functions=[PrintedFunctions()] * len(layers),
        options=TapeOptions(keep_graph=keep_graph, host_waits=not threads, threads=threads),
    )


@pytest.mark.parametrize("threads", [False, True], ids=["one thread", "threads"])
@pytest.mark.parametrize("block", BLOCKS)
def test_what_a_tape_says_is_safe(block: str, threads: bool) -> None:
    found = [
        tapes_of(block, pipeline, threads=threads)
        for pipeline in pipelines()
        if not (BLOCKS[block].get("dense") and pipeline.get("layers", 1) == 1)
    ]
    checked = [one for one in found if one is not None]
    assert checked
    for one in checked:
        tapes.check(one, threads=threads)
        assert str(one).count("\n") > len(one.passes[Direction.FORWARD].calls)


SELECTIVE = {
    "norms": RecomputeRequest(input_norm=True, pre_mlp_norm=True),
    "norms and stages": RecomputeRequest(
        input_norm=True, pre_mlp_norm=True, modules=frozenset({"moe_act", "core_attn", "shared_experts"})
    ),
    "stages": RecomputeRequest(pre_mlp_norm=True, modules=frozenset({"mla_up_proj", "moe", "mlp"})),
}
"""What Megatron's ``--recompute-modules`` asks for."""


@pytest.mark.parametrize("request_name", SELECTIVE)
@pytest.mark.parametrize("block", ["everything", "sinkhorn", "context-ring", "recomputed"])
def test_what_is_recomputed_is_in_slots_that_are_safe(block: str, request_name: str) -> None:
    num_checked = 0
    for pipeline in pipelines():
        for threads in (False, True):
            found = tapes_of(block, pipeline, threads=threads, request=SELECTIVE[request_name])
            if found is not None:
                tapes.check(found, threads=threads)
                num_checked += 1
    assert num_checked > 10


def test_every_kind_that_layers_run_has_a_function() -> None:
    """All but those that the runtime runs itself: copies, gradients of weights and reductions."""
    of_layers = [
        kind for kind in ALL_KINDS if not (kind.copies or kind.of_parameters or kind.weights_of is not None)
    ]
    modules = (attention_stages.__name__, moe_stages.__name__)
    assert [kind for kind in of_layers if kind not in FUNCTIONS] == []
    assert [kind for kind in of_layers if kind.own_backward and FUNCTIONS[kind].backward is None] == []
    shipped = {kind for kind, function in FUNCTIONS.items() if function.run.__module__ in modules}
    assert shipped == set(of_layers), "a function of a kind that no schedule names"


def test_nothing_is_compiled_for_a_backward_pass_that_there_is_not() -> None:
    found = tapes_of("plain", {"schedule": "ampipe", "degree": 2}, threads=False, keep_graph=False)
    assert found is not None and found.passes[Direction.BACKWARD].calls == ()
    tapes.check(found, threads=False)
    assert "segment" not in str(found)


def test_what_is_freed_too_early_is_found() -> None:
    found = tapes_of("plain", {"schedule": "ampipe", "degree": 2}, threads=True)
    assert found is not None
    call = next(call for call in found.passes[Direction.FORWARD].calls if str(call.stage) == "attention.0")
    hidden = next(slot for slot, name in enumerate(found.names) if name == "hidden")
    (step,) = call.steps
    step.frees += (hidden,)
    with pytest.raises(AssertionError, match=r"hidden is used in \w+\.1 after it was freed"):
        tapes.check(found, threads=True)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sets(st.integers(0, 30), max_size=4)), max_size=30))
def test_streams_are_safe_in_any_order_of_calls(calls: list[tuple[str, set[int]]]) -> None:
    streams = [stream for stream, _ in calls]
    needs = [[earlier for earlier in others if earlier < number] for number, (_, others) in enumerate(calls)]
    tapes.check_streams(streams, needs, stream_plan(streams, needs))


@pytest.mark.parametrize("change", ["waits", "releases"])
def test_a_wrong_plan_of_streams_is_found(change: str) -> None:
    streams, needs = ["compute", "comm", "compute", "comm"], [(), (0,), (), (2,)]
    plan = stream_plan(streams, needs)
    tapes.check_streams(streams, needs, plan)
    wrong = {"waits": ((), (), (), ()), "releases": ((), (), (1,), ())}[change]
    with pytest.raises(AssertionError, match=r"wait|released"):
        tapes.check_streams(streams, needs, dataclasses.replace(plan, **{change: wrong}))


def test_a_failing_step_says_what_it_was_given() -> None:
    from megatron_ampipe.runtime.executors import SequentialExecutor
    from megatron_ampipe.runtime.recorder import Recorder
    from megatron_ampipe.runtime.segment import BlockParameters
    from megatron_ampipe.runtime.stack_call import PassRun, StackCall

    class State:
        draws = False

    found = tapes_of("plain", {"schedule": "ampipe", "degree": 2}, threads=False)
    assert found is not None
    call = StackCall(
        [State()],  # type: ignore[list-item]
        found,
        PassRun(SequentialExecutor(), Recorder(), numbers=[1]),
        parameters=[BlockParameters((), ())],
        keep_graph=True,
    )
    with pytest.raises(TypeError) as caught:
        call.forward(torch.zeros(ROWS, 1, 4))
    (note,) = caught.value.__notes__
    assert note.startswith("forward pass, call 0: qkv.0: RunStage(hidden[0:32]) -> ")
    assert note.endswith(f"there are hidden [{ROWS}, 1, 4]")
