"""The tables of ``docs/figures.md``: of each claim its raw files, the page that explains it, its table."""

from __future__ import annotations

import re
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from comparisons import comparisons_of, kinds_table
from raw_files import (
    MIB,
    Document,
    Documents,
    command_words,
    is_modified,
    link_to,
    markdown,
    with_peaks,
    without_empty,
    without_output,
    without_paths,
)


def shared_command(documents: Documents) -> str:
    """The words that the commands of all files share; empty if there are none."""
    commands = [command_of(document) for document in documents.values()]
    shared = [chunk for chunk in commands[0] if all(chunk in each for each in commands)]
    return f" Command: `{' '.join(shared)}`" if shared else ""


def command_of(document: Document) -> list[str]:
    """The command as words, each flag together with its values; without the name of the output."""
    text = without_paths(shlex.join(command_words(document)))
    chunks = re.split(r"(?<=\.py) | (?=--)", without_output(text))
    return [chunk.strip() for chunk in chunks if chunk.strip()]


def link(name: str, document: Document) -> str:
    """A link to the raw file, with a star if files of the code that ran were modified."""
    return link_to(name) + (r"\*" if is_modified(document) else "")


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
        for case in with_peaks(document)["cases"]:
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


def partners(documents: Documents) -> str:
    """Steps of several micro-batches: Megatron's layers, stacks in chunks, and partners."""
    found = [
        (link(name, document), comparison)
        for name, document in documents.items()
        for comparison in comparisons_of(document)
    ]
    return kinds_table(found)


MIGRATION = ("of both", "at most, equal shares", "at most")

SCHEDULE = variants(lambda row: row["schedule"])
STACK = variants(lambda row: f"stack of {row['stack']}")
EXCHANGE = variants(lambda row: "planned" if row["schedule"] == "planned" else row["exchange"])

CLAIMS: Mapping[str, tuple[str, str, Callable[[Documents], str]]] = {
    "Blocks": (r"cpu-small-.*", "measured.md", SCHEDULE),
    "Several layers as one schedule": (r"layers-(?!training).*", "measured.md", STACK),
    "Whole trainings": (r"layers-training-.*", "measured.md", STACK),
    "Partners": (r"partners-(?!training|seed2|te-).*", "partners.md", partners),
    "Whole trainings with partners": (r"partners-(training|seed2)-.*", "partners.md", partners),
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
