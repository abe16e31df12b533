"""``ampipe data``: a directory of text files becomes a dataset that Megatron trains on, byte by byte.

Not a tokenizer: a token is a byte (0 to 255), a document is a file or a part of one, and 255, which occurs in
no UTF-8 text, ends each document. That is the vocabulary of megatron-core 0.19's ``NullTokenizer``, whose
end-of-document token is ``vocab_size - 1`` unless ``--null-tokenizer-eod-id`` says otherwise. Train with::

    --data-path PREFIX --tokenizer-type NullTokenizer --vocab-size 256

Called by :mod:`megatron_ampipe.cli`. The files are chosen and checked in
:mod:`megatron_ampipe.tools.text_source` and written in :mod:`megatron_ampipe.tools.dataset_writer`.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_ampipe.errors import BadInput, RunFailed
from megatron_ampipe.launch.dataset_manifest import VOCABULARY, DatasetPaths, Manifest, read_manifest
from megatron_ampipe.tools import dataset_writer
from megatron_ampipe.tools.text_source import (
    BadFile,
    CheckedFile,
    FoundFile,
    TextSource,
    check_files,
    content_fingerprint,
    find_files,
    metadata_fingerprint,
    standard_library,
)

DEFAULT_SUFFIXES = (
    ".txt",
    ".md",
    ".rst",
    ".tex",
    ".py",
    ".c",
    ".h",
    ".cc",
    ".cpp",
    ".cu",
    ".go",
    ".java",
    ".js",
    ".rs",
    ".sh",
)

_NAMED_BAD_FILES = 5
_LEAST_GIVEN_BYTES = 64

_EPILOG = """\
examples:
  ampipe data --output data/stdlib
      Python's own library source (about 12 MB), to try things with
  ampipe data ~/books --output data/books --suffixes .txt,.md
      all .txt and .md files below ~/books
  ampipe data ~/books --output data/books --document-bytes 20000
      the same in documents of about 20 kB each

Then train on it with:
  --data-path data/books --tokenizer-type NullTokenizer --vocab-size 256

Megatron gives whole documents to training, validation and test, as --split says. So that a few files are
enough for --split 99,1,0, files are cut where there are fewer than 200 of them; with --document-bytes 0 they
stay whole.
Hidden files and directories and empty files are left out. A run that was interrupted is resumed by the same
command; until it is finished, there are no files with the final names.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ampipe data``."""
    parser.description = (
        "Turn a directory of text files into a dataset that Megatron trains on, byte by byte."
    )
    parser.epilog = _EPILOG
    parser.add_argument(
        "directory",
        metavar="DIRECTORY",
        type=Path,
        nargs="?",
        help="tree of UTF-8 text files; without it, the source of the running Python's standard library",
    )
    parser.add_argument(
        "--output",
        metavar="PREFIX",
        type=Path,
        required=True,
        help="write PREFIX.bin and PREFIX.idx, for --data-path, and PREFIX.json, which says what is in them",
    )
    parser.add_argument(
        "--suffixes",
        metavar=".A,.B",
        action="append",
        help=f"take files with these suffixes (default {','.join(DEFAULT_SUFFIXES)}; .py without DIRECTORY)",
    )
    parser.add_argument(
        "--document-bytes",
        metavar="N",
        type=int,
        help="cut files that are longer than N bytes into documents of about N bytes, at ends of lines; "
        f"0 cuts none (default: 0 for {dataset_writer.ENOUGH_DOCUMENTS} files or more; else what makes about "
        f"as many documents, but at least {dataset_writer.LEAST_DOCUMENT_BYTES})",
    )
    parser.add_argument(
        "--skip-bad", action="store_true", help="leave out files that are unreadable or not UTF-8 text"
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace an existing dataset PREFIX, and remove Megatron's cache of it",
    )


def run(arguments: argparse.Namespace) -> int:
    """Make the dataset, or say that it is there already.

    Raises:
        BadInput: the source or the output cannot be used; nothing has been written.
        EnvironmentMissing: megatron-core is absent.
        RunFailed: writing failed; the same command resumes.
    """
    paths = _output(arguments.output)
    source = _source(arguments.directory, suffixes=_suffixes(arguments.suffixes))
    own = {p.resolve() for p in (paths.manifest, paths.data, paths.index, paths.partial, paths.prefix)}
    found, unlisted = find_files(source, excluded=own)
    document_bytes = _document_bytes(arguments.document_bytes, found)
    # What is cut otherwise is another dataset.
    metadata = metadata_fingerprint(found, unlisted) + (f" {document_bytes}" if document_bytes else "")
    finished = None if arguments.force else _finished(paths)
    if finished and finished.metadata == metadata and (arguments.skip_bad or not finished.skipped):
        return _already(paths, finished)

    files, skipped = _checked(source, found, unlisted, skip_bad=arguments.skip_bad)
    manifest = _manifest(source, files, skipped=skipped, metadata=metadata, document_bytes=document_bytes)
    if finished and finished.content == manifest.content:
        return _already(paths, finished)
    if finished:
        raise BadInput(
            "--output",
            paths.prefix,
            rule=f"holds a dataset of {_described(finished)}, and this one is of {_described(manifest)}",
            remedy="Add --force to replace it, or choose another --output.",
        )
    try:
        _write(paths, files, manifest=manifest)
    except OSError as error:
        raise RunFailed(
            f"{error.filename or paths.prefix} cannot be written ({error.strerror}). Nothing unfinished "
            f"has the name {paths.prefix}; when that is fixed, the same command resumes."
        ) from error
    print(f"wrote {paths.data} and {paths.index}: {_counts(manifest)}")
    print(_how_to_train(paths))
    return 0


def _output(prefix: Path) -> DatasetPaths:
    # Megatron keeps a cache in a folder that is called as the dataset.
    if not prefix.name or not dataset_writer.is_cache_alone(DatasetPaths(prefix)):
        raise BadInput(
            "--output", prefix, rule="is a directory", remedy=f"Name the files too: {prefix / 'corpus'}."
        )
    if prefix.suffix in (".bin", ".idx", ".json"):
        raise BadInput(
            "--output",
            prefix,
            rule="is the name of one file, and a dataset has several",
            remedy=f"Leave the suffix away: {prefix.with_suffix('')}.",
        )
    return DatasetPaths(prefix)


def _suffixes(given: Sequence[str] | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    suffixes = [suffix.strip().lower() for part in given for suffix in part.split(",")]
    for suffix in suffixes:
        if len(suffix) < 2 or not suffix.startswith(".") or "/" in suffix:
            raise BadInput(
                "--suffixes",
                ",".join(given),
                rule=f"{suffix!r} is not a suffix: it begins with a dot",
                remedy="Separate suffixes by commas: --suffixes .txt,.md.",
            )
    return tuple(dict.fromkeys(suffixes))


def _source(directory: Path | None, *, suffixes: tuple[str, ...] | None) -> TextSource:
    if directory is None:
        return standard_library(suffixes) if suffixes else standard_library()
    remedy = "Name a directory of text files, or none for Python's own source."
    try:
        missing = not directory.exists()
    except OSError as error:
        raise BadInput(
            "DIRECTORY", directory, rule=f"cannot be opened ({error.strerror})", remedy=remedy
        ) from error
    if missing:
        raise BadInput("DIRECTORY", directory, rule="does not exist", remedy=remedy)
    if not directory.is_dir():
        raise BadInput("DIRECTORY", directory, rule="is not a directory", remedy=remedy)
    return TextSource(directory=directory, suffixes=suffixes or DEFAULT_SUFFIXES)


def _document_bytes(given: int | None, found: Sequence[FoundFile]) -> int:
    """From which length on files are cut; 0 for none."""
    if given is not None and given != 0 and given < _LEAST_GIVEN_BYTES:
        raise BadInput(
            "--document-bytes",
            given,
            rule=f"is neither 0, which cuts nothing, nor {_LEAST_GIVEN_BYTES} or more",
            remedy="Use --document-bytes 20000.",
        )
    if given is not None or len(found) >= dataset_writer.ENOUGH_DOCUMENTS:
        return given or 0
    total = sum(max(0, file.size_bytes) for file in found)
    return max(dataset_writer.LEAST_DOCUMENT_BYTES, total // dataset_writer.ENOUGH_DOCUMENTS)


def _finished(paths: DatasetPaths) -> Manifest | None:
    """The manifest of the dataset that stands there, None where there is none."""
    if not any(path.exists() for path in (paths.manifest, paths.data, paths.index)):
        return None
    manifest = read_manifest(paths)
    if manifest is not None and not paths.index.exists():
        # Interrupted while the files took their names: the index comes last.
        return None
    if manifest is None or not paths.data.exists():
        raise BadInput(
            "--output",
            paths.prefix,
            rule="files stand there that ampipe data did not write, or not all of them",
            remedy="Add --force to replace them, or choose another --output.",
        )
    return manifest


def _checked(
    source: TextSource, found: Sequence[FoundFile], unlisted: list[BadFile], *, skip_bad: bool
) -> tuple[list[CheckedFile], int]:
    """Read all files before anything is written; refuse what cannot be used."""
    total = sum(max(0, file.size_bytes) for file in found)
    with _progress("checking", total) as advance:
        files, unusable = check_files(found, advance=advance)
    bad = [*unlisted, *unusable]
    if bad and not skip_bad:
        named = "; ".join(f"{file.name} {file.reason}" for file in bad[:_NAMED_BAD_FILES])
        more = f"; and {len(bad) - _NAMED_BAD_FILES} more" if len(bad) > _NAMED_BAD_FILES else ""
        raise BadInput(
            "DIRECTORY",
            source.directory,
            rule=f"every file must be readable UTF-8 text, and {len(bad)} cannot be used: {named}{more}",
            remedy="Add --skip-bad to leave them out, or select fewer files with --suffixes.",
        )
    if not files:
        raise BadInput(
            "DIRECTORY",
            source.directory,
            rule=f"holds no usable text file with the suffix {' or '.join(source.suffixes)}",
            remedy="Name the suffixes of your files: --suffixes .txt,.md.",
        )
    return files, len(bad)


def _manifest(
    source: TextSource, files: Sequence[CheckedFile], *, skipped: int, metadata: str, document_bytes: int
) -> Manifest:
    size_bytes = sum(file.size_bytes for file in files)
    documents = sum(
        dataset_writer.num_documents(file.size_bytes, document_bytes=document_bytes) for file in files
    )
    settings = dataset_writer.FORMAT + (f", documents of {document_bytes} bytes" if document_bytes else "")
    return Manifest(
        source=str(source.directory.resolve()),
        suffixes=source.suffixes,
        files=len(files),
        documents=documents,
        document_bytes=document_bytes,
        size_bytes=size_bytes,
        tokens=size_bytes + documents,
        vocabulary=VOCABULARY,
        skipped=skipped,
        content=content_fingerprint(files, settings=settings),
        metadata=metadata,
    )


def _write(paths: DatasetPaths, files: Sequence[CheckedFile], *, manifest: Manifest) -> None:
    with dataset_writer.partial_directory(paths), warnings.catch_warnings():
        # Megatron warns of each optional package that is absent; none of them matters for a dataset.
        warnings.simplefilter("ignore")
        resumed, discarded = dataset_writer.begin(paths, content=manifest.content)
        if resumed:
            print(f"resuming the unfinished work in {paths.partial}")
        if discarded:
            print(f"discarded unfinished work in {paths.partial}: the source files or settings changed since")
        with _progress("writing", manifest.size_bytes) as advance:
            dataset_writer.write_dataset(paths, files, manifest=manifest, advance=advance)
        dataset_writer.discard(paths)


def _already(paths: DatasetPaths, manifest: Manifest) -> int:
    print(f"{paths.prefix} is up to date with {manifest.source}: {_counts(manifest)}")
    print(_how_to_train(paths))
    return 0


def _counts(manifest: Manifest) -> str:
    counts = f"{manifest.files:,} files, {manifest.size_bytes:,} bytes, {manifest.tokens:,} tokens"
    if manifest.documents != manifest.files:
        counts += f" in {manifest.documents:,} documents"
    return counts + (f" ({manifest.skipped:,} bad files left out)" if manifest.skipped else "")


def _described(manifest: Manifest) -> str:
    described = f"{manifest.files:,} {','.join(manifest.suffixes)} files from {manifest.source}"
    return described + (f", cut at {manifest.document_bytes:,} bytes" if manifest.document_bytes else "")


def _how_to_train(paths: DatasetPaths) -> str:
    vocabulary = VOCABULARY
    return f"train with: --data-path {paths.prefix} --tokenizer-type NullTokenizer --vocab-size {vocabulary}"


@contextmanager
def _progress(doing: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal while something is done; nothing when stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda size_bytes: None
        return
    from tqdm import tqdm

    with tqdm(total=total_bytes, desc=doing, unit="B", unit_scale=True, leave=False) as bar:
        yield lambda size_bytes: bar.update(size_bytes) and None
