"""Where the YAML files of ``configs/`` lie, in a checkout and in an installed wheel, and what a name means.

Does not read them. Called by every tool that takes a file or the name of one of ours: launches, grids,
clusters.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from megatron_ampipe.errors import BadInput

SUFFIX = ".yaml"
_PACKAGE = Path(__file__).resolve().parent


def configs_folder() -> Path:
    """The folder ``configs``: setup.py puts a copy into a wheel; a checkout has it beside the package."""
    installed = _PACKAGE / "configs"
    return installed if installed.is_dir() else _PACKAGE.parent / "configs"


def shown(path: Path) -> str:
    """A path as messages name it: of one of ours the part from ``configs`` on, wherever it is installed."""
    folder = configs_folder()
    return f"configs/{path.relative_to(folder).as_posix()}" if path.is_relative_to(folder) else str(path)


def config_names(*folders: str) -> dict[str, Path]:
    """By name without suffix, the files of these folders of ``configs``."""
    files = [path for folder in folders for path in (configs_folder() / folder).glob(f"*{SUFFIX}")]
    return {path.stem: path for path in sorted(files)}


def find_config(text: str, *, folders: Sequence[str], flag: str, what: str) -> Path:
    """The file that a user means: one that exists, else the name of one of ours.

    Args:
        text: As the user wrote it: ``my/model.yaml``, or ``mixtral-8x7b``.
        folders: Of ``configs``, in which to look for the name.
        flag: Where the user wrote it, for the error.
        what: One of ours in a word, for the error: ``grid``.

    Raises:
        BadInput: neither; names the nearest of ours.
    """
    if Path(text).is_file():
        return Path(text)
    known = config_names(*folders)
    if text in known:
        return known[text]
    near = difflib.get_close_matches(Path(text).stem, known, n=1)
    guess = f"Did you mean {near[0]}? " if near else ""
    raise BadInput(
        flag,
        text or "(empty)",
        rule=f"is neither a file nor a {what} of ours",
        remedy=f"{guess}Give a YAML file, or one of {', '.join(sorted(known))}.",
    )
