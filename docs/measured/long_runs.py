"""A table of what ``scripts/soak.sh`` has seen, over all its raw files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raw_files import Documents, link_to, markdown

from soak.disturbances import DISTURBANCES
from soak.launches import SHAPES

_HEAD = (
    "ranks",
    "what happens",
    "trainings",
    "launches",
    "iterations",
    "trained again, at most",
    "memory grows by, at most",
    "new threads",
)


def table(documents: Documents) -> str:
    """A row for each layout and disturbance; raises ValueError for a soak test that failed."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for name, document in documents.items():
        if "failed" in document:
            raise ValueError(f"{name}.json: the soak test failed: {document['failed']}")
        for each in document["rounds"]:
            found.setdefault((each["shape"], each["kind"]), []).append(each)
    order = ["undisturbed", *DISTURBANCES]
    keys = sorted(found, key=lambda key: (list(SHAPES).index(key[0]), order.index(key[1])))
    rows = markdown(_HEAD, [_row(*key, found[key]) for key in keys])
    return f"{rows}\nRaw files: {', '.join(map(link_to, documents))}.\n"


def _row(shape: str, kind: str, rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    growths = [each["memory_growth"] for each in rounds if each["memory_growth"] is not None]
    threads = [each["new_threads"] for each in rounds if each["new_threads"] is not None]
    return [
        SHAPES[shape].what,
        "nothing" if kind == "undisturbed" else DISTURBANCES[kind].what,
        f"{len(rounds)}",
        f"{sum(each['launches'] for each in rounds)}",
        f"{sum(each['iterations'] for each in rounds)}",
        f"{max(each.get('repeated', 0) for each in rounds)}",
        f"{max(growths) - 1:.2%}" if growths else "too short to tell",
        f"{max(0, *threads)}" if threads else "too short to tell",
    ]
