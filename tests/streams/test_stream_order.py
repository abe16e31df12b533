"""No races on a modelled device, in any order of a checked schedule; inserted faults are reported.

docs/gpu.md lists what these tests cannot show.
"""

import contextlib
import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from megatron_ampipe.plan.stage_costs import host_calls
from megatron_ampipe.runtime import tape
from megatron_ampipe.runtime.streams import StreamPlan, stream_plan
from megatron_ampipe.schedule import MOE_BLOCK, Direction, Exchange
from tests.dist.cases import ALLGATHER, AUX, MOE_AGAIN, SHARED, TIGHT
from tests.dist.worker import start_alone
from tests.plan_cases import sized_block
from tests.streams.cases import RANKS, RANKS_OF_NODES, IssueOrder, Run, block, lazy_issue, runs

pytestmark = pytest.mark.ranks(1)
COUNTED = ("capacity", "parity-capacity", "parity-ranks", "parity-nodes", "parity-2dh", "random-nodes")
"""What is kept, or sent once, is counted, and the count is not waited for where rows are prepared."""


@pytest.fixture(autouse=True, scope="module")
def _alone() -> None:
    """Rank 0 of several."""
    torch.distributed.destroy_process_group()
    start_alone(RANKS_OF_NODES, expert_model_parallel_size=RANKS)


def use_expert_ranks(run: Run) -> None:
    """Spread experts and rows over as many ranks as a run says."""
    from megatron.core import parallel_state

    parallel = run.case.parallel or {"expert_model_parallel_size": run.case.world_size}
    tensor = parallel.get("tensor_model_parallel_size", 1)
    sizes = {
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": tensor,
        "tensor_model_parallel_size": tensor,
    } | parallel
    if sizes != {
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
    }:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)


@pytest.mark.parametrize("run", list(runs()), ids=lambda run: run.name)
def test_there_are_no_races(run: Run) -> None:
    from tests.streams.run import run_case

    use_expert_ranks(run)
    options = run._asdict()
    name = options.pop("name")
    found = run_case(**options)
    assert found.races == ()
    # A run in which nothing was tracked would prove nothing.
    assert found.num_operations > 50
    if name.startswith(("recomputed-stack", "parity-stack-recompute-capacity")):
        # The host does not wait when a layer runs again.
        places = {place for place, _ in found.waits}
        assert any(place.startswith("forward dispatch") for place in places)
        assert not any(place.startswith("backward") for place in places)
    # What condenses tokens compares them.
    if name.startswith(COUNTED) and "condense" not in name:
        waits = {f"{place.partition('.')[0]}: {call}" for place, call in found.waits}
        # In its first pass on a CPU, Megatron's router moves its weights there.
        assert waits - {"forward route: Tensor.to"} == {"forward dispatch: Event.synchronize"}


BLOCK = block(degree=4)


class Fault(NamedTuple):
    """A fault, and a regular expression of the race that it causes."""

    insert: Callable[[], contextlib.AbstractContextManager[object]]
    race: str
    issue: IssueOrder | None = None
    """Order in which the host issues the stages; None for the usual one."""
    data_parallel: bool = False
    """Whether the block runs under data parallelism."""


Planned = Callable[[Sequence[str], StreamPlan], StreamPlan]
"""From the stream of each call and the plan to another plan."""


def _never_waits(streams: Sequence[str], plan: StreamPlan) -> StreamPlan:
    """The communication stream does not wait for computation."""
    waits = tuple(
        tuple(one for one in waited if (stream, streams[one]) != ("comm", "compute"))
        for stream, waited in zip(streams, plan.waits, strict=True)
    )
    return dataclasses.replace(plan, waits=waits)


def _drops_computation(streams: Sequence[str], plan: StreamPlan) -> StreamPlan:
    """Keeps the memory that collectives use, but not what computation uses."""
    releases = tuple(
        (*released, *([number - 1] if number and streams[number - 1] == "compute" else []))
        for number, released in enumerate(plan.releases)
    )
    return dataclasses.replace(plan, releases=releases)


def _replaced(change: Planned) -> Callable[[], contextlib.AbstractContextManager[object]]:
    def planned(streams: Sequence[str], needs: Sequence[Sequence[int]]) -> StreamPlan:
        return change(streams, stream_plan(streams, needs))

    return lambda: mock.patch.object(tape, "stream_plan", planned)


def _nodes_of_another_stream() -> contextlib.AbstractContextManager[object]:
    """Build data parallelism on the stream that Megatron chooses."""
    from tests.streams import run

    return mock.patch.object(run, "on_training_stream", lambda construct: construct)


FAULTS = {
    "a missing event": Fault(
        _replaced(_never_waits), r"forward combine\.1: .* reads what forward expert\.1: .* has used"
    ),
    "a dropped hold": Fault(
        _replaced(_drops_computation),
        r"allocated by forward dispatch\.\d: new_empty was released .* not ordered after backward expert\.\d",
        issue=lazy_issue,
    ),
    "accumulation on another stream": Fault(
        _nodes_of_another_stream,
        r"backward expert\.1: a gradient on compute is accumulated on get_model",
        data_parallel=True,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_inserted_fault_is_reported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_ampipe.layers import block_stack
    from megatron_ampipe.runtime.compile import compiled
    from tests.streams.run import run_case

    # The check of every tape (tests/tapes.py) would report three of them before.
    monkeypatch.setattr(block_stack, "compiled", compiled)
    use_expert_ranks(Run(name, BLOCK))
    fault = FAULTS[name]
    again = functools.partial(run_case, BLOCK, issue=fault.issue, data_parallel=fault.data_parallel)
    with fault.insert():
        races = again().races
    assert any(re.search(fault.race, race) for race in races), races
    assert again().races == ()


FIRST = {
    "forward qkv": 2,
    "backward qkv": -1,
    "forward attention": -8,
    "backward attention": -5,
    "backward route": -1,
    "forward merge": 1,
}
"""How many calls more the first chunk has: it makes the buffers, and sees no earlier keys."""
EXPERTS = {"1 expert per rank": 1, "2 experts per rank": 2, "4 experts per rank": 4}


DEGREES = (2, 4, 8)
SEQUENCE_LENGTH = 64
"""Enough tokens for every expert to receive some in every chunk."""
BLOCKS: dict[str, dict[str, Any]] = {
    "1 expert per rank": {},
    "2 experts per rank": {"local_experts": 2},
    "4 experts per rank": {"local_experts": 4},
    "router losses, shared experts": {"model": AUX | SHARED},
    "capacity": {"model": TIGHT},
    "each token once per rank": {
        "local_experts": 2, "exchange": Exchange.RANKS, "model": {"moe_router_topk": 2}
    },
    "recompute of experts": {"model": MOE_AGAIN},
    "all-gather dispatcher": {"local_experts": 2, "model": ALLGATHER},
}  # fmt: skip


def census(name: str) -> dict[int, dict[str, Any]]:
    """By degree the ``calls`` of each stage and the ``waits``."""
    from tests.streams.run import run_case

    found = {}
    for degree in DEGREES:
        case = block(kernel="cpu-flash", sequence_length=SEQUENCE_LENGTH, degree=degree, **BLOCKS[name])
        run = run_case(case, warm=True)
        calls: dict[str, int] = Counter()
        stages = Counter(place.partition(".")[0] for place in run.issued)
        for place, made in run.issued.items():
            calls[place.partition(".")[0]] += sum(made.values())
        found[degree] = {
            "calls": {kind: number / stages[kind] for kind, number in calls.items() if kind},
            "waits": Counter(f"{place.partition('.')[0]}: {call}" for place, call in run.waits),
        }
    return found


@pytest.mark.parametrize("name", BLOCKS)
def test_the_calls_of_the_host_are_as_the_planner_says(name: str) -> None:
    use_expert_ranks(Run(name, BLOCK))
    found = census(name)
    # One wait for each chunk, for the token counts; none in a backward pass.
    place = "expert" if name == "all-gather dispatcher" else "dispatch"
    assert found[4]["waits"] == {f"forward {place}: Event.synchronize": 4}
    if name in EXPERTS:
        block = sized_block(experts=2 * EXPERTS[name], expert=2)
        for degree in DEGREES:
            assert_planned(found[degree]["calls"], degree, block)


def assert_planned(counted: dict[str, float], degree: int, block: Any) -> None:
    """The planner knows the calls of each stage."""
    table = {
        f"{direction} {kind}": host_calls(kind, direction, block)
        for direction in Direction
        for kind in MOE_BLOCK
        if f"{direction} {kind}" in counted
    }
    assert table.keys() == counted.keys()
    expected = {place: made + FIRST.get(place, 0) / degree for place, made in table.items()}
    assert counted == pytest.approx(expected, rel=0.06), "counted, and in plan/stage_costs.py"
