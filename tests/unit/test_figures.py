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
