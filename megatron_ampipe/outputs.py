"""Files that a command writes for its user: tried before work begins, and under their name only when whole.

Not for what ranks write for each other, nor for datasets, which resume. Called by every tool that has an
argument for an output, and by the records and timelines that several of them write.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_ampipe.errors import BadInput, RunFailed

_DEVICES = Path("/dev")


def check(path: Path, *, flag: str, makes_folder: bool = False) -> None:
    """Refuse a file that could not be written later, by writing next to it and taking that away again.

    Args:
        path: Where the file is to be.
        flag: The argument that names it, for the error.
        makes_folder: Whether a folder that is not there is made when the file is written.

    Raises:
        BadInput: it is a directory or a device, or nothing can be written where it should lie.
    """
    # Those of os.path, which say no of a name that is too long, where a Path raises.
    if os.path.isdir(path):
        remedy = f"Name a file in it, for example {path / 'result'}."
        raise BadInput(flag, path, rule="is a directory", remedy=remedy)
    # To replace a device by a file would take it away from every other program.
    if (os.path.exists(path) and not os.path.isfile(path)) or path.absolute().parent == _DEVICES:
        raise BadInput(
            flag, path, rule="is no plain file", remedy="Name a file, which may be new, in a folder of yours."
        )
    check_folder(path.absolute().parent, flag=flag, value=path, makes_folder=makes_folder, name=path.name)


def check_prefix(
    prefix: Path, *, suffixes: Sequence[str], flag: str, makes_folder: bool = False
) -> list[Path]:
    """:func:`check` for each of several files that share the begin of their name.

    Returns:
        The files: ``prefix`` with each of ``suffixes``.

    Raises:
        BadInput: as :func:`check`, or ``prefix`` ends in no name.
    """
    if prefix.name in ("", ".."):
        remedy = f"Name the files too: {prefix / 'picture'}."
        raise BadInput(flag, prefix, rule="is a directory", remedy=remedy)
    targets = [prefix.with_name(prefix.name + suffix) for suffix in suffixes]
    for target in targets:
        check(target, flag=flag, makes_folder=makes_folder)
    return targets


def check_folder(
    folder: Path, *, flag: str, value: object, makes_folder: bool = False, name: str = "ampipe"
) -> None:
    """Refuse a folder in which no file can be made, by making one and taking it away again.

    Args:
        folder: An absolute path.
        flag: The argument that is wrong if it cannot, for the error.
        value: What that argument says.
        makes_folder: Whether it is made, where it is not there, when something is written.
        name: Of the file that is to lie there.

    Raises:
        BadInput: it is not there, or nothing can be written in it.
    """
    there = folder
    while makes_folder and not os.path.exists(there):
        there = there.parent
    if not os.path.exists(there):
        rule, remedy = f"{folder} is not there", "Make it, or choose another place."
        raise BadInput(flag, value, rule=rule, remedy=remedy)
    trial = _partial(there / name)
    try:
        trial.touch()
        trial.unlink(missing_ok=True)
    except OSError as error:
        raise BadInput(
            flag,
            value,
            rule=f"{there} cannot be written to ({error.strerror})",
            remedy="Choose a place in a folder of yours.",
        ) from error


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A name to write to. What was written takes the name ``path`` at the end of the block, at once.

    After a failure it is gone, and a file that was at ``path`` before is as it was. A folder that is not
    there is made.

    Raises:
        RunFailed: it cannot be written.
    """
    partial = _partial(path)
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise RunFailed(f"{path} cannot be written ({error.strerror}). Choose another place.") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def write_text(path: Path, text: str, *, mode: int | None = None) -> None:
    """Write a file of text, whole or not at all.

    Args:
        path: Of the file.
        text: What it holds; UTF-8.
        mode: Its permissions; those that a new file gets for None.

    Raises:
        RunFailed: it cannot be written.
    """
    with atomic_file(path) as partial:
        partial.write_text(text, encoding="utf-8")
        if mode is not None:
            partial.chmod(mode)


def _partial(path: Path) -> Path:
    """Another one for every process, so that two that write the same file do not meet."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")
