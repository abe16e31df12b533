"""As :mod:`.runs_worker`, with a stand-in for the package ``datasets``, which ``--sft`` reads with."""

from __future__ import annotations

import json
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from tests.megatron import runs_worker


def load_dataset(kind: str, *, data_files: str, split: str) -> list[dict[str, Any]]:
    """All lines of a JSON-lines file."""
    assert (kind, split) == ("json", "all")
    return [json.loads(line) for line in Path(data_files).read_text().splitlines()]


if __name__ == "__main__":
    found = types.ModuleType("datasets")
    found.__spec__ = ModuleSpec("datasets", None)
    found.load_dataset = load_dataset
    sys.modules["datasets"] = found
    sys.exit(runs_worker.main())
