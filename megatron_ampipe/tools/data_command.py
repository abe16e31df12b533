"""``ampipe data``: a directory of text files becomes a dataset that Megatron trains on, byte by byte.

Not a tokenizer: a token is a byte (0 to 255), a document is a file or a part of one, and 255, which occurs in
no UTF-8 text, ends each document. That is the vocabulary of megatron-core 0.19's ``NullTokenizer``, whose
end-of-document token is ``vocab_size - 1`` unless ``--null-tokenizer-eod-id`` says otherwise. Train with::

    --data-path PREFIX --tokenizer-type NullTokenizer --vocab-size 256

Megatron's ``IndexedDatasetBuilder`` writes. ``PREFIX.json`` (what the dataset was made from), ``PREFIX.bin``
and ``PREFIX.idx`` take their names at the end, in that order: if there is an index, the dataset is finished.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import logging
import os
import shutil
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
from tqdm import tqdm

from megatron_ampipe.errors import BadInput, EnvironmentMissing, RunFailed
from megatron_ampipe.files import outputs

END_OF_DOCUMENT = 255
VOCABULARY = 256
SUFFIXES = ".txt,.md,.rst,.tex,.py,.c,.h,.cc,.cpp,.cu,.go,.java,.js,.rs,.sh"
# Fewer documents than this leave parts of common --split values without one.
_ENOUGH_DOCUMENTS = 200
_LEAST_DOCUMENT_BYTES, _LEAST_GIVEN_BYTES = 1024, 64
# Megatron's index holds a document's length as int32; one place is for the end-of-document token.
_MAX_FILE_BYTES = 2**31 - 2
_NAMED_BAD_FILES = 5
_NOT_ENTERED = {"__pycache__"}
_NOT_OF_THE_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages"}

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
Hidden files and directories and empty files are left out. Until it is finished, there are no files with the
final names; after an interruption, run it again.
"""


@dataclass(slots=True)
class _Source:
    """The selected files of a directory.

    Attributes:
        paths: In the order of their names; none is empty. :meth:`contents` removes those that are bad.
        bad: What cannot be used, and why.
        digest: Of the names and contents that were read, hexadecimal.
    """

    directory: Path
    paths: list[Path] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    digest: str = ""

    def contents(self, doing: str) -> Iterator[bytes]:
        """The content of each file that can be used; a bar shows the progress on a terminal."""
        digest = hashlib.sha256()
        # disable=None: no bar where stderr is no terminal.
        with tqdm(
            total=_total(self.paths), desc=doing, unit="B", unit_scale=True, leave=False, disable=None
        ) as bar:
            for path in list(self.paths):
                name = path.relative_to(self.directory).as_posix()
                try:
                    content = _read(path)
                except ValueError as error:
                    why = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
                    self.bad.append(f"{name} {why}")
                    self.paths.remove(path)
                    continue
                digest.update(os.fsencode(name) + b"\0" + hashlib.sha256(content).digest())
                yield content
                bar.update(len(content))
        self.digest = digest.hexdigest()


def _total(paths: Sequence[Path]) -> int:
    return sum(os.path.getsize(path) for path in paths if os.path.isfile(path))


def _read(path: Path) -> bytes:
    """The content of a text file; ValueError with the reason, as a clause, where it is none."""
    # Opening a pipe would wait for a writer that never comes.
    if not os.path.isfile(path):
        raise ValueError("is not a regular file")
    if os.path.getsize(path) > _MAX_FILE_BYTES:
        raise ValueError("is too long for Megatron's index")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from error
    content.decode()
    if b"\0" in content:
        raise ValueError("holds a NUL byte, so it is not text")
    return content


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
        help=f"take files with these suffixes (default: {SUFFIXES}; .py without DIRECTORY)",
    )
    parser.add_argument(
        "--document-bytes",
        metavar="N",
        type=int,
        help="cut files that are longer than N bytes into documents of about N bytes, at ends of lines; "
        f"0 cuts none (default: 0 for {_ENOUGH_DOCUMENTS} files or more; else what makes about "
        f"as many documents, but at least {_LEAST_DOCUMENT_BYTES})",
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
        RunFailed: writing failed.
    """
    prefix: Path = arguments.output
    # Megatron keeps a cache in a folder that is called as the dataset.
    if prefix.suffix in (".bin", ".idx", ".json") or (prefix.is_dir() and not (prefix / "cache").is_dir()):
        raise BadInput(
            "--output",
            prefix,
            rule="is a directory, or ends with a suffix, and is the begin of several files' names",
            remedy="Name the dataset: --output data/corpus.",
        )
    source, suffixes = _find(arguments.directory, arguments.suffixes, prefix)
    document_bytes = _document_bytes(arguments.document_bytes, source.paths)
    sizes = [len(content) for content in source.contents("checking")]
    if source.bad and not arguments.skip_bad:
        more = f"; and {len(source.bad) - _NAMED_BAD_FILES} more" * (len(source.bad) > _NAMED_BAD_FILES)
        raise BadInput(
            "DIRECTORY",
            source.directory,
            rule=f"every file must be readable UTF-8 text, and {len(source.bad)} cannot be used: "
            f"{'; '.join(source.bad[:_NAMED_BAD_FILES])}{more}",
            remedy="Add --skip-bad to leave them out, or select fewer files with --suffixes.",
        )
    if not sizes:
        raise BadInput(
            "DIRECTORY",
            source.directory,
            rule=f"holds no usable text file with the suffix {' or '.join(suffixes)}",
            remedy="Name the suffixes of your files: --suffixes .txt,.md.",
        )
    documents = sum(_num_documents(size, document_bytes) for size in sizes)
    manifest: dict[str, Any] = {
        "source": str(source.directory),
        "suffixes": suffixes,
        "files": len(sizes),
        "documents": documents,
        "document_bytes": document_bytes,
        "size_bytes": sum(sizes),
        "tokens": sum(sizes) + documents,
        "vocabulary": VOCABULARY,
        "skipped": len(source.bad),
        "content": source.digest,
    }
    if _must_be_written(prefix, manifest, force=arguments.force):
        try:
            _write(prefix, source, manifest)
        except OSError as error:
            raise RunFailed(
                f"{error.filename or prefix} cannot be written ({error.strerror}). Nothing unfinished has "
                f"the name {prefix}."
            ) from error
        done = f"wrote {_named(prefix, '.bin')} and {_named(prefix, '.idx')}"
    else:
        done = f"{prefix} is up to date with {source.directory}"
    counts = f"{len(sizes):,} files, {sum(sizes):,} bytes, {manifest['tokens']:,} tokens"
    skipped = f" ({len(source.bad):,} bad files left out)" if source.bad else ""
    print(f"{done}: {counts} in {documents:,} documents{skipped}")
    print(f"train with: --data-path {prefix} --tokenizer-type NullTokenizer --vocab-size {VOCABULARY}")
    return 0


def _find(directory: Path | None, given: str | None, prefix: Path) -> tuple[_Source, list[str]]:
    """The files of a directory, else of Python's library, and the suffixes that selected them."""
    suffixes = [suffix.strip().lower() for suffix in (given or (SUFFIXES if directory else ".py")).split(",")]
    if not all(suffix.startswith(".") and len(suffix) > 1 for suffix in suffixes):
        raise BadInput("--suffixes", given, rule="must begin with a dot", remedy="Use --suffixes .txt,.md.")
    library = Path(sysconfig.get_path("stdlib"))
    if directory is not None and not directory.is_dir():
        raise BadInput(
            "DIRECTORY",
            directory,
            rule="is not a directory",
            remedy="Name a directory of text files, or none for Python's own source.",
        )
    source = _Source((directory or library).resolve())
    left_out = _NOT_ENTERED if directory else _NOT_ENTERED | _NOT_OF_THE_LIBRARY
    own = {_named(prefix.resolve(), suffix) for suffix in (".json", ".bin", ".idx")}

    def note(error: OSError) -> None:
        source.bad.append(f"{error.filename} cannot be listed ({error.strerror})")

    for place, folders, names in source.directory.walk(on_error=note):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
        for path in (place / name for name in names if not name.startswith(".")):
            is_empty = os.path.isfile(path) and os.path.getsize(path) == 0
            if path.name.lower().endswith(tuple(suffixes)) and not is_empty and path not in own:
                source.paths.append(path)
    source.paths.sort(key=lambda path: os.fsencode(path.relative_to(source.directory).as_posix()))
    return source, suffixes


def _document_bytes(given: int | None, paths: Sequence[Path]) -> int:
    """From which length on files are cut; 0 for none."""
    if given is not None and given != 0 and given < _LEAST_GIVEN_BYTES:
        raise BadInput(
            "--document-bytes",
            given,
            rule=f"is neither 0, which cuts nothing, nor {_LEAST_GIVEN_BYTES} or more",
            remedy="Use --document-bytes 20000.",
        )
    if given is not None or len(paths) >= _ENOUGH_DOCUMENTS:
        return given or 0
    return max(_LEAST_DOCUMENT_BYTES, _total(paths) // _ENOUGH_DOCUMENTS)


def _num_documents(size_bytes: int, document_bytes: int) -> int:
    """How many documents a file is cut into."""
    return -(-size_bytes // document_bytes) if document_bytes else 1


def _must_be_written(prefix: Path, manifest: dict[str, Any], *, force: bool) -> bool:
    """Whether the dataset is not there yet; another one is only replaced with ``--force``."""
    if force or not any(_named(prefix, suffix).exists() for suffix in (".json", ".bin", ".idx")):
        return True
    try:
        there = json.loads(_named(prefix, ".json").read_text())
        is_same = all(there[key] == manifest[key] for key in ("content", "document_bytes"))
    except (OSError, ValueError, TypeError, KeyError):
        is_same = False
    else:
        if not _named(prefix, ".idx").exists():
            # Interrupted while the files took their names.
            return True
    if not is_same or not _named(prefix, ".bin").exists():
        raise BadInput(
            "--output",
            prefix,
            rule="holds another dataset, or files that ampipe data did not write",
            remedy="Add --force to replace them, or choose another --output.",
        )
    return False


def _write(prefix: Path, source: _Source, manifest: dict[str, Any]) -> None:
    try:
        with warnings.catch_warnings():
            # Megatron warns of each optional package that is absent, torch that it found no GPU.
            warnings.simplefilter("ignore")
            logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
            from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    except ImportError as error:
        raise EnvironmentMissing(
            f"ampipe data writes Megatron's dataset format and needs megatron-core ({error}). "
            "Install it: pip install megatron-core"
        ) from error
    data, index = (_named(prefix, f"{suffix}.partial") for suffix in (".bin", ".idx"))
    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(str(data), dtype=numpy.uint16)
    try:
        for content in source.contents("writing"):
            for tokens in _documents(content, manifest["document_bytes"]):
                builder.add_document(tokens, [tokens.size])
        if source.digest != manifest["content"]:
            raise RunFailed(f"files in {source.directory} changed while they were read. Run it again.")
        builder.finalize(str(index))
        for path in (data, index):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        # From here on there must be no index next to data that it does not describe.
        _named(prefix, ".idx").unlink(missing_ok=True)
        # Megatron knows datasets by their names, and would take what it keeps of the old one for this one.
        for folder in (prefix / "cache").glob("*_indices"):
            shutil.rmtree(folder)
        outputs.write_text(_named(prefix, ".json"), json.dumps(manifest, indent=1) + "\n")
        os.replace(data, _named(prefix, ".bin"))
        os.replace(index, _named(prefix, ".idx"))
    finally:
        builder.data_file.close()
        for path in (data, index):
            with contextlib.suppress(OSError):
                path.unlink()


def _documents(content: bytes, document_bytes: int) -> Iterator[numpy.ndarray]:
    """The tokens of each document of a file: all of similar length, cut after a line, else a character."""
    number = _num_documents(len(content), document_bytes)
    ends = []
    for end in (index * len(content) // number for index in range(1, number)):
        line_end = content.rfind(b"\n", end - len(content) // number // 4, end) + 1
        # Bytes that continue a character of UTF-8 begin with the bits 10.
        while not line_end and content[end] & 0xC0 == 0x80:
            end -= 1
        ends.append(line_end or end)
    for begin, end in itertools.pairwise([0, *ends, len(content)]):
        tokens = numpy.full(end - begin + 1, END_OF_DOCUMENT, dtype=numpy.uint16)
        tokens[:-1] = numpy.frombuffer(content, dtype=numpy.uint8, count=end - begin, offset=begin)
        yield tokens


def _named(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)
