"""The Megatron versions for the tests: that of the environment, and older ones that test.sh installs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "older_megatron.txt"
OLDER = tuple(
    line.removeprefix("megatron-core==").strip().rpartition(".")[0]
    for line in REQUIREMENTS.read_text().splitlines()
    if line.startswith("megatron-core==")
)
"""Major and minor version of each."""


def folder_of(version: str) -> Path:
    """The folder to put on the path for ``version``, one of :data:`OLDER`; contains ``megatron/``."""
    folder = Path(sys.prefix) / f"megatron-core-{version}"
    assert folder.is_dir(), f"{folder} does not exist: run scripts/test.sh, which installs it"
    return folder


def megatron_of(version: str) -> Path:
    """The ``megatron`` folder of any supported version."""
    if version in OLDER:
        return folder_of(version) / "megatron"
    found = importlib.util.find_spec("megatron")
    assert found is not None and found.submodule_search_locations is not None
    return Path(next(iter(found.submodule_search_locations)))
