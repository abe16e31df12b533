"""Schedules and plans equal the golden texts byte by byte; predicted figures to 1e-9."""

import json
import math
from typing import Any

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
    for name, text in made.items():
        expected = json.loads((FOLDER / name).read_text(encoding="utf-8"))
        difference = first_difference(expected, json.loads(text))
        assert difference is None, f"{name}: {difference}; {REMEDY}"


def first_difference(expected: Any, found: Any, place: str = "") -> str | None:
    """Where two answers differ, floats by more than 1e-9 of their value; None if nowhere."""
    if isinstance(expected, float) and isinstance(found, float):
        same = math.isclose(expected, found, rel_tol=1e-9, abs_tol=1e-12)
    elif isinstance(expected, dict) and isinstance(found, dict) and list(expected) == list(found):
        parts = (first_difference(expected[key], found[key], f"{place}.{key}") for key in expected)
        return next((part for part in parts if part is not None), None)
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        parts = (first_difference(one, other, f"{place}[{index}]") for index, (one, other) in pairs)
        return next((part for part in parts if part is not None), None)
    else:
        same = type(expected) is type(found) and expected == found
    return None if same else f"{place} was {expected!r}, is {found!r}"
