"""Finds the built-in YAML files of ``configs/``, in a checkout or an installed wheel, by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_ampipe.errors import BadInput, did_you_mean

_PACKAGE = Path(__file__).resolve().parents[1]


def configs_folder() -> Path:
    """The folder ``configs``: setup.py copies it into the wheel; in a checkout it is next to the package."""
    installed = _PACKAGE / "configs"
    return installed if installed.is_dir() else _PACKAGE.parent / "configs"


def shown(path: Path) -> str:
    """A path as shown in messages: for a built-in file the part from ``configs`` on."""
    folder = configs_folder()
    return f"configs/{path.relative_to(folder).as_posix()}" if path.is_relative_to(folder) else str(path)


def config_names(*folders: str) -> dict[str, Path]:
    """The files in these folders of ``configs``, by name without suffix."""
    files = [path for folder in folders for path in (configs_folder() / folder).glob("*.yaml")]
    return {path.stem: path for path in sorted(files)}


def find_config(text: str, *, folders: Sequence[str], flag: str, what: str) -> Path:
    """Find the file that a user names: an existing file, otherwise a built-in one.

    Args:
        text: As the user wrote it: ``my/model.yaml``, or ``mixtral-8x7b``.
        folders: The folders of ``configs`` to search for the name.
        flag: The flag or file in which the user wrote it, for the error.
        what: What kind of file it is, for the error: ``grid``.

    Raises:
        BadInput: it is neither; suggests the closest built-in name.
    """
    if Path(text).is_file():
        return Path(text)
    known = config_names(*folders)
    if text in known:
        return known[text]
    guess = did_you_mean(Path(text).stem, known)
    raise BadInput(
        flag,
        text or "(empty)",
        rule=f"is neither a file nor a built-in {what}",
        remedy=f"{guess} Give a YAML file, or one of {', '.join(sorted(known))}.".lstrip(),
    )
