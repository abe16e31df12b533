"""Determines the folders to mount in a job's container: the results folder, and those of all files it names.

The script itself mounts the submission folder. Called by :mod:`megatron_ampipe.tools.sbatch_command`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ampipe.block.settings import SETTING
from megatron_ampipe.errors import BadInput
from megatron_ampipe.files.inputs import LinedMapping

OUTPUT_FLAGS = (
    *("tensorboard-dir", "data-cache-path", "wandb-save-dir"),
    *(f"ampipe-{setting.key}" for setting in SETTING.values() if setting.is_folder),
)
"""Flags for folders that the run creates."""
_LISTS_OF_PATHS = ("data-args-path", "per-split-data-args-path")
"""Flags for files that contain further paths."""
_DATA_SUFFIXES = ("", ".bin", ".idx")
# Mounting these would hide the image's own files.
_OF_THE_IMAGE = frozenset(map(Path, ("/", "/bin", "/etc", "/lib", "/lib64", "/opt", "/sbin", "/usr", "/var")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """The folders to mount.

    Attributes:
        folders: Absolute paths; each is mounted under the same path.
        made: Those that the script must create first.
        notes: A sentence for each path that does not exist.
    """

    folders: tuple[str, ...] = ()
    made: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def needed(
    flags: Iterable[tuple[str, str]], *, folder: str | None, files: Sequence[Path], targets: Iterable[str]
) -> Needed:
    """Find the folders that a job uses and that are not mounted otherwise.

    Args:
        flags: Pairs of flag and value of the training run, from the command line and files.
        folder: The results folder; None if it is in the submission folder.
        files: The user's YAML files.
        targets: Paths inside the container of the mounts that the user requests.

    Raises:
        BadInput: a path contains a character that pyxis cannot mount.
    """
    found: dict[str, None] = {}
    made: dict[str, None] = {}
    notes: list[str] = []
    known = [Path(target) for target in targets]

    def add(path: Path, *, flag: str, is_made: bool = False) -> None:
        if any(path.is_relative_to(place) for place in known):
            return
        if set(str(path)) & set(":,\n"):
            raise BadInput(
                flag,
                path,
                rule="contains a colon, a comma or a line break, and pyxis cannot mount it",
                remedy="Rename it, or mount a parent folder: --mount /data:/data.",
            )
        found[str(path)] = None
        if is_made:
            made[str(path)] = None

    if folder is not None and (outside := _outside(folder)):
        # The script always creates it.
        add(outside, flag="--folder")
    for file in files:
        if outside := _outside(str(file)):
            for path in _mountable(outside):
                add(path, flag="file")
    for flag, value in _with_lists(flags):
        outside = _outside(value)
        if outside is None:
            continue
        if flag in OUTPUT_FLAGS:
            add(outside, flag=f"--{flag}", is_made=True)
        elif any(os.path.exists(f"{outside}{suffix}") for suffix in _DATA_SUFFIXES):
            for path in _mountable(outside):
                add(path, flag=f"--{flag}")
        elif not any(outside.is_relative_to(place) for place in known):
            notes.append(
                f"--{flag} {value} is not on this machine and is not mounted: the image must contain it, or "
                f"add --mount {outside.parent}:{outside.parent}"
            )
    return Needed(folders=_outermost(found), made=tuple(made), notes=tuple(dict.fromkeys(notes)))


def values_of_words(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Pairs of flag, without dashes, and value for all values of a command line."""
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            if equals:
                yield flag, value
        else:
            yield flag, word


def values_of_file(document: LinedMapping) -> Iterator[tuple[str, str]]:
    """Pairs of flag and value for all values of a settings file."""
    for key, value in document.items():
        if isinstance(value, LinedMapping):
            prefix = "ampipe-" if key == "ampipe" else ""
            yield from ((prefix + inner, text) for inner, text in values_of_file(value))
        else:
            yield from ((key, str(one)) for one in (value if isinstance(value, list) else [value]))


def _with_lists(flags: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    for flag, value in flags:
        yield flag, value
        if flag in _LISTS_OF_PATHS and os.path.isfile(value):
            text = Path(value).read_text(encoding="utf-8", errors="replace")
            yield from ((flag, word) for word in re.findall(r"[^\s\"',\[\]{}]+", text))


def _outside(text: str) -> Path | None:
    """The absolute path of a word, if the word is a path outside the submission folder."""
    if not text.startswith(("/", "../")):
        return None
    path = Path(os.path.normpath(Path.cwd() / text))
    return None if path.is_relative_to(Path.cwd()) and not text.startswith("/") else path


def _mountable(path: Path) -> list[Path]:
    """What to mount for a path: the folder, or the folder of a file, because Megatron writes caches there."""
    if path.is_dir():
        return [path]
    if path.parent not in _OF_THE_IMAGE:
        return [path.parent]
    return [Path(file) for suffix in _DATA_SUFFIXES if os.path.exists(file := f"{path}{suffix}")]


def _outermost(paths: Iterable[str]) -> tuple[str, ...]:
    """The paths without those that are inside another one."""
    every = [Path(path) for path in paths]
    return tuple(
        str(path)
        for path in every
        if not any(path != other and path.is_relative_to(other) for other in every)
    )
