"""Generates the tables of flags, of what is switched off and of what is refused, in pages of ``docs``.

``python -m tests.supported`` writes them into the pages; a test checks that they are up to date.
"""

import re
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from megatron_ampipe.block.settings import SETTING
from megatron_ampipe.launch.flags import add_arguments
from megatron_ampipe.launch.refusals import REFUSALS, TOKEN_ID_REFUSALS, Refusal
from megatron_ampipe.launch.run import SWITCHED_OFF

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = (DOCS / "supported.md", DOCS / "usage.md")


def with_tables(page: Path) -> str:
    """The text of a page, with the rows that there should be now in the first table of each section."""
    rows_of: dict[str, Iterable[str]] = {"Flags": _flags()}
    if page.stem == "supported":
        rows_of = {
            "Switched off": _rows(SWITCHED_OFF.items()),
            "Refused at start-up": _refused(REFUSALS),
            "Refused with a router that reads token ids": _refused(TOKEN_ID_REFUSALS),
        }
    text = page.read_text()
    for heading, rows in rows_of.items():
        head, found, rest = re.split(rf"(^## {heading}$.*?^\|[-|]+\|\n)", text, maxsplit=1, flags=re.M | re.S)
        text = head + found + "".join(f"{row}\n" for row in rows) + re.sub(r"\A(\|.*\n)*", "", rest)
    return text


def _flags() -> Iterator[str]:
    """AMPipe's flags, from the table of settings."""
    (files,) = (one for one in add_arguments(ArgumentParser())._actions if one.dest == "ampipe_config")
    yield f"| `--ampipe-config FILE ...` | none | {files.help} |"
    for setting in SETTING.values():
        is_named = setting.default in (None, False)
        default = setting.shown_default if is_named else f"`{setting.default}`"
        flag = setting.flag if setting.type is bool else f"{setting.flag} {setting.metavar}"
        yield f"| `{flag}` | {default} | {setting.help} |"


def _refused(refusals: Iterable[Refusal]) -> Iterator[str]:
    return _rows((refusal.setting, refusal.rule, refusal.remedy) for refusal in refusals)


def _rows(settings: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Rows of a setting and what is said of it; neighbours of which the same is said share one."""
    for said, neighbours in groupby(settings, key=lambda row: row[1:]):
        names = ", ".join(f"`{setting}`" for setting, *_ in neighbours)
        yield f"| {names} | {' | '.join(said)} |"


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(with_tables(path))
