"""Timelines: the file format, and files that are not traces. Golden plans have sums and shares of them."""

import json
from pathlib import Path

import pytest

from megatron_ampipe.errors import BadInput
from megatron_ampipe.files.timeline import Communication, StageSpan, Timeline, summary_of
from megatron_ampipe.schedule import stage_kind
from megatron_ampipe.schedule.stage_kind import Lane


def span(lane: str, begin_us: float, end_us: float, stage: str = "attention.0") -> StageSpan:
    return StageSpan(lane, stage, "forward", 1, 1, begin_us, end_us)


def test_copies_are_no_communication_and_hide_none() -> None:
    transfers = span("comm", 6.0, 10.0), span("comm", 0.0, 8.0)
    timeline = Timeline(0, (span("copy", 5.0, 20.0), *transfers, span("compute", 8.0, 12.0)))
    assert (timeline.communication_us, timeline.hidden_us, timeline.hidden_share) == (10.0, 2.0, 0.2)


def test_the_figures_of_a_comparison_are_medians_over_iterations() -> None:
    of_each = [Communication(10.0, 0.5), Communication(30.0, 0.125), Communication(14.0, 0.75)]
    assert summary_of(of_each) == "communication per iteration (ms): 14.00 | under computation: 50.0%"
    transfers = span("comm", 6000.0, 10_000.0), span("compute", 9000.0, 12_000.0)
    assert Communication.of(Timeline(0, transfers)) == Communication(4.0, 0.25)


def test_the_file_format_round_trips(tmp_path: Path) -> None:
    lanes = [lane.name for lane in vars(stage_kind).values() if isinstance(lane, Lane)]
    assert {"comm.intra", "comm.tensor"} <= {*lanes}
    last = StageSpan("comm", "combine.1", "backward", 3, 7, 11.0, 11.0, of_repeat=True)
    timeline = Timeline(
        5, (*(span(lane, 10.5, 20.25) for lane in lanes), last), {"degree": "4", "schedule": "ampipe"}
    )
    timeline.write_chrome(tmp_path / "deep" / "rank5.trace.json")
    assert Timeline.read_chrome(tmp_path / "deep" / "rank5.trace.json") == timeline
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["rank5.trace.json"]


def event(**changes: object) -> dict[str, object]:
    good: dict[str, object] = {
        "name": "qkv", "cat": "forward", "ph": "X", "ts": 1, "dur": 2, "tid": "compute",
        "args": {"layer": 1, "iteration": 1},
    }  # fmt: skip
    return {**good, **changes}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        "\ud800",
        json.dumps({"otherData": {"rank": "0"}, "traceEvents": ["X"]}),
        *(
            json.dumps({"otherData": {"rank": "0"}, "traceEvents": [bad]})
            for bad in (event(dur=-1), event(ts=float("nan")), event(cat="sideways"), event(args=None))
        ),
    ],
)
def test_a_file_that_is_not_a_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rank0.trace.json"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(BadInput, match="is not a trace written by AMPipe"):
        Timeline.read_chrome(path)
