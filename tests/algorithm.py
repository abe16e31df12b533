"""Writes the first section of docs/design.md: a layer in two chunks, from the code that builds its schedule.

``python -m tests.algorithm`` writes it; ``tests/unit/test_docs.py`` checks that it is up to date, and
``tests/dist/test_gradients.py`` that a pass goes through the functions that the section lists.
"""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from megatron_ampipe.schedule import BlockFeatures, Direction, Schedule, Stage, build, needs_of
from megatron_ampipe.schedule.text import to_text

PAGE = Path(__file__).resolve().parents[1] / "docs" / "design.md"
BEGIN, END = "<!-- begin: python -m tests.algorithm -->\n", "<!-- end -->\n"
DEGREE = 2
FEATURES = BlockFeatures(chunked_qkv=True)
"""Of a layer with nothing special: no tensor or context parallelism, no shared experts, no router losses."""


def written() -> str:
    """The page with the section that there should be now."""
    head, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{section()}\n{END}{tail}"


def section() -> str:
    """The schedule as text, and both passes clock by clock."""
    schedule = build("ampipe", degree=DEGREE, features=FEATURES)
    parts = ["```", to_text(schedule).rstrip(), "```", ""]
    for direction in Direction:
        parts += [f"{direction.value.capitalize()}:", "", *clocks(schedule, direction), ""]
    return "\n".join(parts)


def clocks(schedule: Schedule, direction: Direction) -> Iterator[str]:
    """A table of what each lane runs at each clock, if every stage takes one."""
    begins = begin_clocks(schedule, direction)
    lanes = dict(schedule.program(direction).lanes)
    rows = [
        [next((str(stage) for stage in stages if begins[stage] == clock), "") for stages in lanes.values()]
        for clock in range(max(begins.values()) + 1)
    ]
    yield f"| clock | {' | '.join(lanes)} |"
    yield f"|--:|{'---|' * len(lanes)}"
    for number, row in enumerate(rows, 1):
        yield f"| {number} | {' | '.join(f'`{name}`' if name else '' for name in row)} |"


def begin_clocks(schedule: Schedule, direction: Direction) -> dict[Stage, int]:
    """When each stage begins: when what it needs has ended, and the stage before it in its lane."""
    needs = needs_of(schedule, [FEATURES], direction)
    waits_for: dict[Stage, list[Stage]] = {stage: list(needed) for stage, needed in needs.items()}
    for _, stages in schedule.program(direction).lanes:
        for before, stage in itertools.pairwise(stages):
            waits_for[stage].append(before)
    begins: dict[Stage, int] = {}
    while len(begins) < len(waits_for):
        for stage, earlier in waits_for.items():
            if stage not in begins and all(needed in begins for needed in earlier):
                begins[stage] = max((begins[needed] + 1 for needed in earlier), default=0)
    return begins


def listed_path() -> list[str]:
    """The functions of the page's list of a pass, as ``FILE: FUNCTION``."""
    _, _, rest = PAGE.read_text().partition("The path of a stage")
    table, _, _ = rest.partition("\n### ")
    return re.findall(r"^\| `(\w+/\w+\.py: [\w.]+)` \|", table, re.M)


if __name__ == "__main__":
    PAGE.write_text(written())
