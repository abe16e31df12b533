"""``ampipe draw --predicted``: a prediction below a recorded run, and refused input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ampipe.cli import main
from megatron_ampipe.files.timeline import PREDICTED, StageSpan, Timeline
from megatron_ampipe.tools import timeline_picture
from megatron_ampipe.tools.draw_command import compare
from tests.unit.test_draw import one_pass, trace

LABELS = {"degree": "2", "schedule": "a$b$"}


def prediction(**labels: str) -> Timeline:
    """The block of :func:`one_pass`, every stage in half the time."""
    spans = one_pass(0, layer=1, direction="forward", iteration=0)
    spans += one_pass(20_000, layer=1, direction="backward", iteration=0)
    halved = [replace(span, begin_us=span.begin_us / 2, end_us=span.end_us / 2) for span in spans]
    return Timeline(0, tuple(halved), {PREDICTED: "a model on a cluster", **LABELS, **labels})


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    for rank in range(2):
        trace(rank).write_chrome(tmp_path / "traces" / f"rank{rank}.trace.json")
    prediction().write_chrome(tmp_path / "traces" / "predicted.json")
    return tmp_path / "traces"


def draw(traces: Path, *words: str) -> int:
    predicted = str(traces / "predicted.json")
    return main(["draw", str(traces), "--predicted", predicted, "--output", str(traces.parent / "p"), *words])


def test_every_rank_is_drawn_with_the_prediction_under_it(
    traces: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(timeline_picture, "draw", lambda shown, **how: asked.update(how, shown=shown))
    assert draw(traces) == 0
    assert [(one.rank, one.is_predicted) for one in asked["shown"]] == [
        (0, False),
        (0, True),
        (1, False),
        (0, True),
    ]
    shown = capsys.readouterr().out
    assert "predicted: 50% of 4.00 ms (a model on a cluster)" in shown
    rows = [line.replace("│", " ").split() for line in shown.splitlines() if "│" in line]
    assert rows == [
        ["forward", "qkv", "0.500", "1.000", "2.00"],
        ["forward", "attention", "2.000", "4.000", "2.00"],
        ["forward", "dispatch", "2.000", "4.000", "2.00"],
        ["forward", "first", "to", "last", "4.000", "8.000", "2.00"],
        ["backward", "qkv", "0.500", "1.000", "2.00"],
        ["backward", "attention", "2.000", "4.000", "2.00"],
        ["backward", "dispatch", "2.000", "4.000", "2.00"],
        ["backward", "first", "to", "last", "4.000", "8.000", "2.00"],
    ]


def figures_of(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are drawn, once for each file; the files are empty."""
    figures: list[Any] = []

    def keep(figure: Any, path: Path, **how: object) -> None:
        figures.append(figure)
        path.touch()

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", keep)
    return figures


def texts_of(figure: Any) -> set[str]:
    lines = [*figure.texts, *(axes.yaxis.label for axes in figure.axes), *figure.legends[0].get_texts()]
    return {line for text in lines for line in text.get_text().split("\n")}


def test_the_picture_names_both_and_aligns_them(traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = figures_of(monkeypatch)
    assert draw(traces) == 0
    assert {"rank 0", "rank 1", "predicted", "layer 2", "layer 1", "50% hidden"} <= texts_of(figures[0])
    # Two directions of four timelines. The longer of the two sets the scale: 8 ms of either direction.
    assert [axes.get_xlim() for axes in figures[0].axes] == [(0, 8)] * 8
    ends = [max(c.get_datalim(axes.transData).x1 for c in axes.collections) for axes in figures[0].axes]
    assert ends == pytest.approx([8, 8, 4, 4] * 2, abs=0.05)


def test_layers_that_share_a_schedule_have_a_strip_each(
    traces: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = prediction(**{"layers that share a schedule": "all"})
    both = replace(one, spans=one.spans + tuple(replace(span, layer=2) for span in one.spans))
    figures = figures_of(monkeypatch)
    timeline_picture.draw([both], targets=[traces / "a.png"], title="")
    texts = texts_of(figures[0])
    assert {"strip: layer 1", "strip: layer 2", "layers 1-2"} <= texts
    both.write_chrome(traces / "predicted.json")
    assert draw(traces) == 2
    assert "can be compared only if layers share no schedule" in capsys.readouterr().err


def test_the_mean_is_over_the_ranks_that_ran_a_direction(capsys: pytest.CaptureFixture[str]) -> None:
    slow = Timeline(1, (StageSpan("compute", "qkv", "forward", 1, 1, 0.0, 3000.0),), LABELS)
    fast = Timeline(0, (StageSpan("compute", "qkv", "backward", 1, 1, 0.0, 9000.0),), LABELS)
    for ran, times in (([slow, fast], ["3.000", "9.000"]), ([slow], ["3.000"])):
        table = compare(prediction(), ran)
        stages, measured = (list(table.columns[index].cells) for index in (1, 3))
        assert [time for stage, time in zip(stages, measured, strict=True) if stage == "qkv"] == times


@pytest.mark.parametrize(
    ("labels", "rule"),
    [
        ({"degree": "4"}, "predicts degree 4, and rank 0 ran 2"),
        ({"schedule": "moe-only"}, "Write it with ampipe plan --stack 1 --trace FILE --trace-of DEGREE"),
    ],
)
def test_a_prediction_of_another_run_is_refused(
    traces: Path, capsys: pytest.CaptureFixture[str], labels: dict[str, str], rule: str
) -> None:
    prediction(**labels).write_chrome(traces / "predicted.json")
    assert draw(traces) == 2
    assert rule in capsys.readouterr().err
    assert sorted(traces.parent.iterdir()) == [traces]


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        # Layer 1 is dense.
        (["--layer", "1"], "than rank 0 recorded: attention.0, attention.1, dispatch.0, dispatch.1"),
        (["--predicted", "{traces}/rank0.trace.json"], "was recorded by a run, not predicted"),
        (["--predicted", "{traces}/absent"], "cannot be read"),
    ],
)
def test_what_does_not_fit_is_refused(
    traces: Path, capsys: pytest.CaptureFixture[str], words: list[str], rule: str
) -> None:
    assert draw(traces, *(word.format(traces=traces) for word in words)) == 2
    assert rule in capsys.readouterr().err
    assert sorted(traces.parent.iterdir()) == [traces]
