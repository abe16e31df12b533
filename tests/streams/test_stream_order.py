"""No races on a modelled device, in any order of a checked schedule; inserted faults are reported.

docs/gpu.md lists what these tests cannot show.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch

from megatron_ampipe.plan.stage_costs import host_calls
from megatron_ampipe.schedule import MOE_BLOCK, Direction
from tests.dist.worker import start_alone
from tests.plan_cases import sized_block
from tests.streams import census
from tests.streams.cases import RANKS, RANKS_OF_NODES, Run, runs
from tests.streams.faults import BLOCK, FAULTS

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

    sizes = {
        "expert_model_parallel_size": run.case.world_size,
        "expert_tensor_parallel_size": 1,
        "tensor_model_parallel_size": 1,
    } | run.case.parallel
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


@pytest.mark.parametrize("name", census.BLOCKS)
def test_the_calls_of_the_host_are_as_the_planner_says(name: str) -> None:
    use_expert_ranks(Run(name, BLOCK))
    found = census.census(name)
    # One wait for each chunk, for the token counts; none in a backward pass.
    place = "expert" if name == "all-gather dispatcher" else "dispatch"
    assert found[4]["waits"] == {f"forward {place}: Event.synchronize": 4}
    if name in EXPERTS:
        block = sized_block(experts=2 * EXPERTS[name], expert=2)
        for degree in census.DEGREES:
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
