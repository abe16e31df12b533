"""Ranks with different clocks and loads always choose the same degree."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.dist.launch import run_workers

RANKS = 4


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_workers("tests.dist.auto_worker", [], world_size=RANKS, folder=tmp_path_factory.mktemp("auto"))


def test_all_ranks_run_the_same_pipelines(reports: list[Any]) -> None:
    for runs in zip(*(report["runs"] for report in reports), strict=True):
        for run in runs[1:]:
            assert run["ran"] == runs[0]["ran"]
            assert run["said"] == runs[0]["said"]


def test_each_rank_alone_would_have_chosen_differently(reports: list[Any]) -> None:
    """Shows that the noise is large enough: with their own measurements, the ranks would disagree."""
    runs = zip(*(report["runs"] for report in reports), strict=True)
    assert any(len({run["alone"] for run in of_ranks}) > 1 for of_ranks in runs)


def test_degree_1_is_megatrons_own_layer_and_timed_like_the_others(reports: list[Any]) -> None:
    for report in reports:
        for run in report["runs"]:
            assert run["megatrons"] == [1]
            assert run["timed"] == [[1, True], [2, True], [4, True], [8, True]]


def test_it_chooses_once_for_each_shape(reports: list[Any]) -> None:
    for run in reports[0]["runs"]:
        said = run["said"]
        assert [line.split(":")[0] for line in said] == [
            "input of 64 rows x 1",
            "input of 64 rows x 1",
            "input of 16 rows x 1",
            "input of 16 rows x 1",
        ], said
        assert {"1:1", "2:2", "4:4", "8:8"} <= set(run["ran"][:26])
        assert set(run["ran"][27:38]) <= {"1:1", "2:2", "1:2", "2:1"}
        # The first iteration of a shape still runs with the previous choice; the next one with its own.
        assert run["ran"][-1] == run["ran"][26]


def test_trials_do_not_change_results(reports: list[Any]) -> None:
    for report in reports:
        assert all(run["difference"] <= 1e-5 for run in report["runs"])


def test_nothing_is_reduced_in_every_iteration_once_a_pipeline_is_chosen(reports: list[Any]) -> None:
    from megatron_ampipe.launch.auto import SHAPE_INTERVAL

    for report in reports:
        planned, tried = report["reduced"]["planned"], report["reduced"]["tried"]
        assert planned == [0, SHAPE_INTERVAL, 2 * SHAPE_INTERVAL]
        # Degrees 1 and 2 of 16 rows are tried at first; those of 32 rows once shapes have been compared.
        chosen = tried.index(tried[-1]) + 1
        assert tried == sorted({*tried}) and chosen < 60
        gaps = [after - before for before, after in itertools.pairwise(tried)]
        assert sorted({*gaps}) == [1, SHAPE_INTERVAL]


def test_ranks_that_read_different_plans_all_stop(reports: list[Any]) -> None:
    for report in reports:
        assert report["refusal"].startswith("rank 3 runs 'degree 4, schedule ampipe' and rank 0 'degree 2")
        assert "Put the file where every rank can read it" in report["refusal"]
