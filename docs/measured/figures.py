"""Writes ``docs/figures.md``, and the table of the README, from the raw files next to this script.

    python docs/measured/figures.py

Every raw file has a section: table, command, commit, machine, load and versions. Files of ``ampipe bench``
have the rows of ``ampipe bench --from``, those of the scripts here their numbers as they are stored.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from rich.console import Console

from megatron_ampipe.tools.benchmark import result_file, table, training

MEASURED = Path(__file__).resolve().parent
PAGE = MEASURED.parent / "figures.md"
README = MEASURED.parents[1] / "README.md"
COMMAND = "python docs/measured/figures.py"
BEGIN, END = f"<!-- begin: {COMMAND} -->\n", "<!-- end -->\n"

GROUPS = {
    "Blocks": (r"cpu-small-.*", "measured.md"),
    "Several layers as one schedule": (r"layers-(?!training).*", "measured.md"),
    "Whole trainings": (r"layers-training-.*", "measured.md"),
    "Transport": (r"transport.*", "measured.md"),
    "Exchanges": (r"exchange-.*|nodes-.*", "measured.md"),
    "Exchanges of small blocks": (r"choice-.*|2dh-.*", "nodes.md"),
    "Rows of tensor-parallel attention": (r"attention_rows", "nodes.md"),
    "Weight gradients": (r"lancet-.*", "weights.md"),
    "Memory": (r"memory-.*", "memory.md"),
    "Gradient reductions": (r"reductions-.*", "reductions.md"),
    "Casts and condensed tokens": (r"condense.*", "wire.md"),
    "Routing": (r"recording|migration", "routing.md"),
}
"""Title of a part of the page: names of its raw files, and the page that says what was measured."""
SUMMARY = dict(zip(GROUPS, ("block", "layers", "training"), strict=False))
"""Parts whose cases are in the table of the README, and what it calls them."""

HEAD = f"""# Figures

Written by `{COMMAND}` from the raw files in [measured/](measured/): change those, not this page.
[How it was measured](measured.md) explains the columns. Commands have the paths of their day.
"""
OTHER = (
    "- Megatron's layer used another all-to-all than AMPipe: its times are left out; compare AMPipe's rows.\n"
)


def main() -> None:
    """Write the page, and the table of the README."""
    documents = read_all()
    PAGE.write_text(page(documents))
    README.write_text(with_summary(README.read_text(), documents))


def read_all() -> dict[str, dict[str, Any]]:
    """Every raw file by its name, without its ending."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(MEASURED.glob("*.json"))}


def page(documents: Mapping[str, Mapping[str, Any]]) -> str:
    """The text of ``docs/figures.md``.

    Raises:
        ValueError: a raw file belongs to no part, or to several.
    """
    of_groups: dict[str, list[str]] = {title: [] for title in GROUPS}
    for name in documents:
        titles = [title for title, (pattern, _) in GROUPS.items() if re.fullmatch(pattern, name)]
        if len(titles) != 1:
            raise ValueError(f"{name}.json belongs to {len(titles)} parts of GROUPS, and needs one")
        of_groups[titles[0]].append(name)
    parts = [HEAD]
    for title, names in of_groups.items():
        if names:
            parts.append(f"\n## {title}\n\nWhat was measured: [{GROUPS[title][1]}]({GROUPS[title][1]}).\n")
        parts += [f"\n### {name}\n\n{section(documents[name])}" for name in names]
    return "".join(parts)


def section(document: Mapping[str, Any]) -> str:
    """The table of one raw file, and where it comes from."""
    if document.get("format") not in (result_file.FORMAT, training.FORMAT):
        return stored_tables(document) + "\n" + provenance(document)
    end = OTHER * (not same_transport(document)) + stacks(document)
    return bench_table(document) + "\n" + provenance(document) + end


def provenance(document: Mapping[str, Any]) -> str:
    """Command, commit, machine, load and versions, or that the file does not have them."""
    words = document.get("command", [])
    command = words if isinstance(words, str) else shlex.join(words)
    command = (
        re.sub(r"/(?:home|root|work|tmp)/(\S+/)*", "", f"`{command}`") if words else "Command not stored"
    )
    versions = {key: text for key, text in document.get("versions", {}).items() if key != "megatron-ampipe"}
    commit, _, dirty = versions.pop("commit", "not stored").partition("-")
    state = "" if commit == "not stored" else ", not clean" if dirty else ", clean"
    program = ", ".join(f"{name} {version}" for name, version in versions.items()) or "versions not stored"
    on = [one["hardware"] for one in (document, *document.get("runs", {}).values()) if "hardware" in one]
    machines = sorted({f"{found['cpu']}, {found['usable_cores']} cores" for found in on}) or ["not stored"]
    loads = [found[key][0] for key in ("load_average", "load_average_after") for found in on if key in found]
    load = f"; load {loads[0]} before" if loads else ""
    load += f", {loads[-1]} after" if len(loads) > 1 else ""
    begin = document.get("begin", "time not stored")[:16]
    return (
        f"- {command}\n- Commit {commit}{state}; {begin}; {program}.\n"
        f"- {'**Different machines**' if len(machines) > 1 else 'Machine'}: {'; '.join(machines)}{load}.\n"
    )


def same_transport(document: Mapping[str, Any]) -> bool:
    """True if Megatron's layers and AMPipe's had one all-to-all: on a CPU, in files that have a control."""
    return document["device"] != "cpu" or all("control" in case for case in document["cases"])


def bench_table(document: Mapping[str, Any]) -> str:
    """The rows of ``ampipe bench --from``; without Megatron's times if it used another all-to-all."""
    printed: list[Any] = []
    console = cast(Console, SimpleNamespace(print=printed.append))
    (training if document["format"] == training.FORMAT else table).show(document, console)
    columns = printed[0].columns
    head = [str(column.header) for column in columns]
    rows = [list(map(str, cells)) for cells in zip(*(column.cells for column in columns), strict=True)]
    if not same_transport(document):
        speedup = head.index("speedup")
        times = [i for i, name in enumerate(head) if name in ("ms", "iterations/s", "10-90 %", "speedup")]
        of_rows = [row for case in document["cases"] for row in (None, *case["rows"])]
        for cells, row in zip(rows, of_rows, strict=True):
            if row is None or is_megatron(row):
                cells[:] = ["" if i in times else cell for i, cell in enumerate(cells)]
        for cells in (head, *rows):
            del cells[speedup : speedup + 2]
    said = "".join(f"\n{line[0].upper()}{line[1:]}.\n" for line in printed[1:])
    return markdown(head, rows) + said


def is_megatron(row: Mapping[str, Any]) -> bool:
    """True for a row of degree 1 that is Megatron's own layer once more."""
    own = row["degree"] == 1 and row.get("exchange", "rows") == "rows"
    return own and row.get("stages_us_by_rank") is None


def stacks(document: Mapping[str, Any]) -> str:
    """The fastest row of layers that share a schedule over the fastest one block by block."""
    text = ""
    for case in document["cases"]:
        slowest_first = sorted(case["rows"], key=lambda row: -row["ms"])
        best = {row.get("stack", 1): row["ms"] for row in slowest_first}
        if len(best) > 1:
            one, blocks = best[max(best)], best[1]
            seen = abs(blocks / one - 1) > case["control"]["spread"] if "control" in case else True
            text += f"- {case['name']}: one schedule ({one:.0f} ms) is {blocks / one:.2f} times as fast as "
            text += f"block by block ({blocks:.0f} ms){', no difference seen' * (not seen)}.\n"
    return text


def with_summary(text: str, documents: Mapping[str, Mapping[str, Any]]) -> str:
    """The README with its table: the fastest row of each case, where both sides have the same all-to-all."""
    before, rest = text.split(BEGIN)
    rows = []
    for (title, what), (name, document) in itertools.product(SUMMARY.items(), documents.items()):
        for case in document["cases"] if re.fullmatch(GROUPS[title][0], name) else ():
            if same_transport(document) and not document["emulated"]:
                rows.append([f"{what}, {document['link']}, top-{case['block']['topk']}", *_fastest(case)])
    head = ["", "Megatron", "AMPipe", "faster", "of the bound", "noise"]
    summary = markdown(head, rows) if rows else "Not measured yet with the same all-to-all on both sides.\n"
    return f"{before}{BEGIN}\n{summary}\n{END}{rest.split(END, 1)[1]}"


def _fastest(case: Mapping[str, Any]) -> list[str]:
    row = min(case["rows"], key=lambda row: row["ms"])
    share = row.get("bound_share")
    return [
        f"{case['stock']['ms'] if 'stock' in case else case['stock_ms']:.0f} ms",
        f"{row['ms']:.0f} ms",
        f"{row['speedup']:.2f}x" + ", no difference seen" * (not row["difference_seen"]),
        "" if share is None else f"{share:.0%}",
        f"{case['control']['spread']:.1%}",
    ]


CONTAINERS = {"trainings", "phases", "ranks", "saved", "places", "cases", "degrees", "runs", "ways"}
NOT_SHOWN = {"command", "flags", "variants", "orders", "hardware", "versions", "setting", "seed", "name"}
# Not a bound, although old files call it one: a run has beaten it.
NOT_SHOWN |= {"share that is complete last", "no place is faster than ms"}
MEGATRON = {("cases", "stock"), ("runs", "Megatron, repeat 1"), ("runs", "Megatron, repeat 2")}
"""Where scripts store times of Megatron's layers: first and last part of a place."""


def stored_tables(document: Mapping[str, Any]) -> str:
    """Every number that a script stored: a row for each place, and a table for rows with the same keys."""
    places: dict[tuple[str, ...], dict[str, str]] = {}
    for (*place, key), text in _leaves(document, ()):
        places.setdefault(tuple(place), {})[key] = text
    alone = places.pop((), {})
    tables: dict[tuple[str, ...], list[list[str]]] = {}
    for place, cells in places.items():
        name = ", ".join(part for part in place if part not in CONTAINERS)
        tables.setdefault(tuple(cells), []).append([name, *cells.values()])
    parts = [markdown(["", *keys], rows) for keys, rows in tables.items()]
    parts += ["- " + "; ".join(f"{key}: {text}" for key, text in alone.items()) + ".\n"] * bool(alone)
    return "\n".join(parts)


def _leaves(value: Any, place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(value, dict):
        for key, of_key in value.items():
            if key not in NOT_SHOWN and (*place[:1], key) not in MEGATRON:
                yield from _leaves(of_key, (*place, key))
    elif isinstance(value, list) and value and isinstance(value[0], dict) and "name" in value[0]:
        for of_name in value:
            yield from _leaves(of_name, (*place, of_name["name"]))
    elif isinstance(value, list) and value and isinstance(value[0], int | float):
        if place[-1] == "lm_loss":
            last = statistics.mean(value[-(len(value) // 10) :])
            yield (*place[:-1], "mean lm_loss of the last tenth"), f"{last:.4f}"
        else:
            median, least, most = map(_number, (statistics.median(value), min(value), max(value)))
            yield place, f"{median} ({least} to {most}; {len(value)})"
    elif isinstance(value, str | int | float) and "\n" not in str(value):
        yield place, _number(value)


def _number(value: float | str) -> str:
    if isinstance(value, str | int):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; numbers are aligned to the right."""
    texts = ("", "case", "layer", "layers of", "link", "compared")
    lines = [head, ["---" if name in texts else "--:" for name in head], *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    main()
