"""Pictures and CSV of ``ampipe bench`` and ``ampipe routing``: what they show, and what is refused."""

import csv
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from megatron_ampipe.plan.recorded_routing import read_routing
from megatron_ampipe.tools import pictures, result_picture, routing_picture
from megatron_ampipe.tools.measuring import result
from tests.conftest import Command
from tests.forked import REPOSITORY
from tests.unit.test_routing import RECORD, eight_experts, written

MEASURED = REPOSITORY / "docs" / "measured" / "results"
OVER_DEGREES, BARS, TRAINING = (
    MEASURED / f"{name}.json"
    for name in ("cpu-small-200mbit", "nodes-50mbit-400mbit", "layers-training-200mbit")
)
ON_GPU = MEASURED / "deepseek-te-h200.json"
BEGINS = {".png": b"\x89PNG\r\n", ".svg": b"<?xml", ".pdf": b"%PDF"}


def figure_of(*sources: Path) -> Figure:
    """The figure of some results, not written."""
    panels = [panel for source in sources for panel in result_picture.panels_of(result.read(source))]
    with pictures.style():
        return result_picture._figure(panels)


def texts_of(svg: Path) -> str:
    """The texts of an SVG file: matplotlib writes each into a comment next to its outlines."""
    return "\n".join(re.findall(r"<!-- (.*?) -->", svg.read_text(), re.S))


# Results


@pytest.mark.parametrize("suffix", pictures.SUFFIXES)
def test_the_suffix_gives_the_format_and_a_picture_is_the_same_each_time(
    suffix: str, tmp_path: Path, ampipe: Command
) -> None:
    target = tmp_path / "new" / f"speedup{suffix}"
    drawn = []
    for _ in range(2):
        assert f"wrote {target}" in ampipe("bench", "--from", OVER_DEGREES, "--plot", target).out
        assert list(target.parent.iterdir()) == [target]
        drawn.append(target.read_bytes())
    assert drawn[0].startswith(BEGINS[suffix])
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            OVER_DEGREES,
            "top1|top2|link 200mbit · 2 ranks|CPU, AMD EPYC, 2 cores|moe-only|ampipe|1.55|"
            "degree: chunks of the sequence|spread of the control",
        ),
        (
            BARS,
            "grid cpu-small|link inter=50mbit,intra=400mbit · 4 ranks, 2 per node|many-top8|6.16|"
            "case, at degree 4|ampipe, exchange ranks|ampipe, exchange nodes|"
            "all-to-all on a CPU: compare variants, not with 1.",
        ),
        (TRAINING, "link 200mbit · 2 ranks · 4 layers · whole training|ampipe, stack 4"),
        (ON_GPU, "link emulated:20GB/s · 8 ranks, all but one emulated|NVIDIA H200|joined"),
    ],
    ids=["degrees", "bars", "training", "gpu"],
)
def test_titles_and_legend_say_what_was_measured(
    source: Path, expected: str, tmp_path: Path, ampipe: Command
) -> None:
    ampipe("bench", "--from", source, "--plot", tmp_path / "a.svg")
    texts = texts_of(tmp_path / "a.svg")
    assert "Speedup over Megatron's layers" in texts
    assert [text for text in expected.split("|") if text not in texts] == []


def test_lines_are_the_speedups_with_their_spread() -> None:
    document = json.loads(OVER_DEGREES.read_text())
    figure = figure_of(OVER_DEGREES)
    for axes, case in zip(figure.axes, document["cases"], strict=True):
        assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "4", "8"]
        assert len(axes.containers) == 2
        for container, schedule in zip(axes.containers, ("moe-only", "ampipe"), strict=True):
            rows = sorted(
                (row for row in case["rows"] if row["schedule"] == schedule), key=lambda row: row["degree"]
            )
            line, _, (whiskers,) = container.lines
            assert list(line.get_ydata()) == [row["speedup"] for row in rows]
            ends = [(low, high) for (_, low), (_, high) in whiskers.get_segments()]
            assert np.allclose(ends, [(row["speedup_p10"], row["speedup_p90"]) for row in rows])
        filled = [path for each in axes.collections for path in each.get_paths() if len(path.vertices) > 2]
        heights = filled[0].vertices[:, 1]
        spread = 1 + case["control"]["spread"]
        assert (heights.min(), heights.max()) == pytest.approx((1 / spread, spread))


def test_bars_are_the_speedups_with_their_spread() -> None:
    (axes,) = figure_of(BARS).axes
    (case,) = json.loads(BARS.read_text())["cases"]
    assert [patch.get_height() for patch in axes.patches] == [row["speedup"] for row in case["rows"]]
    assert axes.get_ylim()[0] == 0
    whiskers = [container.lines[2][0] for container in axes.containers if hasattr(container, "lines")]
    ends = [tuple(each.get_segments()[0][:, 1]) for each in whiskers]
    assert np.allclose(ends, [(row["speedup_p10"], row["speedup_p90"]) for row in case["rows"]])


def test_rows_within_the_noise_are_hollow_or_pale(tmp_path: Path) -> None:
    document = result.read(OVER_DEGREES)
    for row in document["cases"][0]["rows"]:
        row["difference_seen"] = row["schedule"] == "ampipe"
    result.write(document, tmp_path / "a.json")
    first, second, *_ = figure_of(tmp_path / "a.json").axes
    paper = pictures.PAPER
    for axes, hollow in ((first, 3), (second, 0)):
        markers = [line for line in axes.lines if line.get_marker() in result_picture._MARKERS]
        assert sum(line.get_markerfacecolor() == paper for line in markers) == hollow
    # Of one degree: bars.
    for case in document["cases"]:
        case["rows"] = [row for row in case["rows"] if row["degree"] == 2]
    result.write(document, tmp_path / "b.json")
    (axes,) = figure_of(tmp_path / "b.json").axes
    # In the second case, nothing was changed.
    assert [patch.get_alpha() for patch in axes.patches] == [result_picture._PALE, 1.0, 1.0, 1.0]


def test_several_results_are_in_one_picture_and_one_table(tmp_path: Path, ampipe: Command) -> None:
    other, plot, table = MEASURED / "cpu-small-100mbit.json", tmp_path / "a.svg", tmp_path / "a.csv"
    shown = ampipe("bench", "--from", OVER_DEGREES, other, "--plot", plot, "--csv", table).out
    assert f"wrote {table}\nwrote {plot}\n" in shown
    assert {"link 100mbit · 2 ranks", "link 200mbit · 2 ranks"} <= set(texts_of(plot).splitlines())
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    documents = [json.loads(source.read_text()) for source in (OVER_DEGREES, other)]
    expected = [
        (document["link"], case["name"], row)
        for document in documents
        for case in document["cases"]
        for row in (None, case["control"], *case["rows"])
    ]
    assert [(row["link"], row["case"]) for row in rows] == [(link, case) for link, case, _ in expected]
    for found, (_, _, row) in zip(rows, expected, strict=True):
        if row is None:
            assert (found["schedule"], found["speedup"]) == ("stock", "")
            continue
        for name in ("ms", "speedup", "speedup_p10", "speedup_p90", "peak_bytes", "wire_bytes"):
            assert float(found[name]) == row[name]
        assert found["schedule"] == row["schedule"]
        assert found["commit"] and found["hardware"] == "AMD EPYC" and found["ranks"] == "2"


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (
            ["--plot", "{here}/a.jpg"],
            "a.jpg: must end with one of .png, .svg, .pdf, which gives the format. Use",
        ),
        (["--plot", "{here}/a"], "must end with one of .png, .svg, .pdf"),
        (["--plot", "/proc/nope/a.png"], "--plot /proc/nope/a.png: /proc cannot be written to"),
        (["--csv", "{here}"], "is not a regular file"),
        (["--json", "{here}/a.json", "--plot", "{here}/a.png"], "holds one result; give one file to --from"),
        (["--end-to-end"], "--from shows results, and --end-to-end measures one"),
        (["--predict", "dgx-h100"], "--predict is for results of blocks"),
    ],
)
def test_outputs_that_cannot_be_made_are_refused(
    words: list[str], rule: str, tmp_path: Path, ampipe: Command
) -> None:
    words = [word.format(here=tmp_path) for word in words]
    assert rule in ampipe("bench", "--from", TRAINING, TRAINING, *words, code=2).err
    assert not list(tmp_path.iterdir())


def test_a_picture_appears_only_when_it_is_complete(
    tmp_path: Path, ampipe: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def savefig(_: Figure, path: Path, **__: Any) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", savefig)
    target = tmp_path / "a.png"
    target.write_text("earlier")
    said = ampipe("bench", "--from", OVER_DEGREES, "--plot", target, code=3)
    assert "a.png cannot be written (No space left on device)" in said.err
    written(tmp_path / "routing", RECORD)
    ampipe("routing", tmp_path / "routing", "--picture", target, code=3)
    assert target.read_text() == "earlier"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "routing"]


# Routing


def test_the_heat_map_has_the_load_of_every_expert(tmp_path: Path) -> None:
    other = dataclasses.replace(RECORD.layers[0], layer=4, counts=(((8, 0, 0, 0), (0,) * 4), ((0,) * 4,) * 2))
    both = dataclasses.replace(RECORD, layers=(RECORD.layers[0], other))
    nothing = dataclasses.replace(other, counts=(((0,) * 4,) * 2,) * 2)
    later = dataclasses.replace(both, iteration=15, layers=(RECORD.layers[0], nothing))
    routing = read_routing(written(tmp_path, both, later), flag="DIR")
    # Experts of the first layer have 5, 3, 4 and 4 of 16 rows; a layer that sent nothing is even.
    uneven = [1.25, 0.75, 1.0, 1.0]
    loads = np.array([[uneven, uneven], [[4.0, 0.0, 0.0, 0.0], [1.0] * 4]]).transpose(0, 2, 1)
    assert np.allclose(routing_picture.loads_of(routing), loads)
    with pictures.style():
        lines, heat, _ = routing_picture._figure(routing, ranks=2).axes
    (image,) = heat.images
    assert np.allclose(image.get_array(), loads.reshape(8, 2))
    assert [label.get_text() for label in heat.get_yticklabels()] == ["layer 2", "layer 4"]
    assert [label.get_text() for label in heat.get_xticklabels()] == ["5", "15"]
    expert, rank, _ = lines.lines
    assert np.allclose(expert.get_ydata(), [(1.25 + 4) / 2, (1.25 + 1) / 2])
    # Of two ranks, the first has 8 of 16 rows of the first layer, and all 8 of the second.
    assert np.allclose(rank.get_ydata(), [(1 + 2) / 2, 1])


def test_the_command_draws_a_routing(tmp_path: Path, ampipe: Command) -> None:
    eight_experts(tmp_path / "routing")
    target = tmp_path / "a.svg"
    words = ("routing", tmp_path / "routing", "--ranks", 2, "--picture")
    assert f"wrote {target}" in ampipe(*words, target).out
    texts = texts_of(target)
    for text in ("8 experts in each of 1 MoE layers on 2 ranks, 1 recorded iterations", "busiest of 2 ranks",
                 "busiest expert", "layer 1", "experts 0 to 7 of each layer, from the top"):  # fmt: skip
        assert text in texts
    first = target.read_bytes()
    ampipe(*words, target)
    assert target.read_bytes() == first
    error = ampipe(*words, tmp_path / "a.gif", code=2).err
    assert "--picture" in error and "must end with one of .png, .svg, .pdf" in error
    assert not (tmp_path / "a.gif").exists()
