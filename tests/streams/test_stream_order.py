"""No races on a modelled device, in any order of a checked schedule; inserted faults are reported.

docs/gpu.md lists what these tests cannot show.
"""

import itertools
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ampipe.plan.stage_costs import host_calls
from megatron_ampipe.schedule import MOE_BLOCK, Direction, Exchange
from tests.dist.cases import ALLGATHER, AUX, MOE_AGAIN, SHARED, TIGHT
from tests.dist.worker import start_alone
from tests.plan_cases import sized_block
from tests.streams.cases import RANKS, RANKS_OF_NODES, Run, block, lazy_issue, runs
from tests.streams.model import ModelStream

pytestmark = pytest.mark.ranks(1)
COUNTED = ("capacity", "parity-capacity", "parity-ranks", "parity-nodes", "parity-2dh", "nodes")
"""What is kept, or sent once, is counted, and the count is not waited for where rows are prepared."""


@pytest.fixture(autouse=True, scope="module")
def _alone() -> None:
    """Rank 0 of several."""
    torch.distributed.destroy_process_group()
    start_alone(RANKS_OF_NODES, expert_model_parallel_size=RANKS)


@pytest.mark.parametrize("run", list(runs()), ids=lambda run: run.name)
def test_there_are_no_races(run: Run) -> None:
    from tests.streams.run import run_case

    found = run_case(run)
    assert found.races == ()
    # A run in which nothing was tracked would prove nothing.
    assert found.num_operations > 50
    if run.name.startswith(("recomputed-stack", "parity-stack-recompute-capacity")):
        # The host does not wait when a layer runs again.
        places = {place for place, _ in found.waits}
        assert any(place.startswith("forward dispatch") for place in places)
        assert not any(place.startswith("backward") for place in places)
    # What condenses tokens compares them.
    if run.name.startswith(COUNTED) and "condense" not in run.name:
        waits = {f"{place.partition('.')[0]}: {call}" for place, call in found.waits}
        # In its first pass on a CPU, Megatron's router moves its weights there.
        assert waits - {"forward route: Tensor.to"} == {"forward dispatch: Event.synchronize"}


BLOCK = block(degree=4)
FAULTS: dict[str, tuple[str, Callable[..., Any], str, dict[str, Any]]] = {
    "a missing event": (
        "tests.streams.model.ModelStream.wait_event", lambda stream, event: None,
        r"forward combine\.1: .* reads what forward expert\.1: .* has used", {},
    ),
    "a dropped hold": (
        "megatron_ampipe.runtime.streams.Crossing.note_use", lambda crossing, tensors: (),
        r"allocated by forward dispatch\.\d: new_empty was released .* not ordered after backward expert\.\d",
        {"issue": lazy_issue},
    ),
    # Data parallelism is built on the stream that Megatron chooses.
    "accumulation on another stream": (
        "tests.streams.run.on_training_stream", lambda construct: construct,
        r"backward expert\.1: a gradient on compute is accumulated on get_model", {"data_parallel": True},
    ),
}  # fmt: skip
"""What is replaced, and by what; a regular expression of the race that it causes; how the block runs."""


@pytest.mark.parametrize("name", FAULTS)
def test_an_inserted_fault_is_reported(name: str) -> None:
    from tests.streams.run import run_case

    replaced, fault, race, options = FAULTS[name]
    run = Run(name, BLOCK, **options)
    with mock.patch(replaced, fault):
        races = run_case(run).races
    assert any(re.search(race, found) for found in races), races
    assert run_case(run).races == ()


def test_collectives_and_counts_have_streams_of_high_priority() -> None:
    from tests.streams.run import run_case

    run_case(Run("streams", BLOCK))
    of_lanes = [stream for stream in ModelStream.made if stream.name.startswith("stream")]
    assert [stream.priority for stream in of_lanes] == [min(ModelStream.priority_range())] * 2


FIRST = {
    "forward qkv": 2,
    "backward qkv": -1,
    "forward attention": -8,
    "backward attention": -5,
    "backward route": -1,
    "forward merge": 1,
}
"""How many calls more the first chunk has: it makes the buffers, and sees no earlier keys."""
SEQUENCE_LENGTH = 64
"""Enough tokens for every expert to receive some in every chunk."""
PLANNED = {f"{number} experts per rank": {"local_experts": number} for number in (1, 2, 4)}
BLOCKS: dict[str, dict[str, Any]] = PLANNED | {
    "router losses, shared experts": {"model": AUX | SHARED},
    "capacity": {"model": TIGHT},
    "each token once per rank": {
        "local_experts": 2, "exchange": Exchange.RANKS, "model": {"moe_router_topk": 2}
    },
    "recompute of experts": {"model": MOE_AGAIN},
    "all-gather dispatcher": {"local_experts": 2, "model": ALLGATHER},
}  # fmt: skip


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("name", BLOCKS)
def test_the_calls_of_the_host_are_as_the_planner_says(name: str, degree: int) -> None:
    from tests.streams.run import run_case

    case = block(kernel="cpu-flash", sequence_length=SEQUENCE_LENGTH, degree=degree, **BLOCKS[name])
    run = run_case(Run(name, case), warm=True)
    # One wait for each chunk, for the token counts; none in a backward pass.
    waits = Counter(f"{place.partition('.')[0]}: {call}" for place, call in run.waits)
    place = "expert" if name == "all-gather dispatcher" else "dispatch"
    assert waits == {f"forward {place}: Event.synchronize": degree}
    if name not in PLANNED:
        return
    of_planner = sized_block(experts=RANKS * PLANNED[name]["local_experts"], expert=RANKS)
    calls: dict[str, list[int]] = defaultdict(list)
    for place, made in run.issued.items():
        if place:
            calls[place.partition(".")[0]].append(sum(made.values()))
    expected = {
        kind: host_calls(of_kind, direction, of_planner) + FIRST.get(kind, 0) / degree
        for direction, of_kind in itertools.product(Direction, MOE_BLOCK)
        if (kind := f"{direction} {of_kind}") in calls
    }
    counted = {kind: statistics.fmean(of_stages) for kind, of_stages in calls.items()}
    assert counted == pytest.approx(expected, rel=0.06), "counted, and in plan/stage_costs.py"
