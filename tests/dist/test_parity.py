"""Compares every schedule, executor and feature with a stock Megatron layer with the same weights (fp32).

Output, input gradient, all parameter gradients, router buffers and logged losses, to 1e-5 relative.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.dist.cases import MEMORY, PARITY, SCATTERED, Case
from tests.dist.launch import run_workers
from tests.golden.write import FOLDER

TOLERANCE = 1e-5
WRITES = os.environ.get("AMPIPE_TEST_WRITE") == "1"
"""Whether the golden collectives are written instead of compared."""

PER_LAUNCH = 80
"""Cases that share processes."""


class Reports:
    """The ranks' reports of the selected cases, of which several share one launch of processes."""

    def __init__(self, folders: pytest.TempPathFactory, selected: set[str]) -> None:
        self._folders, self._reports = folders, dict[str, list[Any]]()
        self._launches = dict[str, list[str]]()
        for world_size in {case.world_size for case in PARITY}:
            cases = [case for case in PARITY if case.world_size == world_size and case.name in selected]
            # New process groups take longer than most cases.
            names = [case.name for case in sorted(cases, key=lambda case: str(case.parallel))]
            for shared in (names[i : i + PER_LAUNCH] for i in range(0, len(names), PER_LAUNCH)):
                self._launches |= dict.fromkeys(shared, shared)

    def __getitem__(self, case: Case) -> list[Any]:
        """What each rank reported of a case's launch, by names of cases."""
        if case.name not in self._reports:
            shared = self._launches[case.name]
            reports = run_workers(
                "tests.dist.parity_worker",
                shared,
                world_size=case.world_size,
                folder=self._folders.mktemp(f"parity{case.world_size}"),
            )
            self._reports |= dict.fromkeys(shared, reports)
        return self._reports[case.name]


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    parameters = [getattr(item, "callspec", None) for item in request.session.items]
    cases = [one.params.get("case") for one in parameters if one is not None]
    return Reports(tmp_path_factory, {case.name for case in cases if isinstance(case, Case)})


@pytest.mark.parametrize("case", PARITY, ids=lambda case: case.name)
def test_equals_stock(case: Case, reports: Reports) -> None:
    for rank, results in enumerate(reports[case]):
        result = results[case.name]
        assert "error" not in result, f"rank {rank}:\n{result['error']}"
        assert result["same state_dict"]
        stock = case.pipeline.is_stock
        assert result["classes"] == ["TransformerLayer" if stock else "AMPipeTransformerLayer"]
        wrong = {name: value for name, value in result["differences"].items() if not value <= TOLERANCE}
        assert not wrong, f"rank {rank} differs from stock: {wrong}"


@pytest.fixture(scope="module")
def stored_collectives() -> Iterator[dict[str, Any]]:
    """By case, what :func:`tests.dist.parity_worker.collectives` found; rewritten at the end if asked for."""
    path = FOLDER / "collectives.json"
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    yield stored
    if WRITES:
        of_cases = {name: stored[name] for name in sorted(stored) if name in {case.name for case in PARITY}}
        path.write_text(json.dumps(of_cases, indent=1) + "\n", encoding="utf-8")


@pytest.mark.parametrize(
    "case", [case for case in PARITY if case.executor == "thread"], ids=lambda case: case.name
)
def test_collectives_have_the_known_order_on_every_rank(
    case: Case, reports: Reports, stored_collectives: dict[str, Any]
) -> None:
    found = [results[case.name]["collectives"] for results in reports[case]]
    if WRITES:
        stored_collectives[case.name] = found[0]
    assert found == [stored_collectives[case.name]] * case.world_size


@pytest.mark.parametrize("case", PARITY, ids=lambda case: case.name)
def test_modules_are_called_before_their_parameters_are_read(case: Case, reports: Reports) -> None:
    """Megatron's forward pre-hooks wait for the parameters of their module (``--overlap-param-gather``)."""
    for results in reports[case]:
        assert_called_before_read(results[case.name]["parameter reads"])


def assert_called_before_read(found: dict[str, Any]) -> None:
    """Also checks that all parameters are used; otherwise nothing would have been watched."""
    # Norms, QKV, output projection, router, and the two linear layers of an expert.
    assert found["watched"] >= 7
    assert found["early"] == {}, "read before the pre-hook of its module"
    assert found["never entered"] == [], "a hook that never runs leaves an all-gather unfinished"
    assert found["never read"] == []


@pytest.mark.parametrize("case", [case for case in PARITY if case.only_losses], ids=lambda case: case.name)
def test_router_losses_alone_give_the_router_a_gradient(case: Case, reports: Reports) -> None:
    """The comparison above would also pass with zeros: with only the losses, this gradient is not zero."""
    for results in reports[case]:
        largest = results[case.name]["largest"]
        routers = [value for name, value in largest.items() if name.endswith("mlp.router.weight")]
        assert len(routers) == case.layers.count("m") and min(routers) > 1e-6


@pytest.mark.parametrize("case", [*SCATTERED, *MEMORY], ids=lambda case: case.name)
def test_rows_in_stages_and_memory_strategies_change_no_bit(case: Case, reports: Reports) -> None:
    """Compared with linear layers that exchange the rows inside, and with experts that keep everything."""
    for results in reports[case]:
        assert results[case.name]["changed"] == []
