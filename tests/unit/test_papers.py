"""``docs/papers.md``: figures of papers next to ours. ``test_docs.py`` tests that it is up to date."""

import importlib
import re
import shlex
from types import ModuleType
from typing import Any

import pytest

from megatron_ampipe.cli import parse
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.schedule import Pipeline
from megatron_ampipe.tools import bench_command
from megatron_ampipe.tools.measuring import result
from megatron_ampipe.tools.measuring.grid import Case, find_grid, read_grid
from tests.forked import REPOSITORY

MEASURED = REPOSITORY / "docs/measured"
TITLES = ("AMPipe", "MPipeMoE", "FSMoE", "Lancet", "Luffy")


@pytest.fixture
def papers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script of the page."""
    monkeypatch.syspath_prepend(str(MEASURED))
    return importlib.import_module("papers")


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script of what is predicted."""
    monkeypatch.syspath_prepend(str(MEASURED))
    return importlib.import_module("papers_predicted")


@pytest.fixture
def documents(papers: ModuleType) -> dict[str, Any]:
    """All raw files."""
    return importlib.import_module("raw_files").read_all()


def commands(papers: ModuleType) -> list[str]:
    return [part.command for parts in papers.PARTS.values() for part in parts if part.command]


def run_of(command: str) -> dict[str, Any]:
    """A raw file as the command would write it, with made-up figures: enough for the tables."""
    arguments = parse(shlex.split(command)[1:])
    job = bench_command._job(arguments)
    report = {"kernel": "none", "fused_gradients": False}
    cases = []
    for index, variants in enumerate(job.variants):
        of_variants = [
            {
                "wall_s": [1.0 + 0.01 * number, 1.1 + 0.01 * number],
                "backward_s": [0.5, 0.5],
                "wire_bytes": [{}, {}],
                "peak_bytes": 1000 - number,
                "graph_bytes": 0,
                "difference": 0.0,
                "needs": {"forward": {"qkv": []}, "backward": {"qkv": []}},
                "stages": {"forward": {"qkv": [1.0]}, "backward": {"qkv": [1.0]}},
            }
            for number, _ in enumerate(variants)
        ]
        cases.append(result.case_result(job, index, [report | {"variants": of_variants}] * job.num_ranks))
    return {
        "format": result.FORMAT,
        "command": command,
        "grid": arguments.grid,
        "link": job.link.text,
        "ranks": job.num_ranks,
        "device": "cuda",
        "hardware": {"gpu": "a device", "cpu": "a processor"},
        "cases": cases,
    }


def test_every_paper_has_figures_with_their_places_and_says_what_differs(papers: ModuleType) -> None:
    found = papers.load_papers()
    assert tuple(found) == TITLES
    for paper in found.values():
        assert paper["source"] and paper["differs"]
        for figure in paper["reported"]:
            assert re.search(r"figure \d|table \d|section \d|abstract", figure["where"]), figure
            assert figure["what"]


def test_what_is_not_measured_is_named_with_its_command(
    papers: ModuleType, documents: dict[str, Any]
) -> None:
    for parts in papers.PARTS.values():
        for part in parts:
            if part.command:
                text = papers.text_of(part, {})
                assert "Unmeasured" in text and f"```sh\n{part.command}\n```" in text
            else:
                assert papers.text_of(part, documents), part.title


def test_every_command_measures_what_its_table_shows(papers: ModuleType) -> None:
    """Its grid, cases and variants exist, it writes the raw file of its part, and the table can be made."""
    grids = {parse(shlex.split(command)[1:]).grid for command in commands(papers)}
    assert grids == {"paper", "cpu-paper", "paper-layers", "mpipemoe", "fsmoe"}
    for parts in papers.PARTS.values():
        for part in parts:
            if not part.command:
                continue
            name = papers.output_of(part.command)
            assert re.fullmatch(part.files, name), part.title
            assert papers.used_by(name), part.title
            text = papers.text_of(part, {name: run_of(part.command)})
            assert "nmeasured" not in text and f"(measured/results/{name}.json)" in text
            # The first column names the file.
            assert f"\n| [{name}](measured/results/{name}.json) |" in text, part.title


def test_the_page_says_of_every_prediction_that_it_is_one(
    papers: ModuleType, documents: dict[str, Any]
) -> None:
    page = papers.page(documents, "the command")
    for section in re.split(r"^###? ", page, flags=re.M):
        title, _, text = section.partition("\n")
        if "papers-predicted.json" in text:
            assert "predicted" in title, title
        elif "Raw files: " in text:
            assert "predicted" not in title, title


def test_a_changed_prediction_changes_the_page(papers: ModuleType, documents: dict[str, Any]) -> None:
    page = papers.page(documents, "the command")
    for keys in (
        ("ampipe figure 7", "links", "1", "base-16k-b1-c1"),
        ("ampipe table 2", "cases", "medium-24k"),
        ("mpipemoe", "cases", 0, "us"),
        ("lancet", 0, "ways", "ampipe"),
    ):
        place = documents["papers-predicted"]
        for key in keys:
            place = place[key]
        kept = dict(place)
        place.update({name: 2 * value for name, value in place.items() if name in TIMES})
        assert papers.page(documents, "the command") != page, keys
        place.update(kept)
    assert papers.page(documents, "the command") == page


TIMES = ("ampipe 4", "ampipe 2", "S3", "exposed_us")


def test_what_is_exposed_is_what_nothing_hides(predicted: ModuleType) -> None:
    """Without chunks all that is sent, with chunks less; and no more of it than a pass takes longer."""
    (case,) = read_grid(find_grid("paper"), only="base-16k-b1-c4")
    cluster = predicted.slower_links(predicted.cluster_of("ampipe-g5"), 1)
    predictor = Predictor(predicted._block(case, ranks=4), cluster)
    exposed = {
        name: predicted._way(predictor, Pipeline.of(degree, schedule=name), 1)
        for name, degree in {"sequential": 1, "moe-only": 4, "ampipe": 4}.items()
    }
    sent_us = predictor.stock_exchanges().total
    assert exposed["sequential"]["exposed_us"] == pytest.approx(sent_us, rel=0.01)
    assert exposed["ampipe"]["exposed_us"] < exposed["moe-only"]["exposed_us"] < 0.8 * sent_us


def test_slower_links_are_slower_alone(predicted: ModuleType) -> None:
    (case,) = read_grid(find_grid("paper"), only="base-16k-b1-c4")
    times = []
    for factor in (1, 4):
        cluster = predicted.slower_links(predicted.cluster_of("ampipe-g5"), factor)
        predictor = Predictor(predicted._block(case, ranks=4), cluster)
        times.append((predictor.stock_exchanges().total, predictor.stock().total))
    (sent, whole), (slow_sent, slow_whole) = times
    assert slow_sent == pytest.approx(4 * sent)
    assert slow_whole - slow_sent == pytest.approx(whole - sent)


def test_the_bound_of_mpipemoe_is_that_of_its_equations(predicted: ModuleType) -> None:
    """By hand, in units of M: B = 2, H = 4 M, E = 1, n = 2, and M = 1."""
    case = Case(
        name="a", sequence_length=2, batch=1, hidden=1, heads=1, experts=1, topk=1, ffn=4,
        activation="gelu", dtype="fp32",
    )  # fmt: skip
    # Equations 1, 4 and 5: 4 (1 + 8) = 36; 8 + 8 = 16, twice; 2 (0 + 2) = 4, twice.
    assert predicted.equation_6(case, 2) == pytest.approx(8 / 68, abs=1e-4)
