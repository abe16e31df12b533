"""The Megatron versions for the tests: that of the environment, older ones that test.sh installs, a checkout.

The checkout is one that ``AMPIPE_MEGATRON`` names, of a version that cannot be installed yet: nothing is
fetched for it, and tests that need it are skipped without it. Its dataset helper has to be compiled.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from megatron_ampipe.compat import MAIN_BRANCH

REQUIREMENTS = Path(__file__).parent / "older_megatron.txt"
OLDER = tuple(
    line.removeprefix("megatron-core==").strip().rpartition(".")[0]
    for line in REQUIREMENTS.read_text().splitlines()
    if line.startswith("megatron-core==")
)
"""Major and minor version of each."""
NEXT = MAIN_BRANCH
"""The version of the checkout."""
CHECKOUT = os.environ.get("AMPIPE_MEGATRON")
"""Its folder, as users name it; None without one."""
needs_checkout = pytest.mark.skipif(
    CHECKOUT is None, reason="AMPIPE_MEGATRON names no checkout of Megatron-LM"
)


def folder_of(version: str) -> Path | None:
    """The folder to put on the path for ``version``, with ``megatron/`` in it; None for the installed one."""
    if version == NEXT:
        assert CHECKOUT is not None
        folder = Path(CHECKOUT).resolve()
        assert (folder / "megatron" / "core").is_dir(), (
            f"AMPIPE_MEGATRON={CHECKOUT} is no Megatron-LM checkout"
        )
        return folder
    if version not in OLDER:
        return None
    folder = Path(sys.prefix) / f"megatron-core-{version}"
    assert folder.is_dir(), f"{folder} does not exist: run scripts/test.sh, which installs it"
    return folder


def megatron_of(version: str) -> Path:
    """The ``megatron`` folder of any version."""
    folder = folder_of(version)
    if folder is not None:
        return folder / "megatron"
    found = importlib.util.find_spec("megatron")
    assert found is not None and found.submodule_search_locations is not None
    return Path(next(iter(found.submodule_search_locations)))


def installed() -> str:
    """Major and minor version of the installed one, as constraints.txt pins it."""
    lines = (REQUIREMENTS.parents[1] / "constraints.txt").read_text().splitlines()
    (newest,) = [line for line in lines if line.startswith("megatron-core==")]
    return newest.removeprefix("megatron-core==").rpartition(".")[0]


def at_hand() -> tuple[str, ...]:
    """All versions that tests can run with here."""
    return (*OLDER, installed(), *([NEXT] if CHECKOUT is not None else []))
