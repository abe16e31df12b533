"""``ampipe draw``: selection of spans, contents of the pictures, predictions, and refused input."""

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ampipe.files.timeline import PREDICTED, StageSpan, Timeline
from megatron_ampipe.tools import timeline_picture
from megatron_ampipe.tools.draw_command import first_pass, number_of_next, usual_iteration
from tests.conftest import Command

PNG = b"\x89PNG\r\n"
LABELS = {"degree": "2", "schedule": "a$b$"}


def one_pass(
    begin_us: float, *, layer: int, direction: str, iteration: int, dense: bool = False
) -> list[StageSpan]:
    """One layer of degree 2: half of each all-to-all is covered. Dense layers do not communicate."""

    def stage(lane: str, name: str, begin: float, end: float) -> StageSpan:
        return StageSpan(lane, name, direction, layer, iteration, begin_us + begin, begin_us + end)

    spans = [stage("compute", "qkv", 0, 1000)]
    if dense:
        return spans
    for chunk in range(2):
        at = 1000 + 4000 * chunk
        spans.append(stage("compute", f"attention.{chunk}", at, at + 2000))
        spans.append(stage("comm", f"dispatch.{chunk}", at + 1000, at + 3000))
    return spans


def trace(rank: int) -> Timeline:
    """Layer 1 is dense, others have experts; two micro-batches an iteration. The second iteration is late."""
    spans: list[StageSpan] = []
    passes = itertools.product((1, 2, 3), range(2), ("forward", "backward"), (1, 2, 3))
    for number, (iteration, _, direction, layer) in enumerate(passes):
        at_us = 1e9 * (rank + 1) + 20_000 * number
        spans += one_pass(at_us, layer=layer, direction=direction, iteration=iteration, dense=layer == 1)
    late = len(spans) * 2 // 3 - 1
    spans[late] = replace(spans[late], end_us=spans[late].end_us + 1e6)
    return Timeline(rank, tuple(spans), LABELS)


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    for rank in range(2):
        trace(rank).write_chrome(tmp_path / "traces" / f"rank{rank}.trace.json")
    return tmp_path / "traces"


def test_a_pass_ahead_is_shown_with_the_backward_pass(tmp_path: Path) -> None:
    spans = [
        replace(
            span,
            direction="forward",
            of_next_microbatch=True,
            begin_us=span.begin_us + 500,
            end_us=span.end_us + 500,
        )
        for span in one_pass(0.0, layer=2, direction="backward", iteration=1)
    ]
    both = Timeline(0, tuple(one_pass(0.0, layer=1, direction="backward", iteration=1) + spans), {})
    both.write_chrome(tmp_path / "rank0.trace.json")
    read = Timeline.read_chrome(tmp_path / "rank0.trace.json")
    assert [span.of_next_microbatch for span in read.spans] == [False] * 5 + [True] * 5
    # Layers that run at the same time are drawn together.
    assert {span.layer for span in first_pass(read.spans, 1, None)} == {1, 2}
    assert read.hidden_by["partner"] > 0 < read.hidden_by["other stages"]
    timeline_picture.draw([read], targets=[tmp_path / "a.svg"], title="two micro-batches")
    assert "next micro-batch" in (tmp_path / "a.svg").read_text()


def test_only_the_first_of_passes_with_other_chunks_is_drawn() -> None:
    """The last backward pass has no partner, and is cut."""
    cut = one_pass(0.0, layer=1, direction="backward", iteration=1)
    uncut = [span for span in cut if span.chunk != 1]
    ahead = [
        replace(span, direction="forward", of_next_microbatch=True, begin_us=6000.0, end_us=7000.0)
        for span in uncut
    ]
    # Its second chunk comes first.
    last = [replace(s, begin_us=9e4 - 1e4 * (s.chunk == 1), end_us=1e5) for s in cut]
    spans = sorted([*uncut, *ahead, *last], key=lambda span: span.begin_us)
    assert first_pass(spans, 1, None) == [*uncut, *ahead]
    assert first_pass([span for span in spans if span in last], 1, None) == sorted(
        last, key=lambda span: span.begin_us
    )


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of the picture, which is not drawn."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        timeline_picture, "draw", lambda timelines, **how: asked.update(how, timelines=timelines)
    )
    return asked


def test_default_is_a_typical_iteration_and_the_first_layer_that_communicates(
    traces: Path, drawn: dict[str, Any], ampipe: Command
) -> None:
    shown = ampipe("draw", traces, "--output", traces.parent / "picture").out
    assert "rank 0: 50% of 8.00 ms communication hidden under computation (layer 2)" in shown
    assert [timeline.rank for timeline in drawn["timelines"]] == [0, 1]
    for timeline in drawn["timelines"]:
        assert {(span.layer, span.iteration) for span in timeline.spans} == {(2, 3)}
        # One forward and one backward pass of five stages, though the iteration had two micro-batches.
        assert [span.direction for span in timeline.spans] == ["forward"] * 5 + ["backward"] * 5
    for word in ("degree 2", "schedule a$b$", "iteration 3"):
        assert word in drawn["title"]
    assert usual_iteration([trace(0)], ()) is None


def stacks(rank: int) -> Timeline:
    """A dense layer, then two stacks of layers 2 to 4 and 5 to 6, whose layers begin before others end."""
    spans: list[StageSpan] = []
    begins = {1: 0, 2: 2_000, 3: 6_000, 4: 10_000, 5: 30_000, 6: 34_000}
    for (direction, origin_us), (layer, at_us) in itertools.product(
        (("forward", 1e6), ("backward", 2e6)), begins.items()
    ):
        spans += one_pass(origin_us + at_us, layer=layer, direction=direction, iteration=1, dense=layer == 1)
    # Dense layers of a stack transfer rows of tensor-parallel ranks.
    spans.append(StageSpan("comm.tensor", "gather-rows", "forward", 1, 1, 1e6, 1e6 + 500))
    return Timeline(rank, tuple(spans), {"degree": "2", "stack": "3"})


@pytest.mark.parametrize(
    ("words", "layers"), [([], {2, 3, 4}), (["--layer", "3"], {2, 3, 4}), (["--layer", "6"], {5, 6})]
)
def test_layers_that_share_a_schedule_are_drawn_together(
    tmp_path: Path, drawn: dict[str, Any], ampipe: Command, words: list[str], layers: set[int]
) -> None:
    stacks(0).write_chrome(tmp_path / "rank0.trace.json")
    shown = ampipe("draw", tmp_path, "--output", tmp_path / "p", *words).out
    (timeline,) = drawn["timelines"]
    assert {span.layer for span in timeline.spans} == layers
    assert {span.direction for span in timeline.spans} == {"forward", "backward"}
    assert f"(layers {min(layers)}-{max(layers)})" in shown


def test_pictures_are_written_whole_and_the_same_each_time(
    traces: Path, tmp_path: Path, ampipe: Command
) -> None:
    def pictures() -> tuple[bytes, bytes]:
        ampipe("draw", traces, "--output", tmp_path / "out" / "run.v1")
        assert {path.name for path in (tmp_path / "out").iterdir()} == {"run.v1.svg", "run.v1.png"}
        return (tmp_path / "out" / "run.v1.svg").read_bytes(), (tmp_path / "out" / "run.v1.png").read_bytes()

    svg, png = pictures()
    assert png.startswith(PNG)
    # Text is drawn as outlines; matplotlib writes each text into a comment next to them.
    texts = [line for text in re.findall(r"<!-- (.*?) -->", svg.decode(), re.S) for line in text.split("\n")]
    expected = "rank 0, rank 1, compute, comm, chunk 0, chunk 1, whole block, 50% hidden"
    assert set(expected.split(", ")) <= set(texts)
    assert (svg, png) == pictures()


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["{traces}", "--output", "{here}/p.svg"], "is no name to which .svg and .png can be added"),
        (["{traces}", "--output", "{here}/p", "--iteration", "9"], "traces hold [1, 2, 3] and [1, 2, 3]"),
        (["{traces}", "--output", "{here}/p", "--layer", "9"], "traces hold [1, 2, 3] and [1, 2, 3]"),
        (["{here}/absent", "--output", "{here}/p"], "cannot be read"),
        (["{here}", "--output", "{here}/p"], "holds no rank*.trace.json"),
        (["{traces}", "{here}/copy.json", "--output", "{here}/p"], "is a second trace of rank 0"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    traces: Path, tmp_path: Path, ampipe: Command, words: list[str], rule: str
) -> None:
    (tmp_path / "copy.json").write_bytes((traces / "rank0.trace.json").read_bytes())
    places = {"traces": traces, "here": tmp_path}
    before = sorted(tmp_path.rglob("*"))
    said = ampipe("draw", *(word.format(**places) for word in words), code=2)
    assert rule.format(**places) in said.err
    assert sorted(tmp_path.rglob("*")) == before


def test_letters_of_narrow_bars_differ() -> None:
    kinds = ["expert", "expand", "dispatch", "combine", "counts", "rebuild", "redispatch", "route", "reduce"]
    letters = timeline_picture.letters_of(kinds)
    assert len(set(letters.values())) == len(kinds)
    assert letters["dispatch"] == "D" and letters["combine"] == "C" and letters["counts"] == "#"
    assert (letters["expert"], letters["rebuild"]) == ("Expe", "Reb")


def test_the_begin_of_many_layers_is_drawn(tmp_path: Path) -> None:
    spans = [
        span
        for layer in range(1, 10)
        for span in one_pass(12_000 * layer, layer=layer, direction="forward", iteration=1)
    ]
    timeline_picture.draw([Timeline(0, tuple(spans), {})], targets=[tmp_path / "a.svg"], title="nine")
    picture = (tmp_path / "a.svg").read_text()
    assert "forward of micro-batch 1  the first 44 of 104 ms" in picture and "layers 1-9" in picture


# Another trace above


def megatron(*, layers: int = 1, **labels: str) -> Timeline:
    """The predicted layers of Megatron, every stage twice as long as in :func:`one_pass`."""
    spans = [
        span
        for place, direction in enumerate(("forward", "backward"))
        for layer in range(1, layers + 1)
        for span in one_pass(1e5 * place + 12_000 * layer, layer=layer, direction=direction, iteration=0)
    ]
    doubled = [replace(span, begin_us=2 * span.begin_us, end_us=2 * span.end_us) for span in spans]
    return Timeline(0, tuple(doubled), {PREDICTED: "a model", "degree": "1", "schedule": "ampipe", **labels})


def test_megatrons_layers_are_drawn_above(traces: Path, drawn: dict[str, Any], ampipe: Command) -> None:
    above, output = traces / "megatron.json", traces.parent / "p"
    megatron().write_chrome(above)
    shown = ampipe("draw", traces, "--above", above, "--output", output).out
    first, *others = drawn["timelines"]
    assert [one.rank for one in others] == [0, 1] and drawn["next_microbatch"] is None
    assert first.labels["name"] == "Megatron" and {span.layer for span in first.spans} == {2}
    assert "rank 0: 16.00 ms, Megatron 32.00 ms, 2.00 times as fast (one micro-batch)" in shown
    # A run with chunks is no one's stock layer; its own layers and iteration are found.
    (traces / "run").mkdir()
    trace(0).write_chrome(traces / "run" / "rank0.trace.json")
    ampipe("draw", traces, "--above", traces / "run" / "rank0.trace.json", "--output", output)
    (first, *_) = drawn["timelines"]
    assert first.labels["name"] == "above"
    assert {(span.layer, span.iteration) for span in first.spans} == {(2, 3)}


def test_other_layers_above_are_refused(traces: Path, ampipe: Command) -> None:
    above = traces / "megatron.json"
    megatron(layers=2).write_chrome(above)
    said = ampipe("draw", traces, "--above", above, "--output", traces.parent / "p", code=2).err
    assert "holds 2 of the 1 layers that are drawn; write it with ampipe plan --stack 1 --trace" in said


def test_the_micro_batch_that_runs_ahead_is_numbered() -> None:
    def ahead(begin_us: float, layer: int = 1) -> list[StageSpan]:
        spans = one_pass(begin_us, layer=layer, direction="forward", iteration=1)
        return [replace(span, of_next_microbatch=True) for span in spans]

    alone = [
        span
        for number in range(3)
        for span in one_pass(2e4 * number, layer=1, direction="forward", iteration=1)
    ]
    backward = one_pass(9e4, layer=1, direction="backward", iteration=1)
    others = [*ahead(8e4, layer=2), *ahead(3e5)]
    spans = sorted([*alone, *backward, *ahead(9e4), *others], key=lambda span: span.begin_us)
    whole = Timeline(0, tuple(spans), {})
    assert number_of_next(whole, replace(whole, spans=tuple([*backward, *ahead(9e4)]))) == 4
    assert number_of_next(whole, replace(whole, spans=tuple(backward))) is None
    joint = tuple([*backward, *ahead(9e4)])
    assert number_of_next(Timeline(0, joint), Timeline(0, joint)) == 2, "a prediction"


# Predictions


def prediction(**labels: str) -> Timeline:
    """The block of :func:`one_pass`, every stage in half the time."""
    spans = one_pass(0, layer=1, direction="forward", iteration=0)
    spans += one_pass(20_000, layer=1, direction="backward", iteration=0)
    halved = [replace(span, begin_us=span.begin_us / 2, end_us=span.end_us / 2) for span in spans]
    return Timeline(0, tuple(halved), {PREDICTED: "a model on a cluster", **LABELS, **labels})


def predicted_words(traces: Path, prediction: Timeline) -> list[object]:
    """Arguments of ``ampipe draw`` after the prediction has been written."""
    file = traces / "predicted.json"
    prediction.write_chrome(file)
    return ["draw", traces, "--predicted", file, "--output", traces.parent / "p"]


def test_every_rank_is_drawn_with_the_prediction_under_it(
    traces: Path, drawn: dict[str, Any], ampipe: Command
) -> None:
    shown = ampipe(*predicted_words(traces, prediction())).out
    assert [(one.rank, one.is_predicted) for one in drawn["timelines"]] == [
        *((0, False), (0, True), (1, False), (0, True))
    ]
    assert "predicted: 50% of 4.00 ms (a model on a cluster)" in shown
    rows = [" ".join(line.replace("\u2502", " ").split()) for line in shown.splitlines() if "\u2502" in line]
    kinds = ("qkv 0.500 1.000", "attention 2.000 4.000", "dispatch 2.000 4.000", "first to last 4.000 8.000")
    assert rows == [f"{direction} {kind} 2.00" for direction in ("forward", "backward") for kind in kinds]


def predicted_layers(*dense: bool) -> Timeline:
    """Layers from 1 that share a schedule, every stage in half the time."""
    spans: list[StageSpan] = []
    for origin_us, direction in ((0, "forward"), (50_000, "backward")):
        for number, without_experts in enumerate(dense, 1):
            begin_us = origin_us + 2_000 * number
            spans += one_pass(begin_us, layer=number, direction=direction, iteration=0, dense=without_experts)
    halved = [replace(span, begin_us=span.begin_us / 2, end_us=span.end_us / 2) for span in spans]
    return Timeline(0, tuple(halved), {PREDICTED: "a model on a cluster", "degree": "2", "stack": "all"})


def test_layers_that_share_a_schedule_are_compared_in_order(
    tmp_path: Path, drawn: dict[str, Any], ampipe: Command
) -> None:
    """A prediction counts its layers from 1; the run's are 2 to 4."""
    stacks(0).write_chrome(tmp_path / "rank0.trace.json")
    shown = ampipe(*predicted_words(tmp_path, predicted_layers(False, False, False))).out
    measured, predicted = drawn["timelines"]
    assert predicted.is_predicted and not measured.is_predicted
    assert {span.layer for span in predicted.spans} == {span.layer for span in measured.spans} == {2, 3, 4}
    assert "3 layers with one schedule, one micro-batch" in " ".join(shown.split())
    rows = [" ".join(line.replace("\u2502", " ").split()) for line in shown.splitlines() if "\u2502" in line]
    kinds = ("qkv 1.500 3.000", "attention 6.000 12.000", "dispatch 6.000 12.000")
    assert rows[:3] == [f"forward {kind} 2.00" for kind in kinds]
    assert [row.split()[0] for row in rows[4:]] == ["backward"] * 4


@pytest.mark.parametrize(
    ("dense", "rule"),
    [
        ((False, False), "predicts a schedule of 2 layers, and 3 of rank 0 share one"),
        # The same names, but one of the layers has no experts.
        ((False, True, False), "has other stages forward than rank 0 recorded: attention.0, attention.1"),
    ],
)
def test_other_layers_than_those_of_the_run_are_refused(
    tmp_path: Path, ampipe: Command, dense: tuple[bool, ...], rule: str
) -> None:
    stacks(0).write_chrome(tmp_path / "rank0.trace.json")
    said = ampipe(*predicted_words(tmp_path, predicted_layers(*dense)), code=2).err
    assert rule in said
    assert "Write it with ampipe plan --stack 3 --trace FILE --trace-of 2, for a model file" in said


@pytest.mark.parametrize(
    ("predicted", "words", "rule"),
    [
        (prediction(degree="4"), [], "predicts degree 4, and rank 0 ran 2"),
        (prediction(schedule="moe-only"), [], "Write it with ampipe plan --stack 1 --trace FILE --trace-of"),
        # Layer 1 is dense.
        (prediction(), ["--layer", "1"], "than rank 0 recorded: attention.0, attention.1, dispatch.0"),
        (trace(0), [], "was recorded by a run, not predicted"),
    ],
    ids=["degree", "schedule", "stages", "recorded"],
)
def test_what_is_no_prediction_of_the_run_is_refused(
    traces: Path, ampipe: Command, predicted: Timeline, words: list[str], rule: str
) -> None:
    assert rule in ampipe(*predicted_words(traces, predicted), *words, code=2).err
    assert sorted(traces.parent.iterdir()) == [traces]
