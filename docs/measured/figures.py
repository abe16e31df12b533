"""Writes ``docs/figures.md``, ``docs/results.md``, and the tables of other pages, from the raw files here.

    python docs/measured/figures.py

``docs/figures.md`` has a section for each claim: one table, with links to its raw files, and what their
commands share. ``docs/results.md`` lists every raw file, where it comes from and which page uses it.
``docs/papers.md`` compares with papers (``papers.py``). Tables of other pages stand between two comments,
which name them (``blocks.py``).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path

import papers
from blocks import BLOCKS
from raw_files import (
    DOCS,
    ROOT,
    Document,
    Documents,
    in_history,
    markdown,
    origin_of,
    read_all,
)
from tables import CLAIMS, link, shared_command

COMMAND = "python docs/measured/figures.py"
END = "<!-- end -->"

HEAD = f"""# Figures

Written by `{COMMAND}` from the raw files that are linked; [results](results.md) lists their
commands, commits and machines (a `*` here: the code that ran had modified files). Times are medians in ms,
with the fastest degree in parentheses, or of a micro-batch; a speedup is Megatron's time over AMPipe's within
a repeat (median, and range in parentheses). Megatron's times are left out where its layers used another
all-to-all. [How it was measured](measured.md) says what is compared, what the [bound](measured.md#the-bound)
is, and what *spread* and *noise* are: how far Megatron's layers, measured twice, differ. *Command*: what the
commands of all its files share.
"""
RESULTS_HEAD = f"""# Raw files

Written by `{COMMAND}`: every raw file of a measurement, in `docs/measured`, with the command
and the commit that it names. *In the history*: whether that commit is one of this repository. `-dirty`: the
code that ran had modified files. *Used by*: the page with its table, or the day of the
[log](log/README.md) that refers to it. Commands are those of their day; later versions may lack some flags.

"""


def main() -> None:
    """Write all pages."""
    for path, text in pages(read_all()).items():
        path.write_text(text)


def pages(documents: Documents, *, with_results: bool = True) -> dict[Path, str]:
    """The text of every page. ``with_results`` needs a git repository with its whole history.

    Raises:
        ValueError: A raw file is used by no page, or by several claims; a page lacks a block.
    """
    texts = {
        DOCS / "figures.md": figures_page(documents),
        DOCS / papers.PAGE: papers.page(documents, COMMAND),
    }
    if with_results:
        texts[DOCS / "results.md"] = results_page(documents)
    for page in dict.fromkeys(block.page for block in BLOCKS):
        path = ROOT / page
        texts[path] = with_blocks(page, path.read_text(), documents)
    for name in documents:
        if not used_by(name, documents):
            raise ValueError(f"{name}.json is used by no page: add a claim or a block, or remove it")
    return texts


def figures_page(documents: Documents) -> str:
    """The text of ``docs/figures.md``."""
    for name in documents:
        titles = [title for title, (pattern, _, _) in CLAIMS.items() if re.fullmatch(pattern, name)]
        if len(titles) > 1:
            raise ValueError(f"{name}.json belongs to the claims {' and '.join(titles)}, and one is allowed")
    parts = [HEAD]
    for title, (pattern, what, table) in CLAIMS.items():
        chosen = matching(pattern, documents)
        if chosen:
            rows = table(chosen)
            parts.append(f"\n## {title}\n\nSee [{what}]({what}).")
            if "](measured/" not in rows:
                parts.append(f" Raw file: {', '.join(itertools.starmap(link, chosen.items()))}.")
            parts.append(f"{shared_command(chosen)}\n\n{rows}")
    return "".join(parts)


def matching(pattern: str, documents: Documents) -> dict[str, Document]:
    """Raw files whose whole name has the pattern."""
    return {name: document for name, document in documents.items() if re.fullmatch(pattern, name)}


def with_blocks(page: str, text: str, documents: Documents) -> str:
    """The page with the present text of all its blocks."""
    for block in BLOCKS:
        if block.page == page:
            begin = f"<!-- begin: {COMMAND} ({block.name}) -->\n"
            if begin not in text:
                raise ValueError(f"{page} lacks the line {begin.strip()}")
            before, rest = text.split(begin)
            table = block.table(matching(block.files, documents))
            text = f"{before}{begin}\n{table}\n{END}{rest.split(END, 1)[1]}"
    named = re.findall(rf"<!-- begin: {re.escape(COMMAND)} \((.*?)\) -->", text)
    known = [block.name for block in BLOCKS if block.page == page]
    if sorted(named) != sorted(known):
        raise ValueError(f"{page} has the blocks {named}, and blocks.py has {known}")
    return text


def results_page(documents: Documents) -> str:
    """The text of ``docs/results.md``."""
    rows = []
    for name, document in documents.items():
        origin, pages_of_file = origin_of(document), used_by(name, documents)
        days = [page for page in pages_of_file if page.startswith("docs/log/")]
        found = ["yes" if in_history(commit) else "no" for commit in origin.commits]
        rows.append(
            [
                f"[{name}](measured/{name}.json)",
                f"`{origin.command}`" if origin.command else "not recorded",
                ", ".join(f"`{commit}`" for commit in origin.commits) or "not recorded",
                ", ".join(dict.fromkeys(found)),
                origin.machine or "not recorded",
                origin.torch,
                origin.date or (Path(days[0]).stem if days else "not recorded"),
                ", ".join(pages_of_file.values()),
            ]
        )
    head = ["file", "command", "commit", "in the history", "machine", "torch", "date", "used by"]
    return RESULTS_HEAD + markdown(head, rows)


def used_by(name: str, documents: Documents) -> Mapping[str, str]:
    """Pages that use a raw file, and a link to each from a page in ``docs``."""
    found = {}
    for title, (pattern, _, _) in CLAIMS.items():
        if re.fullmatch(pattern, name):
            found["figures"] = f"[figures](figures.md#{anchor(title)})"
    for block in BLOCKS:
        if re.fullmatch(block.files, name):
            page = ROOT / block.page
            target = page.relative_to(DOCS) if page.is_relative_to(DOCS) else f"../{block.page}"
            found[block.page] = f"[{page.stem}]({target})"
    found |= papers.used_by(name)
    for path in [*sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("log/*.md"))]:
        short = path.relative_to(DOCS)
        is_written = short.name in ("results.md", "figures.md", papers.PAGE)
        if not is_written and f"measured/{name}.json)" in path.read_text():
            found.setdefault(f"docs/{short}", f"[{path.stem}]({short})")
    return found


def anchor(title: str) -> str:
    """What a link to a heading ends in."""
    return title.lower().replace(" ", "-")


if __name__ == "__main__":
    main()
