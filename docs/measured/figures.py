"""Writes ``docs/figures.md``, and the table of the README, from the raw files next to this script.

    python docs/measured/figures.py

Each claim is a section: one table of results, with links to its raw files, and what their commands share.
Whole commands, commits, dates, machines, their load, samples, stages and losses stay in the raw files.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

MEASURED = Path(__file__).resolve().parent
PAGE = MEASURED.parent / "figures.md"
README = MEASURED.parents[1] / "README.md"
COMMAND = "python docs/measured/figures.py"
BEGIN, END = f"<!-- begin: {COMMAND} -->\n", "<!-- end -->\n"
MIB = 1 << 20

Document = Mapping[str, Any]
Documents = Mapping[str, Document]
"""Raw files by their name, without its ending."""
Rows = list[list[str]]

HEAD = f"""# Figures

Written by `{COMMAND}` from the raw files that are linked. Each holds every sample and,
but for a few, command, commit (a `*` here: with modified files), date, machine and load. Later versions may
lack some flags. [How it was measured](measured.md) says what is compared. Times are medians in ms, with the
fastest degree in parentheses. Megatron's times are left out where its layers used another all-to-all. *Of the
bound*: lower bound over measured time. *Spread*: how far Megatron's layer, measured twice, differs.
*Command*: what the commands of all its files share.
"""


def main() -> None:
    """Write the page, and the table of the README."""
    documents = read_all()
    PAGE.write_text(page(documents))
    README.write_text(with_summary(README.read_text(), documents))


def read_all() -> dict[str, dict[str, Any]]:
    """Every raw file."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(MEASURED.glob("*.json"))}


def page(documents: Documents) -> str:
    """The text of ``docs/figures.md``.

    Raises:
        ValueError: A raw file matches no claim, or several.
    """
    for name in documents:
        titles = [title for title, (pattern, _, _) in CLAIMS.items() if re.fullmatch(pattern, name)]
        if len(titles) != 1:
            raise ValueError(f"{name}.json belongs to {len(titles)} claims, and needs one")
    parts = [HEAD]
    for title, (pattern, what, table) in CLAIMS.items():
        chosen = {name: each for name, each in documents.items() if re.fullmatch(pattern, name)}
        if chosen:
            rows = table(chosen)
            parts.append(f"\n## {title}\n\nSee [{what}]({what}).")
            if "](measured/" not in rows:
                parts.append(f" Raw file: {', '.join(itertools.starmap(link, chosen.items()))}.")
            parts.append(f"{shared_command(chosen)}\n\n{rows}")
    return "".join(parts)


def shared_command(documents: Documents) -> str:
    """The words that the commands of all files share; empty if there are none."""
    commands = [command_of(document) for document in documents.values()]
    shared = [chunk for chunk in commands[0] if all(chunk in each for each in commands)]
    return f" Command: `{' '.join(shared)}`" if shared else ""


def command_of(document: Document) -> list[str]:
    """The command as words, each flag together with its values; without the name of the output."""
    words = document.get("command", [])
    text = words if isinstance(words, str) else shlex.join(words)
    text = re.sub(r"/(?:home|root|work|tmp)/(\S+/)*", "", text)
    chunks = re.split(r"(?<=\.py) | (?=--)", re.sub(r"(--json \S+|\S+\.json) ?", "", text))
    return [chunk.strip() for chunk in chunks if chunk.strip()]


def link(name: str, document: Document) -> str:
    """A link to the raw file, with a star if files of the code that ran were modified."""
    modified = document.get("versions", {}).get("commit", "").endswith("-dirty")
    return f"[{name}](measured/{name}.json)" + (r"\*" if modified else "")


def same_transport(document: Document) -> bool:
    """True if Megatron's layers and AMPipe's had the same all-to-all: on a CPU, in files with a control."""
    return document["device"] != "cpu" or all("control" in case for case in document["cases"])


def is_megatron(row: Mapping[str, Any]) -> bool:
    """True for a row of degree 1 that is Megatron's own layer once more."""
    own = row["degree"] == 1 and row.get("exchange", "rows") == "rows"
    return own and row.get("stages_us_by_rank") is None


def variants(column: Callable[[Mapping[str, Any]], str]) -> Callable[[Documents], str]:
    """A table with a row for each case and a column for each variant, at its fastest degree."""

    def table(documents: Documents) -> str:
        cases = [(name, doc, case) for name, doc in documents.items() for case in doc["cases"]]
        rows_of = [
            [row for row in case["rows"] if same_transport(doc) or not is_megatron(row)]
            for _, doc, case in cases
        ]
        columns = list(dict.fromkeys(column(row) for rows in rows_of for row in rows))
        lines = []
        for (name, document, case), rows in zip(cases, rows_of, strict=True):
            best = [
                min((row for row in rows if column(row) == each), key=lambda row: row["ms"], default=None)
                for each in columns
            ]
            cells = [*map(_time, best), *_comparison(document, case, rows)]
            lines.append([link(name, document), case["name"], *cells])
        return without_empty(["file", "case", *columns, *COMPARISON], lines)

    return table


COMPARISON = ["Megatron", "faster", "of the bound", "spread", "prediction off by", "its choice slower by"]


def _comparison(document: Document, case: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    row = min(rows, key=lambda row: row["ms"])
    fair, share = same_transport(document), row.get("bound_share")
    off = [abs(each["error"]) for each in rows if each.get("error") is not None]
    loss = case.get("choice", {}).get("loss")
    return [
        f"{_stock_ms(case):.0f}" if fair else "",
        f"{row['speedup']:.2f}x{_unseen(row)}" if fair else "",
        "" if share is None else f"{share:.0%}",
        f"{case['control']['spread']:.1%}" if "control" in case else "",
        f"{statistics.median(off):.0%}, at most {max(off):.0%}" if off else "",
        "" if loss is None else f"{loss:.0%}",
    ]


def _unseen(row: Mapping[str, Any]) -> str:
    return "" if row.get("difference_seen", True) else ", no difference seen"


def _stock_ms(case: Mapping[str, Any]) -> float:
    return case["stock"]["ms"] if "stock" in case else case["stock_ms"]


def _time(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    return f"{row['ms']:.0f}" + f" ({row['degree']})" * (row["schedule"] != "planned")


def memory(documents: Documents) -> str:
    """Peaks of each strategy, and the time that it takes more than ``keep`` within a repeat."""
    lines = []
    for name, document in documents.items():
        for case in document["cases"]:
            keep = next((row["samples_ms"] for row in case["rows"] if row["memory"] == "keep"), None)
            file = link(name, document)
            lines.append([file, "Megatron", "", "", f"{case['stock_peak_bytes'] / MIB:.1f}", ""])
            for row in case["rows"]:
                more = [b / a - 1 for a, b in zip(keep, row["samples_ms"], strict=True)] if keep else [0.0]
                cells = [f"{statistics.median(more):.1%}", f"{min(more):.0%} to {max(more):.0%}"]
                lines.append(
                    [
                        file,
                        row["memory"],
                        *(cells if keep and row["memory"] != "keep" else ["", ""]),
                        f"{row['peak_bytes'] / MIB:.1f}",
                        f"{row['predicted_peak_bytes'] / MIB:.1f}",
                    ]
                )
    return markdown(["file", "strategy", "more time", "range", "peak MiB", "predicted"], lines)


def covered(documents: Documents) -> str:
    """How much of the weight gradients' time ``lancet`` hides under the dispatch of the backward pass."""
    lines = [
        [
            link(name, document),
            case,
            *(f"{row[key]:.1f}" for key in ("products ms", "covered ms")),
            " to ".join(f"{each:.1f}" for each in row["covered, quartiles ms"]),
            f"{row['share covered']:.0%}",
        ]
        for name, document in documents.items()
        for case, row in document["cases"].items()
    ]
    return markdown(["file", "case", "products", "hidden", "quartiles", "share"], lines)


def attention_rows(documents: Documents) -> str:
    """Time that stages for the rows of tensor-parallel attention save."""
    [places] = (document["places"] for document in documents.values())
    return markdown(
        ["ranks:link", *next(iter(places.values()))],
        [[place, *(f"{row['saved']:.1%} saved" for row in ways.values())] for place, ways in places.items()],
    )


def reductions(documents: Documents) -> str:
    """Iteration times with Megatron's overlap of gradient reductions, and with placed reductions."""
    ways = ("after the pass", "overlapped", "placed")
    lines = []
    for name, document in documents.items():
        ms = document["median ms"]
        times = [f"{ms[way]:.0f}" if way in ms else "" for way in ways]
        lines.append([link(name, document), *times, f"{ms['overlapped'] / ms['placed']:.2f}x"])
    return markdown(["file", *ways, "overlapped/placed"], lines)


def reductions_predicted(documents: Documents) -> str:
    """Predicted times of a backward pass together with its reductions."""
    [document] = documents.values()
    settings = {name: value["ways"] for name, value in document.items() if name != "command"}
    return markdown(
        ["setting", *(way["name"] for way in next(iter(settings.values())))],
        [
            [name, *(f"{way['pass_ms'] + way['left_ms']:.0f}" for way in ways)]
            for name, ways in settings.items()
        ],
    )


def condensed(documents: Documents) -> str:
    """Losses of trainings that send fewer rows, or rows in fewer bits."""
    [document] = documents.values()
    seeds = sorted({run["seed"] for run in document["runs"].values()})
    lines = []
    for setting, runs in _by_setting(document).items():
        losses = {run["seed"]: statistics.mean(run["lm_loss"][-len(run["lm_loss"]) // 10 :]) for run in runs}
        shares = [share for run in runs for share in run["condensed_share"]]
        lines.append(
            [
                setting,
                *(f"{losses[seed]:.4f}" for seed in seeds),
                f"{statistics.mean(shares):.0%}" if shares else "",
            ]
        )
    return markdown(["setting", *(f"loss, seed {seed}" for seed in seeds), "rows not sent"], lines)


def condensed_speed(documents: Documents) -> str:
    """Speed and bytes of such trainings."""
    [document] = documents.values()
    lines = []
    for setting, runs in _by_setting(document).items():
        if setting != "Megatron":
            rates = [f"{1e3 / statistics.median(run['ms']):.2f}" for run in runs]
            shares = [share for run in runs for share in run["condensed_share"]]
            lines.append(
                [
                    setting,
                    *rates,
                    f"{runs[0]['bytes_per_iteration'] / 1e6:.3f}",
                    f"{statistics.mean(shares):.0%}" if shares else "",
                ]
            )
    return markdown(["setting", "iterations/s", "repeated", "MB", "rows not sent"], lines)


def _by_setting(document: Document) -> dict[str, list[Mapping[str, Any]]]:
    settings: dict[str, list[Mapping[str, Any]]] = {}
    for run in document["runs"].values():
        settings.setdefault(run["setting"], []).append(run)
    return settings


def recording(documents: Documents) -> str:
    """Iterations that record their routing, and all others."""
    [document] = documents.values()
    kinds = ("recorded", "others")
    return markdown(
        ["degree", *kinds, "bytes of a file"],
        [
            [degree, *(f"{row[kind]['median']:.0f}" for kind in kinds), f"{row['file_bytes']:.0f}"]
            for degree, row in document["degrees"].items()
        ],
    )


def migration(documents: Documents) -> str:
    """Rows that moving sequences between ranks would save, as shares of both all-to-alls."""
    [document] = documents.values()
    lines = []
    for training, of_training in document["trainings"].items():
        for phase, of_phase in of_training["phases"].items():
            for ranks, found in of_phase["ranks"].items():
                for exchange in ("rows", "ranks") if of_training["topk"] > 1 else ("rows",):
                    every, missing = (found["saved"][f"{exchange}, {which}"] for which in ("all", "missing"))
                    lines.append(
                        [training, phase, ranks, exchange]
                        + [f"{100 * every[key]:.1f}" for key in MIGRATION]
                        + [f"{100 * missing['of both']:.1f}"]
                    )
    head = [
        "training",
        "phase",
        "ranks",
        "exchange",
        "Luffy's rule, %",
        "equal shares",
        "at most",
        "missing rows",
    ]
    return markdown(head, lines)


MIGRATION = ("of both", "at most, equal shares", "at most")

SCHEDULE = variants(lambda row: row["schedule"])
STACK = variants(lambda row: f"stack of {row['stack']}")
EXCHANGE = variants(lambda row: "planned" if row["schedule"] == "planned" else row["exchange"])

CLAIMS: Mapping[str, tuple[str, str, Callable[[Documents], str]]] = {
    "Blocks": (r"cpu-small-.*", "measured.md", SCHEDULE),
    "Several layers as one schedule": (r"layers-(?!training).*", "measured.md", STACK),
    "Whole trainings": (r"layers-training-.*", "measured.md", STACK),
    "Exchanges": (r"exchange-.*|nodes-.*", "measured.md", EXCHANGE),
    "Exchanges of small blocks": (r"choice-.*|2dh-.*", "exchange.md", EXCHANGE),
    "Rows of tensor-parallel attention": (r"attention_rows", "exchange.md", attention_rows),
    "Weight gradients": (r"lancet-(?!covers).*", "weights.md", SCHEDULE),
    "Weight gradients hidden under a dispatch": (r"lancet-covers-.*", "weights.md", covered),
    "Memory": (r"memory-.*", "memory.md", memory),
    "Gradient reductions": (r"reductions-(?!predicted).*", "reductions.md", reductions),
    "Predicted gradient reductions": (r"reductions-predicted", "reductions.md", reductions_predicted),
    "Casts and condensed tokens": (r"condense", "wire.md", condensed),
    "Speed of casts and condensed tokens": (r"condense_speed_small", "wire.md", condensed_speed),
    "Recording": (r"recording", "routing.md", recording),
    "Sequences that move": (r"migration", "routing.md", migration),
}
"""Title of a claim: names of its raw files, the page that explains it, and its table."""
SUMMARY = dict(zip(CLAIMS, ("block", "layers", "training"), strict=False))
"""Claims whose cases are in the table of the README, and what it calls them."""


def with_summary(text: str, documents: Documents) -> str:
    """The README with its table: the fastest row of each case where both sides have the same all-to-all.

    A case that was measured several times has one row, from the least to the greatest of its runs.
    """
    before, rest = text.split(BEGIN)
    runs: dict[str, list[list[tuple[float, str]]]] = {}
    for (title, what), (name, document) in itertools.product(SUMMARY.items(), documents.items()):
        for case in document["cases"] if re.fullmatch(CLAIMS[title][0], name) else ():
            if same_transport(document) and not document["emulated"]:
                label = f"{what}, {document['link']}, top-{case['block']['topk']}"
                runs.setdefault(label, []).append(_fastest(case))
    rows = [[label, str(len(each)), *map(_from_to, zip(*each, strict=True))] for label, each in runs.items()]
    head = ["", "runs", "Megatron, ms", "AMPipe, ms", "faster", "of the bound", "noise"]
    summary = markdown(head, rows) if rows else "Not measured yet with the same all-to-all on both sides.\n"
    return f"{before}{BEGIN}\n{summary}\n{END}{rest.split(END, 1)[1]}"


def _fastest(case: Mapping[str, Any]) -> list[tuple[float, str]]:
    row = min(case["rows"], key=lambda row: row["ms"])
    share = row.get("bound_share") or 0.0
    stock, spread = _stock_ms(case), case["control"]["spread"]
    return [
        (stock, f"{stock:.0f}"),
        (row["ms"], f"{row['ms']:.0f}"),
        (row["speedup"], f"{row['speedup']:.2f}x{_unseen(row)}"),
        (share, f"{share:.0%}" if share else ""),
        (spread, f"{spread:.1%}"),
    ]


def _from_to(cells: Sequence[tuple[float, str]]) -> str:
    least, greatest = min(cells)[1], max(cells)[1]
    return least if least == greatest else f"{least} to {greatest}"


def without_empty(head: Sequence[str], rows: Rows) -> str:
    """A table without the columns that have no cell."""
    kept = [i for i, _ in enumerate(head) if any(row[i] for row in rows)]
    return markdown([head[i] for i in kept], [[row[i] for i in kept] for row in rows])


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; in the first column, what repeats is left out. The others are aligned to the right."""
    rule = f"|---|{'--:|' * (len(head) - 1)}"
    lines, above = [], ""
    for first, *others in (head, *rows):
        lines.append(f"| {' | '.join(['' if first == above else first, *others])} |")
        above = first
    return "\n".join([lines[0], rule, *lines[1:]]) + "\n"


if __name__ == "__main__":
    main()
