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
    LINK_START,
    ROOT,
    Document,
    Documents,
    in_history,
    link_to,
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

Written by `{COMMAND}`: the raw files of all measurements, in `docs/measured/results`, by
page that uses them, and each one's command and commit. Commands are those of their day: later versions may
lack some flags, and raw files were in `docs/measured`. `-dirty`: the code that ran had modified files.
"""
NOT_HERE = """## Commits that this repository does not have

The exact code that these files were measured with is lost: the commits that they name are none of this
repository's.
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
            if f"]({LINK_START}" not in rows:
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
    pages_of = {name: used_by(name, documents) for name in documents}
    return "\n".join(
        [
            RESULTS_HEAD,
            f"## By page\n\n{files_by_page(pages_of)}",
            f"{NOT_HERE}\n{files_by_commit(documents)}",
            f"## By file\n\n{origins(documents, pages_of)}",
        ]
    )


def files_by_page(pages_of: Mapping[str, Mapping[str, str]]) -> str:
    """A table of pages, days of the log after them, with the raw files that each one uses."""
    files: dict[str, list[str]] = {}
    for name, links in pages_of.items():
        for page in links.values():
            files.setdefault(page, []).append(link_to(name))
    ordered = sorted(files, key=lambda page: ("](log/" in page, page))
    return markdown(["page", "files"], [[page, ", ".join(files[page])] for page in ordered])


def files_by_commit(documents: Documents) -> str:
    """A table of commits that are none of this repository, with the raw files that name them."""
    files: dict[str, list[str]] = {}
    for name, document in documents.items():
        for commit in origin_of(document).commits:
            if not in_history(commit):
                files.setdefault(commit, []).append(link_to(name))
    return markdown(
        ["commit", "files"], [[f"`{commit}`", ", ".join(files[commit])] for commit in sorted(files)]
    )


def origins(documents: Documents, pages_of: Mapping[str, Mapping[str, str]]) -> str:
    """A table of the raw files and where each one comes from."""
    rows = []
    for name, document in documents.items():
        origin = origin_of(document)
        days = [page for page in pages_of[name] if page.startswith("docs/log/")]
        rows.append(
            [
                link_to(name),
                f"`{origin.command}`" if origin.command else "not recorded",
                ", ".join(f"`{commit}`" for commit in origin.commits) or "not recorded",
                origin.machine or "not recorded",
                origin.torch,
                origin.date or (Path(days[0]).stem if days else "not recorded"),
            ]
        )
    return markdown(["file", "command", "commit", "machine", "torch", "date"], rows)


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
        if not is_written and f"{LINK_START}{name}.json)" in path.read_text():
            found.setdefault(f"docs/{short}", f"[{path.stem}]({short})")
    return found


def anchor(title: str) -> str:
    """What a link to a heading ends in."""
    return title.lower().replace(" ", "-")


if __name__ == "__main__":
    main()
