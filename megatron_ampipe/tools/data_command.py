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
from pathlib import Path
from typing import Any

import numpy
from tqdm import tqdm

from megatron_ampipe.errors import EnvironmentMissing, RunFailed
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
_PARTS = (".json", ".bin", ".idx")
"""The files of a dataset, in the order in which they take their names."""

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
Hidden and empty files are left out. Until it is finished, there are no files with the final names; after an
interruption, run it again.
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
        EnvironmentMissing: megatron-core is absent.
        RunFailed: writing failed.
    """
    prefix, given, refuse = arguments.output, arguments.document_bytes, arguments.refuse
    # Megatron keeps a cache in a folder that is called as the dataset.
    if prefix.suffix in _PARTS or (prefix.is_dir() and not (prefix / "cache").is_dir()):
        refuse(
            f"--output {prefix} is a directory, or has a suffix, and is the begin of several files' names; "
            "name the dataset: --output data/corpus"
        )
    if given is not None and given != 0 and given < _LEAST_GIVEN_BYTES:
        refuse(
            f"--document-bytes {given} is neither 0, which cuts nothing, nor {_LEAST_GIVEN_BYTES} or more; "
            "use --document-bytes 20000"
        )
    directory = (arguments.directory or Path(sysconfig.get_path("stdlib"))).resolve()
    if not directory.is_dir():
        refuse(f"{directory} is not a directory; name one of text files, or none for Python's own source")
    default = SUFFIXES if arguments.directory else ".py"
    suffixes = [suffix.strip().lower() for suffix in (arguments.suffixes or default).split(",")]
    if not all(suffix.startswith(".") and len(suffix) > 1 for suffix in suffixes):
        refuse(f"--suffixes {arguments.suffixes} must begin with a dot; use --suffixes .txt,.md")
    left_out = _NOT_ENTERED if arguments.directory else _NOT_ENTERED | _NOT_OF_THE_LIBRARY
    own = {_named(prefix.resolve(), suffix) for suffix in _PARTS}
    bad: list[str] = []
    paths = [path for path in _files(directory, suffixes, left_out, bad) if path not in own]
    if given is None:
        few = len(paths) < _ENOUGH_DOCUMENTS
        given = max(_LEAST_DOCUMENT_BYTES, _total(paths) // _ENOUGH_DOCUMENTS) if few else 0
    made = {"source": str(directory), "suffixes": suffixes, "document_bytes": given}
    try:
        done = _make(arguments, made, paths, bad)
    except OSError as error:
        raise RunFailed(
            f"{error.filename or prefix} cannot be written ({error.strerror}). Nothing unfinished has "
            f"the name {prefix}."
        ) from error
    counts = f"{made['files']:,} files, {made['size_bytes']:,} bytes, {made['tokens']:,} tokens"
    skipped = f" ({len(bad):,} bad files left out)" if bad else ""
    print(f"{done}: {counts} in {made['documents']:,} documents{skipped}")
    print(f"train with: --data-path {prefix} --tokenizer-type NullTokenizer --vocab-size {VOCABULARY}")
    return 0


def _files(directory: Path, suffixes: Sequence[str], left_out: set[str], bad: list[str]) -> list[Path]:
    """The selected files that are not empty, by name; adds to ``bad`` what cannot be listed."""

    def note(error: OSError) -> None:
        bad.append(f"{error.filename} cannot be listed ({error.strerror})")

    paths = []
    for place, folders, names in directory.walk(on_error=note):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
        for path in (place / name for name in names if not name.startswith(".")):
            is_empty = os.path.isfile(path) and os.path.getsize(path) == 0
            if path.name.lower().endswith(tuple(suffixes)) and not is_empty:
                paths.append(path)
    return sorted(paths, key=lambda path: os.fsencode(path.relative_to(directory).as_posix()))


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
        content.decode()
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError("is not UTF-8") from error
    return content


def _make(arguments: argparse.Namespace, made: dict[str, Any], paths: Sequence[Path], bad: list[str]) -> str:
    """Write the dataset, unless it is there already; adds to ``made`` what is in it.

    Returns:
        What was done, as a clause.
    """
    prefix: Path = arguments.output
    manifest, *final = (_named(prefix, suffix) for suffix in _PARTS)
    data, index = (path.with_name(f"{path.name}.partial") for path in final)
    builder = _builder(data)
    try:
        made |= _add_documents(builder, made, paths, bad)
        if bad and not arguments.skip_bad:
            more = f"; and {len(bad) - _NAMED_BAD_FILES} more" * (len(bad) > _NAMED_BAD_FILES)
            arguments.refuse(
                f"every file must be readable UTF-8 text, and {len(bad)} cannot be used: "
                f"{'; '.join(bad[:_NAMED_BAD_FILES])}{more}. Add --skip-bad to leave them out, or take fewer "
                "files with --suffixes"
            )
        if not made["files"]:
            arguments.refuse(
                f"{made['source']} holds no usable text file with the suffix "
                f"{' or '.join(made['suffixes'])}; name the suffixes of your files: --suffixes .txt,.md"
            )
        there = _manifest_of(manifest)
        # Without an index, it was interrupted while the files took their names.
        is_finished = final[1].exists() or not there
        if not arguments.force and is_finished and any(path.exists() for path in (manifest, *final)):
            if all(there.get(key) == made[key] for key in ("content", "document_bytes")):
                return f"{prefix} is up to date with {made['source']}"
            arguments.refuse(
                f"--output {prefix} holds another dataset, or files that ampipe data did not write. Add "
                "--force to replace them, or choose another --output"
            )
        builder.finalize(str(index))
        for path in (data, index):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        # From here on there must be no index next to data that it does not describe.
        final[1].unlink(missing_ok=True)
        # Megatron knows datasets by their names, and would take what it keeps of the old one for this one.
        for folder in (prefix / "cache").glob("*_indices"):
            shutil.rmtree(folder)
        outputs.write_text(manifest, json.dumps(made, indent=1) + "\n")
        os.replace(data, final[0])
        os.replace(index, final[1])
    finally:
        builder.data_file.close()
        for path in (data, index):
            with contextlib.suppress(OSError):
                path.unlink()
    return f"wrote {final[0]} and {final[1]}"


def _builder(data: Path) -> Any:
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
    data.parent.mkdir(parents=True, exist_ok=True)
    return IndexedDatasetBuilder(str(data), dtype=numpy.uint16)


def _add_documents(
    builder: Any, made: dict[str, Any], paths: Sequence[Path], bad: list[str]
) -> dict[str, Any]:
    """Add the documents of all files that can be used; adds the others to ``bad``, and returns the counts."""
    digest = hashlib.sha256()
    num_files = size_bytes = num_documents = 0
    # disable=None: no bar where stderr is no terminal.
    with tqdm(total=_total(paths), unit="B", unit_scale=True, leave=False, disable=None) as bar:
        for path in paths:
            name = path.relative_to(made["source"]).as_posix()
            try:
                content = _read(path)
            except ValueError as error:
                bad.append(f"{name} {error}")
                continue
            digest.update(os.fsencode(name) + b"\0" + hashlib.sha256(content).digest())
            for tokens in _documents(content, made["document_bytes"]):
                builder.add_document(tokens, [tokens.size])
                num_documents += 1
            num_files, size_bytes = num_files + 1, size_bytes + len(content)
            bar.update(len(content))
    return {
        "files": num_files,
        "documents": num_documents,
        "size_bytes": size_bytes,
        "tokens": size_bytes + num_documents,
        "vocabulary": VOCABULARY,
        "skipped": len(bad),
        "content": digest.hexdigest(),
    }


def _manifest_of(path: Path) -> dict[str, Any]:
    """What a manifest says; empty where there is none."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def _documents(content: bytes, document_bytes: int) -> Iterator[numpy.ndarray]:
    """The tokens of each document of a file: all of similar length, cut after a line, else a character."""
    number = -(-len(content) // document_bytes) if document_bytes else 1
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
