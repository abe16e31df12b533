"""Lays out folders that look like a Megatron-LM checkout, of each supported version."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

from tests.megatron.launcher import REPOSITORY

SCRIPTS = ("pretrain_gpt.py", "model_builder.py")


def megatron_of(version: str | None) -> Path:
    """The ``megatron`` folder of an installed version: the environment's own, or one that test.sh puts beside it.

    Args:
        version: Major and minor, such as ``"0.18"``; None for the one in the environment.
    """
    if version is None:
        (folder,) = importlib.util.find_spec("megatron").submodule_search_locations
        return Path(folder)
    return REPOSITORY / ".venv" / f"megatron-core-{version}" / "megatron"


def lay_out(folder: Path, version: str | None = None, *, copy: bool = False) -> Path:
    """A checkout in ``folder``.

    Args:
        folder: Is made.
        version: See :func:`megatron_of`.
        copy: With a ``megatron`` of its own to write in, instead of a link.

    Returns:
        Its training script.
    """
    folder.mkdir()
    megatron = megatron_of(version)
    assert megatron.is_dir(), f"{megatron} is not there: run scripts/test.sh, which installs it"
    if copy:
        shutil.copytree(megatron, folder / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    else:
        (folder / "megatron").symlink_to(megatron)
    for name in SCRIPTS:
        shutil.copy(Path(__file__).parent / name, folder)
    return folder / SCRIPTS[0]
