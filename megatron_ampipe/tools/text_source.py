"""Which text files a dataset is made from, whether they can be used, and how to recognise them again.

Reads only; writes nothing and knows nothing of Megatron. Called by ``ampipe data``.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import stat
import sysconfig
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

# Megatron's index holds a document's length as int32; one place is for the end-of-document token.
MAX_FILE_BYTES = 2**31 - 2

_READ_BYTES = 1 << 20
_TEST_DIRECTORIES = frozenset({"test", "tests", "idle_test"})
_INSTALLED_DIRECTORIES = frozenset({"site-packages", "dist-packages"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSource:
    """A directory tree and the rule that selects files from it.

    Attributes:
        directory: Root of the tree.
        suffixes: Lower-case suffixes with their dot; a file is taken when its name ends with one.
        left_out: Names of directories that are not entered. Hidden ones never are.
    """

    directory: Path
    suffixes: tuple[str, ...]
    left_out: frozenset[str] = frozenset({"__pycache__"})


@dataclass(frozen=True, slots=True)
class FoundFile:
    """One selected file, not yet read. Sizes and times are -1 and ``mode`` 0 when it cannot be looked at."""

    name: str
    path: Path
    size_bytes: int
    modified_ns: int
    mode: int


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """One readable UTF-8 file with the digest of what was read.

    Attributes:
        name: Path below the source's directory, with ``/``.
        path: Where it is.
        size_bytes: Its length.
        sha256: Digest of its content, hexadecimal.
    """

    name: str
    path: Path
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class BadFile:
    """One file (or directory) that cannot be used, and why, as a clause: ``holds a NUL byte``."""

    name: str
    reason: str


def standard_library(suffixes: tuple[str, ...] = (".py",)) -> TextSource:
    """The running Python's own library, without its tests and without installed packages."""
    return TextSource(
        directory=Path(sysconfig.get_path("stdlib")),
        suffixes=suffixes,
        left_out=_TEST_DIRECTORIES | _INSTALLED_DIRECTORIES | {"__pycache__"},
    )


def find_files(
    source: TextSource, *, excluded: Collection[Path] = ()
) -> tuple[list[FoundFile], list[BadFile]]:
    """Select the files, in the order of their names, and name the directories that cannot be listed.

    Args:
        source: What to select.
        excluded: Resolved paths of files and directories to pass over (a command's own output).

    Returns:
        Files that match and are not empty, and unreadable directories.
    """
    found: list[FoundFile] = []
    unlisted: list[BadFile] = []

    def note(error: OSError) -> None:
        name = os.path.relpath(str(error.filename), source.directory)
        unlisted.append(BadFile(name, f"cannot be listed ({error.strerror})"))

    root = source.directory.resolve()
    for place, directories, names in os.walk(root, onerror=note):
        here = Path(place)
        directories[:] = [
            name
            for name in directories
            if not name.startswith(".") and name not in source.left_out and here / name not in excluded
        ]
        for name in names:
            path = here / name
            if not name.startswith(".") and name.lower().endswith(source.suffixes) and path not in excluded:
                found.append(_look_at(path, root=root))
    found.sort(key=lambda file: os.fsencode(file.name))
    return [file for file in found if file.size_bytes], unlisted


def check_files(
    files: Iterable[FoundFile], *, advance: Callable[[int], None] = lambda size_bytes: None
) -> tuple[list[CheckedFile], list[BadFile]]:
    """Read every file once and part those that can be used from those that cannot.

    Args:
        files: From :func:`find_files`.
        advance: Told the size of each file when it has been read.
    """
    good: list[CheckedFile] = []
    bad: list[BadFile] = []
    for file in files:
        outcome = _check(file)
        if isinstance(outcome, CheckedFile):
            good.append(outcome)
        else:
            bad.append(outcome)
        advance(max(0, file.size_bytes))
    return good, bad


def metadata_fingerprint(files: Iterable[FoundFile], unlisted: Iterable[BadFile]) -> str:
    """Digest of names, sizes and modification times: equal means that nothing was touched. Reads no file."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(os.fsencode(file.name) + f"\0{file.size_bytes}\0{file.modified_ns}\n".encode())
    for directory in unlisted:
        digest.update(os.fsencode(directory.name) + b"\0unlisted\n")
    return digest.hexdigest()


def content_fingerprint(files: Iterable[CheckedFile], *, settings: str) -> str:
    """Digest of names and contents and of the settings: equal means that the dataset would be the same."""
    digest = hashlib.sha256(settings.encode() + b"\n")
    for file in files:
        digest.update(os.fsencode(file.name) + f"\0{file.sha256}\n".encode())
    return digest.hexdigest()


def _look_at(path: Path, *, root: Path) -> FoundFile:
    name = path.relative_to(root).as_posix()
    try:
        status = path.stat()
    except OSError:
        return FoundFile(name, path, -1, -1, 0)
    # Only a regular file is told by its size to be empty: a pipe or a device always says 0.
    size_bytes = status.st_size if stat.S_ISREG(status.st_mode) else -1
    return FoundFile(name, path, size_bytes, status.st_mtime_ns, status.st_mode)


def _check(file: FoundFile) -> CheckedFile | BadFile:
    if file.mode and not stat.S_ISREG(file.mode):
        # Opening a pipe would wait for a writer that never comes.
        return BadFile(file.name, "is not a regular file")
    if file.size_bytes > MAX_FILE_BYTES:
        return BadFile(file.name, f"is longer than the {MAX_FILE_BYTES} bytes that Megatron's index can hold")
    digest, size_bytes = hashlib.sha256(), 0
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with file.path.open("rb") as stream:
            while block := stream.read(_READ_BYTES):
                if b"\0" in block:
                    return BadFile(file.name, "holds a NUL byte, so it is not text")
                decoder.decode(block)
                digest.update(block)
                size_bytes += len(block)
        decoder.decode(b"", final=True)
    except OSError as error:
        return BadFile(file.name, f"cannot be read ({error.strerror})")
    except UnicodeDecodeError:
        return BadFile(file.name, "is not UTF-8")
    return CheckedFile(file.name, file.path, size_bytes, digest.hexdigest())
