"""In which versions of Megatron each name of :mod:`tests.internals` was seen.

``python -m tests.internals_seen`` checks every version that is installed for the tests, and the checkout that
``AMPIPE_MEGATRON`` names, and writes ``internals_seen.json``. Versions that are not at hand keep what they
have: a name that is added later is not claimed of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.megatron.launcher import REPOSITORY, environment
from tests.megatrons import at_hand, folder_of

FILE = Path(__file__).with_name("internals_seen.json")
Seen = dict[str, dict[str, list[str]]]
"""By version: names that were ``seen``, and of those the ones of which some fact is ``different``."""


def recorded() -> Seen:
    """What the file says."""
    found: Seen = json.loads(FILE.read_text())
    return found


def complaints_of(version: str) -> dict[str, list[str]]:
    """What :mod:`tests.megatron.test_megatron_names` finds in a version, by name."""
    folder = folder_of(version)
    path = [str(REPOSITORY), *([str(folder)] if folder is not None else [])]
    done = subprocess.run(
        [sys.executable, "-m", "tests.megatron.test_megatron_names"],
        cwd=REPOSITORY,
        env=environment() | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def summary(complaints: dict[str, list[str]]) -> dict[str, list[str]]:
    """The part of it that is recorded."""
    seen = {name: found for name, found in complaints.items() if not found or "not there" not in found[0]}
    return {"seen": sorted(seen), "different": sorted(name for name, found in seen.items() if found)}


def versions_with(name: str) -> str:
    """The versions that have a name; with a star where something about it is different."""
    return ", ".join(
        f"{version}*" if name in of_version["different"] else version
        for version, of_version in recorded().items()
        if name in of_version["seen"]
    )


def main() -> None:
    found = recorded() if FILE.exists() else {}
    for version in at_hand():
        found[version] = summary(complaints_of(version))
    FILE.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
