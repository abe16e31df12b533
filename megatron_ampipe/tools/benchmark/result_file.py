"""The document that ``ampipe bench --json`` writes and ``--from`` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ampipe.errors import BadInput
from megatron_ampipe.files import inputs, outputs

FORMAT = "ampipe-bench-1"


def write(document: Mapping[str, Any], path: Path) -> None:
    """Write the document; it appears under its name only when it is whole.

    Raises:
        RunFailed: it cannot be written.
    """
    outputs.write_text(path, json.dumps(document) + "\n")


def read(path: Path) -> dict[str, Any]:
    """Read a document that :func:`write` wrote, and check what is shown and drawn of it.

    Raises:
        BadInput: it is absent, or not a result of ``ampipe bench``.
    """
    remedy = "Give a file that ampipe bench --json wrote, not one of --end-to-end."
    try:
        document = json.loads(inputs.read_text(path))
        good = document["format"] == FORMAT and all(_is_case(case) for case in document["cases"])
        good = good and bool(document["cases"]) and isinstance(document["emulated"], bool)
        good = good and all(isinstance(document[key], str) for key in ("grid", "link", "command"))
        good = good and isinstance(document["ranks"], int)
        # Absent from older results.
        good = good and all(isinstance(name, str) for name in document.get("missing_cases", ()))
    except OSError as error:
        raise BadInput("--from", path, rule=f"cannot be read ({error.strerror})", remedy=remedy) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadInput("--from", path, rule="is not a result of ampipe bench", remedy=remedy) from error
    if not good:
        raise BadInput("--from", path, rule="is not a result of ampipe bench", remedy=remedy)
    return dict(document)


def _is_case(case: Mapping[str, Any]) -> bool:
    # Not measured on a GPU, or absent from older results.
    measured = [key for key in ("busy_cores", "peak_bytes") if case.get(f"stock_{key}") is not None]
    numbers = [case["stock_ms"], *(case[f"stock_{key}"] for key in measured)]
    # Absent from older results, or not measured.
    others = [case[key] for key in ("control", "gloo_all_to_all") if case.get(key) is not None]
    for row in (*case["rows"], *others):
        numbers += [row["ms"], row["speedup"], row["speedup_p10"], row["speedup_p90"], row["degree"]]
        numbers += [row[key] for key in ("bound_ms", "bound_share") if row[key] is not None]
        numbers += [row[key] for key in measured]
        numbers += [row[key] for key in ("layers", "stack") if key in row]
        numbers += [row[key] for key in ("wire_bytes", "expected_wire_bytes") if row.get(key) is not None]
        if not isinstance(row["schedule"], str) or not isinstance(row.get("exchange", ""), str):
            return False
    return isinstance(case["name"], str) and all(
        isinstance(number, int | float) and not isinstance(number, bool) and number > 0 for number in numbers
    )
