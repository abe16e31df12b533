"""On a modelled device nothing races, in any order of a checked schedule; planted faults are found.

What this cannot show stands in docs/gpu.md.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.dist.launch import run_workers
from tests.streams.cases import runs
from tests.streams.plants import PLANTS

PROCESSES = 2


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of both processes, each with half of the runs."""
    return run_workers(
        "tests.streams.worker", [], world_size=PROCESSES, folder=tmp_path_factory.mktemp("streams")
    )


def test_nothing_races(reports: list[dict[str, Any]]) -> None:
    found = {name: run for report in reports for name, run in report["runs"].items()}
    assert found.keys() == {run.name for run in runs()}
    assert {name: run["error"] for name, run in found.items() if "error" in run} == {}
    assert {name: run["races"] for name, run in found.items() if run["races"]} == {}
    # A run that nothing was seen of proves nothing.
    assert min(run["operations"] for run in found.values()) > 50


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_reported(name: str, reports: list[dict[str, Any]]) -> None:
    planted, sound = reports[0]["planted"][name]
    assert any(re.search(PLANTS[name].race, race) for race in planted), planted
    assert sound == []
