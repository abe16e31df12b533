"""Writes checked text files as Megatron's IndexedDataset; a later run resumes an interrupted one.

Chooses no files (that is :mod:`megatron_ampipe.tools.text_source`) and prints nothing. Called by
``ampipe data``.

Work goes to ``PREFIX.partial/``: a journal with the fingerprint of the source, and *shards*, each a small
IndexedDataset of consecutive files that is there whole or not at all. A later run with the same fingerprint
writes only the shards that are missing. Then the shards are joined, and ``PREFIX.json`` (what the dataset
was made from), ``PREFIX.bin`` and ``PREFIX.idx`` take their names, in that order: if there is an
index, the dataset is finished.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy

from megatron_ampipe.errors import BadInput, EnvironmentMissing, RunFailed
from megatron_ampipe.launch.dataset_manifest import DatasetPaths, Manifest
from megatron_ampipe.tools.text_source import CheckedFile

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

# 0xFF occurs in no UTF-8 text, so it is free to end a document, and the vocabulary stays at 256
# (dataset_manifest.VOCABULARY).
END_OF_DOCUMENT = 255
DTYPE = numpy.uint16

# Goes into the fingerprint: a change to what is written for a file must change it.
FORMAT = f"bytes, end of document {END_OF_DOCUMENT}, {DTYPE.__name__}"

# Fewer documents than this leave parts of common --split values without one.
ENOUGH_DOCUMENTS = 200
LEAST_DOCUMENT_BYTES = 1024

# What an interruption loses at most. Smaller would cost: joining a shard takes Megatron 0.3 s.
SHARD_BYTES = 256 << 20


@contextmanager
def partial_directory(paths: DatasetPaths) -> Iterator[None]:
    """Make ``PREFIX.partial/`` and lock it, so that no second ``ampipe data`` uses the same prefix.

    Raises:
        RunFailed: another process holds it.
    """
    paths.partial.mkdir(parents=True, exist_ok=True)
    handle = os.open(paths.partial, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise RunFailed(f"another ampipe data is writing {paths.prefix}. Wait for it to end.") from error
    except OSError:
        # Some network file systems have no locks; everything but two writers at once still works there.
        pass
    try:
        yield
    finally:
        os.close(handle)


def begin(paths: DatasetPaths, *, content: str) -> tuple[bool, bool]:
    """Take over unfinished work of the same source, or remove that of another one.

    Returns:
        Whether there is work to resume, and whether other work was discarded.

    Raises:
        BadInput: ``PREFIX.partial/`` holds files that are not ours.
    """
    found = {path.name for path in paths.partial.iterdir()} - {paths.journal.name + ".new"}
    if found and not paths.journal.exists():
        raise BadInput(
            "directory",
            paths.partial,
            rule="holds files but no journal of ampipe data",
            remedy="Remove it, or choose another --output.",
        )
    journal = {"content": content, "shard_bytes": SHARD_BYTES}
    if found and _read_journal(paths) == journal:
        return True, False
    if found:
        discard(paths)
        paths.partial.mkdir(exist_ok=True)
    _write_text(paths.journal, json.dumps(journal))
    return False, bool(found)


def write_dataset(
    paths: DatasetPaths,
    files: Sequence[CheckedFile],
    *,
    manifest: Manifest,
    advance: Callable[[int], None] = lambda size_bytes: None,
) -> None:
    """Write the missing shards, join all, and give the result its final names.

    Args:
        paths: Where; ``begin`` has prepared ``PREFIX.partial/``.
        files: The documents, in order.
        manifest: What goes to ``PREFIX.json``.
        advance: Told the size of each file when its shard holds it.

    Raises:
        EnvironmentMissing: megatron-core cannot be imported.
        RunFailed: a file is no longer what it was when it was checked.
    """
    builder_class = _builder_class()
    shards = list(_parted(files))
    for number, shard in enumerate(shards):
        target = paths.shard(number)
        if _named(target, ".idx").exists():
            advance(sum(file.size_bytes for file in shard))
            continue
        with _building(builder_class, target) as builder:
            for file in shard:
                for tokens in _documents(file, document_bytes=manifest.document_bytes):
                    builder.add_document(tokens, [tokens.size])
                advance(file.size_bytes)
        _take_name(target, target)
    joined = paths.partial / "joined"
    with _building(builder_class, joined) as builder:
        for number in range(len(shards)):
            builder.add_index(str(paths.shard(number)))
    # From here until the last name is taken there must be no index next to data that it does not describe.
    paths.index.unlink(missing_ok=True)
    remove_cache(paths)
    _write_text(paths.manifest, json.dumps(asdict(manifest), indent=1) + "\n", partial_folder=paths.partial)
    _take_name(joined, paths.prefix)


def is_cache_alone(paths: DatasetPaths) -> bool:
    """Whether the folder called PREFIX, if there is one, holds Megatron's cache of the dataset alone."""
    if not paths.prefix.is_dir():
        return True
    return [path.name for path in paths.prefix.iterdir()] == [paths.cache.name] and paths.cache.is_dir()


def remove_cache(paths: DatasetPaths) -> None:
    """Remove what Megatron keeps of the dataset that stood here: it knows datasets by their name."""
    for folder in paths.cache.glob("*_indices"):
        for path in [*folder.glob("*.npy"), *folder.glob("*-description.txt")]:
            path.unlink()
    for folder in [*paths.cache.glob("*_indices"), paths.cache, paths.prefix]:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def num_documents(size_bytes: int, *, document_bytes: int) -> int:
    """How many documents a file is cut into."""
    return -(-size_bytes // document_bytes) if document_bytes else 1


def discard(paths: DatasetPaths) -> None:
    """Remove ``PREFIX.partial/``, the journal last, as it is what marks the directory as ours."""
    for path in sorted(paths.partial.iterdir(), key=lambda path: path == paths.journal):
        path.unlink()
    paths.partial.rmdir()


def _builder_class() -> type[IndexedDatasetBuilder]:
    try:
        # torch's note that it found no GPU would alarm, and a dataset needs none.
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    except ImportError as error:
        raise EnvironmentMissing(
            f"ampipe data writes Megatron's dataset format and needs megatron-core ({error}). "
            "Install it: pip install megatron-core"
        ) from error
    return IndexedDatasetBuilder


def _parted(files: Sequence[CheckedFile]) -> Iterator[list[CheckedFile]]:
    """Cut the files into runs of about ``SHARD_BYTES``, the same ones every time."""
    shard: list[CheckedFile] = []
    size_bytes = 0
    for file in files:
        if shard and size_bytes + file.size_bytes > SHARD_BYTES:
            yield shard
            shard, size_bytes = [], 0
        shard.append(file)
        size_bytes += file.size_bytes
    if shard:
        yield shard


def _documents(file: CheckedFile, *, document_bytes: int) -> Iterator[numpy.ndarray]:
    """The tokens of each document of a file."""
    try:
        content = file.path.read_bytes()
    except OSError as error:
        raise RunFailed(
            f"{file.path} can no longer be read ({error.strerror}). Run the command again."
        ) from error
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise RunFailed(f"{file.path} changed while the dataset was written. Run the command again.")
    ends = _ends(content, num_documents(len(content), document_bytes=document_bytes))
    for begin, end in itertools.pairwise([0, *ends]):
        tokens = numpy.empty(end - begin + 1, dtype=DTYPE)
        tokens[:-1] = numpy.frombuffer(content, dtype=numpy.uint8, count=end - begin, offset=begin)
        tokens[-1] = END_OF_DOCUMENT
        yield tokens


def _ends(content: bytes, number: int) -> list[int]:
    """Where each of ``number`` documents of similar length ends: after a line, else after a character."""
    size = len(content) // number
    ends = []
    for index in range(1, number):
        end = index * len(content) // number
        line_end = content.rfind(b"\n", end - size // 4, end) + 1
        # Bytes that continue a character of UTF-8 begin with the bits 10.
        while not line_end and content[end] & 0xC0 == 0x80:
            end -= 1
        ends.append(line_end or end)
    return [*ends, len(content)]


@contextmanager
def _building(builder_class: type[IndexedDatasetBuilder], prefix: Path) -> Iterator[IndexedDatasetBuilder]:
    """A builder whose files are called ``PREFIX.bin.new`` and ``PREFIX.idx.new``."""
    builder = builder_class(str(_named(prefix, ".bin.new")), dtype=DTYPE)
    try:
        yield builder
        builder.finalize(str(_named(prefix, ".idx.new")))
    finally:
        builder.data_file.close()


def _take_name(built: Path, final: Path) -> None:
    for suffix in (".bin", ".idx"):
        _sync(_named(built, suffix + ".new"))
        os.replace(_named(built, suffix + ".new"), _named(final, suffix))
    _sync(final.parent)


def _write_text(path: Path, text: str, *, partial_folder: Path | None = None) -> None:
    partial = (partial_folder or path.parent) / (path.name + ".new")
    partial.write_text(text)
    _sync(partial)
    os.replace(partial, path)


def _read_journal(paths: DatasetPaths) -> object:
    try:
        return json.loads(paths.journal.read_text())
    except (OSError, ValueError):
        return None


def _sync(path: Path) -> None:
    """Have the disk hold what a name is about to promise, also after a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _named(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)
