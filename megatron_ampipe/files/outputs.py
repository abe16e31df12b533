"""Output files: checked for write access before the work begins, and written atomically.

Files that ranks exchange, and datasets, which an interrupted command resumes, are written elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ampipe.errors import BadInput, RunFailed

Report = dict[str, Any]
"""Named values that a command prints or writes as JSON."""
ReportView = Mapping[str, Any]
"""The same where it is only read."""


def shell_line(words: Sequence[str]) -> str:
    """A command line for a shell in one line of text, such as for a comment, whatever characters it has."""
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    """A word quoted for a shell. With line breaks or other control characters: as ``$'...'``, in one line."""
    if word.isprintable():
        return shlex.quote(word)
    plain = word.replace("\\", "\\\\").replace("'", "\\'")
    escaped = (char if char.isprintable() else _escape(char) for char in plain)
    return f"$'{''.join(escaped)}'"


def _escape(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"


def comment(text: str) -> str:
    """Text for the rest of a line that is a comment; line breaks, those of YAML included, become blanks."""
    return " ".join(text.splitlines())


def check(path: Path, *, flag: str) -> None:
    """Refuse an output file, of the argument ``flag``, that could not be written later.

    Raises :class:`BadInput` if it is a directory or a device, or its folder is not writable. A missing folder
    is created when it is written.
    """
    # Replacing a device by a file would break every other program that uses it. If a name is too long,
    # os.path.exists returns False, and Path.exists raises.
    if path.name in ("", "..") or (os.path.exists(path) and not os.path.isfile(path)):
        remedy = "Name a new or an existing file in a folder that you can write to."
        raise BadInput(flag, path, rule="is not a regular file", remedy=remedy)
    check_folder(path.absolute().parent, flag=flag, value=path, name=path.name)


def check_prefix(prefix: Path, *, suffixes: Sequence[str], flag: str) -> list[Path]:
    """:func:`check` several files with a common prefix; returns their paths.

    Also raises :class:`BadInput` if ``prefix`` is a folder or has one of the suffixes.
    """
    if prefix.suffix in suffixes or prefix.name in ("", ".."):
        rule = f"is no name to which {' and '.join(suffixes)} can be added"
        raise BadInput(flag, prefix, rule=rule, remedy="Name a file without a suffix.")
    targets = [prefix.with_name(prefix.name + suffix) for suffix in suffixes]
    for target in targets:
        check(target, flag=flag)
    return targets


def check_folder(folder: Path, *, flag: str, value: object, name: str = "ampipe") -> None:
    """Refuse a folder in which no file can be created; tries it there, or in the nearest existing parent.

    ``folder`` is absolute, and comes from the ``value`` of the argument ``flag``; ``name`` is the name of the
    file that will be written. Raises :class:`BadInput`.
    """
    while not os.path.exists(folder):
        folder = folder.parent
    trial = _partial(folder / name)
    try:
        trial.touch()
        trial.unlink(missing_ok=True)
    except OSError as error:
        rule = f"{folder} cannot be written to ({error.strerror})"
        raise BadInput(flag, value, rule=rule, remedy="Choose a folder that you can write to.") from error


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path, which is renamed to ``path`` at the end; creates a missing folder.

    After a failure the temporary file is removed, and an existing file at ``path`` is unchanged. Raises
    :class:`RunFailed` if it cannot be written.
    """
    partial = _partial(path)
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise RunFailed(f"{path} cannot be written ({error.strerror}). Choose another path.") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def write_text(path: Path, text: str, *, mode: int | None = None) -> None:
    """Write a text file as :func:`atomic_file`, in UTF-8, with the permissions ``mode`` if given."""
    with atomic_file(path) as partial:
        partial.write_text(text, encoding="utf-8")
        if mode is not None:
            partial.chmod(mode)


def _partial(path: Path) -> Path:
    """A temporary path that differs between processes, so that two processes can write the same file."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")
