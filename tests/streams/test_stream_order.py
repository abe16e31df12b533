"""No races on a modelled device, in any order of a checked schedule; inserted faults are reported.

docs/gpu.md lists what these tests cannot show.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megatron_ampipe.plan.stage_costs import host_calls
from megatron_ampipe.schedule import MOE_BLOCK, Direction
from tests.dist.launch import run_workers
from tests.plan_cases import sized_block
from tests.streams import census
from tests.streams.cases import runs
from tests.streams.faults import FAULTS

PROCESSES = 2
PAGE = Path(__file__).resolve().parents[2] / "docs/gpu.md"


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The reports of both processes, each with half of the runs."""
    return run_workers(
        "tests.streams.worker", [], world_size=PROCESSES, folder=tmp_path_factory.mktemp("streams")
    )


def test_there_are_no_races(reports: list[dict[str, Any]]) -> None:
    found = {name: run for report in reports for name, run in report["runs"].items()}
    assert found.keys() == {run.name for run in runs()}
    assert {name: run["error"] for name, run in found.items() if "error" in run} == {}
    assert {name: run["races"] for name, run in found.items() if run["races"]} == {}
    # A run in which nothing was tracked would prove nothing.
    assert min(run["operations"] for run in found.values()) > 50


def test_the_host_does_not_wait_when_a_layer_runs_again(reports: list[dict[str, Any]]) -> None:
    waits = [
        run["waits"]
        for report in reports
        for name, run in report["runs"].items()
        if name.startswith(("recomputed-stack", "parity-stack-recompute-capacity"))
    ]
    assert len(waits) == 8
    assert all(any(place.startswith("forward dispatch") for place in places) for places in waits)
    assert not any(place.startswith("backward") for places in waits for place in places)


# What is kept, or sent once, is counted, and the count is not waited for where rows are prepared.
COUNTED = ("capacity", "parity-capacity", "parity-ranks", "parity-nodes", "parity-2dh", "random-nodes")


def test_the_host_waits_for_nothing_but_counts(reports: list[dict[str, Any]]) -> None:
    waits = {
        # In its first pass on a CPU, Megatron's router moves its weights there.
        name: {*run["wait calls"]} - {"forward route: Tensor.to"}
        for report in reports
        for name, run in report["runs"].items()
        # What condenses tokens compares them.
        if name.startswith(COUNTED) and "condense" not in name
    }
    assert all(any(name.startswith(kind) for name in waits) for kind in COUNTED)
    expected = {"forward dispatch: Event.synchronize"}
    assert {name: calls for name, calls in waits.items() if calls != expected} == {}


@pytest.mark.parametrize("name", FAULTS)
def test_an_inserted_fault_is_reported(name: str, reports: list[dict[str, Any]]) -> None:
    faulty, sound = reports[0]["faults"][name]
    assert any(re.search(FAULTS[name].race, race) for race in faulty), faulty
    assert sound == []


WAITS = {
    # One for each chunk, for the token counts; none in a backward pass.
    "all-gather dispatcher": {"forward expert: Event.synchronize": 4},
}


@pytest.mark.parametrize("name", census.BLOCKS)
def test_the_host_waits_once_per_chunk(name: str, reports: list[dict[str, Any]]) -> None:
    expected = WAITS.get(name, {"forward dispatch: Event.synchronize": 4})
    assert reports[1]["census"][name]["4"]["waits"] == expected


FIRST = {
    "forward qkv": 2,
    "backward qkv": -1,
    "forward attention": -8,
    "backward attention": -5,
    "backward route": -1,
    "forward merge": 1,
}
"""How many calls more the first chunk has: it makes the buffers, and sees no earlier keys."""


@pytest.mark.parametrize(
    ("name", "local_experts"),
    [("1 expert per rank", 1), ("2 experts per rank", 2), ("4 experts per rank", 4)],
)
def test_the_planner_knows_the_calls_of_each_stage(
    name: str, local_experts: int, reports: list[dict[str, Any]]
) -> None:
    block = sized_block(experts=2 * local_experts, expert=2)
    for degree in census.DEGREES:
        counted = reports[1]["census"][name][str(degree)]["calls"]
        table = {
            f"{direction} {kind}": host_calls(kind, direction, block)
            for direction in Direction
            for kind in MOE_BLOCK
            if f"{direction} {kind}" in counted
        }
        assert table.keys() == counted.keys()
        expected = {place: made + FIRST.get(place, 0) / degree for place, made in table.items()}
        wrong = {
            place: (made, expected[place])
            for place, made in counted.items()
            if abs(made - expected[place]) > 0.06 * expected[place]
        }
        assert wrong == {}, "counted, and in plan/stage_costs.py"


def test_the_table_of_calls_in_the_docs_is_up_to_date(reports: list[dict[str, Any]]) -> None:
    table = census.table(reports[1]["census"])
    assert table in PAGE.read_text(encoding="utf-8"), f"python -m tests.streams.census prints it:\n{table}"
