"""Schedules and plans equal the golden texts byte by byte; predicted figures to 1e-9."""

import functools
import json
from typing import Any

import pytest

from tests.golden.write import BLOCKS, FOLDER, PLANS, plans, schedules

REMEDY = "python -m tests.golden.write rewrites the files, if the change is wanted"


def test_schedules() -> None:
    made = dict(schedules())
    stored = {f"schedules/{path.name}" for path in (FOLDER / "schedules").iterdir()}
    assert stored == set(made) and len(made) == len(BLOCKS)
    assert sum(text.count("== ") for text in made.values()) > 500
    for name, text in made.items():
        for line, (found, expected) in enumerate(
            zip(text.splitlines(), (FOLDER / name).read_text(encoding="utf-8").splitlines(), strict=True), 1
        ):
            assert found == expected, f"{name}:{line}; {REMEDY}"


def test_plans() -> None:
    made = dict(plans())
    assert {f"plans/{path.name}" for path in (FOLDER / "plans").iterdir()} == set(made)
    assert len(made) == len(PLANS)

    def nearly(digits: str) -> Any:
        return pytest.approx(float(digits), rel=1e-9, abs=1e-12)

    for name, text in made.items():
        # Keys and their values as pairs, in their order.
        in_order = functools.partial(json.loads, object_pairs_hook=list)
        expected = in_order((FOLDER / name).read_text(encoding="utf-8"), parse_float=nearly)
        assert in_order(text) == expected, f"{name}; {REMEDY}"
