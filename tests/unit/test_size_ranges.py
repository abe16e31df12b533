"""Which sizes of input are tried, and which choice becomes a plan file."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from megatron_ampipe.launch.auto import save_choice
from megatron_ampipe.launch.trials import Choice, SizeRanges
from megatron_ampipe.schedule import Pipeline
from tests.unit.test_plan_made_for import run_of

DEGREES = (1, 2, 4, 8, 16)


def test_degrees_that_do_not_fall_are_found_with_few_trials() -> None:
    """Against trying every size: the same degree for each, and far fewer trials."""
    for seed in range(20):
        chooser = random.Random(seed)
        limits = sorted(chooser.sample(range(1, 2000), len(DEGREES) - 1))

        def best(tokens: int, limits: list[int] = limits) -> int:
            return DEGREES[sum(tokens >= limit for limit in limits)]

        ranges, tried = SizeRanges(), 0
        sizes = chooser.sample(range(1, 2000), 300)
        for tokens in sizes:
            known = ranges.find(tokens, DEGREES)
            if known is None:
                left = ranges.left(tokens, DEGREES)
                tried += len(left)
                assert best(tokens) in left
                ranges.add(tokens, Pipeline.of(best(tokens)))
                continue
            assert known[0] == Pipeline.of(best(tokens))
        assert tried < 0.2 * len(sizes) * len(DEGREES)


def test_a_choice_that_contradicts_the_others_limits_nothing() -> None:
    ranges = SizeRanges()
    ranges.add(100, Pipeline.of(8))
    ranges.add(200, Pipeline.of(2))
    assert ranges.left(150, DEGREES) == DEGREES
    assert ranges.find(150, DEGREES) is None


def test_a_pair_of_degrees_limits_both_ways_and_must_fit_the_rows() -> None:
    ranges = SizeRanges()
    pair = Pipeline.of(2, backward_degree=8)
    ranges.add(100, pair)
    assert ranges.left(50, DEGREES) == (1, 2, 4, 8)
    assert ranges.left(200, DEGREES) == (2, 4, 8, 16)
    ranges.add(200, pair)
    assert ranges.find(150, DEGREES) == (pair, "100 and 200 tokens")
    # As many tokens in more and shorter sequences.
    assert ranges.find(150, (1, 2)) is None


@pytest.mark.parametrize(("rank", "shape"), [("1", (64, 1)), ("0", (32, 1))])
def test_only_the_first_rank_writes_and_only_the_announced_shape(
    rank: str, shape: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "plan.yaml"
    monkeypatch.setenv("RANK", rank)
    save_choice(run_of(), str(file), (64, 1), shape, Choice(Pipeline.of(2), "measured"))
    assert not file.exists()


def test_a_folder_that_cannot_hold_the_plan_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    (tmp_path / "file").write_text("")
    choice = Choice(Pipeline.of(2), "measured")
    save_choice(run_of(), str(tmp_path / "file" / "plan.yaml"), (64, 1), (64, 1), choice)
    assert "AMPipe: a restart chooses again: " in capsys.readouterr().out
