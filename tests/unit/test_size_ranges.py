"""Which sizes of input are tried, and what a restart knows of earlier trials."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from megatron_ampipe.launch.auto import NAME, KeptChoices
from megatron_ampipe.launch.trials import Choice, SizeRanges
from megatron_ampipe.schedule import Exchange, Pipeline
from megatron_ampipe.schedule.pipeline import AMPipeConfig
from tests.unit.test_plan_made_for import run_of

DEGREES = (1, 2, 4, 8, 16)
GIVEN = Pipeline.of(1, stack=0, memory="rebuild")
CHOSEN = Pipeline.of(4, backward_degree=2, stack=0, memory="rebuild", exchange=Exchange.RANKS)


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


def choices(folder: Path | str, given: Pipeline = GIVEN, **changes: Any) -> KeptChoices:
    run = run_of(**changes)
    run.save = run.load = str(folder)
    config = AMPipeConfig(degree="auto", pipeline=given)
    return KeptChoices(run, config, announced=(64, 1), exchanges=[Exchange.ROWS])


def test_a_restart_reads_what_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "checkpoints"
    kept = choices(folder)
    assert kept.read() == ()
    monkeypatch.setenv("RANK", "1")
    kept.keep((64, 1), Choice(CHOSEN, "measured"))
    assert not folder.exists()
    monkeypatch.setenv("RANK", "0")
    kept.keep((64, 1), Choice(CHOSEN, "measured"))
    kept.keep((32, 2), Choice(Pipeline.of(2, stack=0, memory="rebuild"), "measured"))
    assert list(choices(folder).read()) == [
        ((64, 1), CHOSEN),
        ((32, 2), Pipeline.of(2, stack=0, memory="rebuild")),
    ]


@pytest.mark.parametrize(
    ("changes", "given", "text", "said"),
    [
        ({"hidden_size": 2048}, GIVEN, None, "is for --hidden-size 1024 (this run: 2048)"),
        ({}, Pipeline.of(1), None, "memory rebuild; exchange rows (this run: degree 1, schedule ampipe;"),
        ({}, GIVEN, ("backward_degree: 2", "backward_degree: 3"), "--ampipe-backward-degree 3: must be"),
    ],
)
def test_a_file_for_another_run_is_not_used(
    changes: dict[str, Any],
    given: Pipeline,
    text: tuple[str, str] | None,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    choices(tmp_path).keep((64, 1), Choice(CHOSEN, "measured"))
    if text is not None:
        file = tmp_path / NAME
        assert text[0] in file.read_text()
        file.write_text(file.read_text().replace(*text))
    capsys.readouterr()
    assert choices(tmp_path, given, **changes).read() == ()
    shown = capsys.readouterr().out
    assert shown.startswith("AMPipe: degrees are tried again: ") and said in shown, shown


def test_folders_that_cannot_hold_the_file_do_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = choices("msc://bucket/checkpoints")
    kept.keep((64, 1), Choice(CHOSEN, "measured"))
    assert kept.read() == () and not Path("msc:").exists()
    (tmp_path / "file").write_text("")
    choices(tmp_path / "file").keep((64, 1), Choice(CHOSEN, "measured"))
    assert "AMPipe: a restart chooses again: " in capsys.readouterr().out
