"""Which folders a job needs inside its container: that of its results, and those of files that it names.

The folder of the submission is mounted by the script. Called by :mod:`megatron_ampipe.tools.sbatch_command`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ampipe.errors import BadInput
from megatron_ampipe.yaml_lines import LinedMapping

OUTPUT_FLAGS = ("tensorboard-dir", "data-cache-path", "wandb-save-dir", "ampipe-trace-dir")
"""Flags that name a folder which the run makes."""
_LISTS_OF_PATHS = ("data-args-path", "per-split-data-args-path")
"""Flags that name a file in which further paths stand."""
_DATA_SUFFIXES = ("", ".bin", ".idx")
# To mount these would hide what the image has there.
_OF_THE_IMAGE = frozenset(map(Path, ("/", "/bin", "/etc", "/lib", "/lib64", "/opt", "/sbin", "/usr", "/var")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """What is to be mounted.

    Attributes:
        folders: Absolute; each appears inside under its own path.
        made: Those of them that the script has to make first.
        notes: Sentences about paths that are not there.
    """

    folders: tuple[str, ...] = ()
    made: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def needed(
    flags: Iterable[tuple[str, str]], *, folder: str | None, files: Sequence[Path], targets: Iterable[str]
) -> Needed:
    """The folders that a job names and that nothing else brings into its container.

    Args:
        flags: Of the training run, on the command line and in files: each with one of its values.
        folder: Of the results; None if it lies in the folder of the submission.
        files: The user's own YAML files.
        targets: Where the mounts that the user asks for appear inside.

    Raises:
        BadInput: a path holds a character that pyxis cannot mount.
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
                rule="holds a colon, a comma or a line break, and pyxis cannot mount it",
                remedy="Rename it, or mount a folder above it: --mount /data:/data.",
            )
        found[str(path)] = None
        if is_made:
            made[str(path)] = None

    if folder is not None and (outside := _outside(folder)):
        # Made by the script in any case.
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
                f"--{flag} {value} is not on this machine and is not mounted: the image has to hold it, or "
                f"add --mount {outside.parent}:{outside.parent}"
            )
    return Needed(folders=_outermost(found), made=tuple(made), notes=tuple(dict.fromkeys(notes)))


def values_of_words(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Flag, without dashes, and value for every value of a command line."""
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            if equals:
                yield flag, value
        else:
            yield flag, word


def values_of_file(document: LinedMapping) -> Iterator[tuple[str, str]]:
    """The same of a file of settings."""
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
    """The absolute path that a word means, if it is one outside of the folder of the submission."""
    if not text.startswith(("/", "../")):
        return None
    path = Path(os.path.normpath(Path.cwd() / text))
    return None if path.is_relative_to(Path.cwd()) and not text.startswith("/") else path


def _mountable(path: Path) -> list[Path]:
    """What to mount for a path: a folder, or that of a file or prefix, as Megatron writes caches there."""
    if path.is_dir():
        return [path]
    if path.parent not in _OF_THE_IMAGE:
        return [path.parent]
    return [Path(file) for suffix in _DATA_SUFFIXES if os.path.exists(file := f"{path}{suffix}")]


def _outermost(paths: Iterable[str]) -> tuple[str, ...]:
    """Without those that lie in another one."""
    every = [Path(path) for path in paths]
    return tuple(
        str(path)
        for path in every
        if not any(path != other and path.is_relative_to(other) for other in every)
    )
