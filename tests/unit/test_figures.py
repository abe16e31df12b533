"""``docs/figures.md`` and the table of the README are what ``docs/measured/figures.py`` writes."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures", ROOT / "docs/measured/figures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(figures: ModuleType) -> None:
    documents = figures.read_all()
    assert figures.page(documents) == (ROOT / "docs/figures.md").read_text(), f"run {figures.COMMAND}"


def test_the_table_of_the_readme_is_up_to_date(figures: ModuleType) -> None:
    text = (ROOT / "README.md").read_text()
    assert figures.with_summary(text, figures.read_all()) == text, f"run {figures.COMMAND}"


def test_a_page_refers_to_every_claim(figures: ModuleType) -> None:
    for title, (_, page, _) in figures.CLAIMS.items():
        linked = re.findall(r"figures\.md#([\w-]+)", (ROOT / "docs" / page).read_text())
        assert title.lower().replace(" ", "-") in linked, f"{page} has no link to {title}"


def test_a_raw_file_of_no_claim_is_an_error(figures: ModuleType) -> None:
    with pytest.raises(ValueError, match="stray"):
        figures.page({**figures.read_all(), "stray": {}})


def test_the_readme_has_the_fastest_row_of_each_case_with_a_control(figures: ModuleType) -> None:
    document = next(found for name, found in figures.read_all().items() if name.startswith("cpu-small-"))
    [fastest, *_] = sorted(document["cases"][0]["rows"], key=lambda row: row["ms"])
    case = {**document["cases"][0], "control": {"spread": 0.0345}}
    case["rows"] = [{**row, "difference_seen": row is not fastest} for row in case["rows"]]
    slower = {**case, "rows": [{**row, "ms": row["ms"] + 100} for row in case["rows"]]}
    runs = {f"cpu-small-{name}": {**document, "cases": [run]} for name, run in (("x", case), ("y", slower))}
    text = f"{figures.BEGIN}{figures.END}"
    [line] = [row for row in figures.with_summary(text, runs).splitlines() if row.startswith("| block")]
    times = f"| {fastest['ms']:.0f} to {fastest['ms'] + 100:.0f} |"
    cells = ["| 2 |", times, f"{fastest['speedup']:.2f}x, no difference seen", "| 3.5% |"]
    assert all(cell in line for cell in cells), line


def test_a_file_says_where_it_comes_from(figures: ModuleType) -> None:
    cpus = {cpu: {"hardware": {"cpu": cpu, "usable_cores": 2, "load_average": [1.5, 0, 0]}} for cpu in "AB"}
    document = {"command": ["ampipe", "x", "--degree", "2", "--json", "x.json"], "runs": cpus}
    document |= {"versions": {"commit": "12ab-dirty"}}
    assert figures.provenance(document) == ["12ab (modified)", "1.5 to 1.5"]
    assert figures.command_of(document) == ["ampipe x", "--degree 2"]
    assert figures.provenance({}) == ["not stored", ""]
