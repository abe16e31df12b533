"""``ampipe data``: a directory of text files becomes a dataset that Megatron trains on, byte by byte.

Not a tokenizer: a token is a byte (0 to 255), a document is a file or a part of one, and 255, which occurs in
no UTF-8 text, ends each document. That is the vocabulary of megatron-core 0.19's ``NullTokenizer``, whose
end-of-document token is ``vocab_size - 1`` unless ``--null-tokenizer-eod-id`` says otherwise. Train with::

    --data-path PREFIX --tokenizer-type NullTokenizer --vocab-size 256

Megatron's ``IndexedDatasetBuilder`` writes it. ``PREFIX.bin`` and then ``PREFIX.idx`` get their names at the
end: if there is an index, the dataset is finished.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import shutil
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy
from tqdm import tqdm

from megatron_ampipe.errors import RunFailed
from megatron_ampipe.files import outputs
from megatron_ampipe.files.inputs import at_least

END_OF_DOCUMENT = 255
VOCABULARY = 256
SUFFIXES = ".txt,.md,.rst,.tex,.py,.c,.h,.cc,.cpp,.cu,.go,.java,.js,.rs,.sh"
# With fewer documents, some parts of common --split values would be empty.
_ENOUGH_DOCUMENTS = 200
_LEAST_DOCUMENT_BYTES = 1024
_NOT_ENTERED = {"__pycache__"}
_NOT_OF_THE_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages"}

EPILOG = """\
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
Hidden and empty files are left out; of those that are not UTF-8 text, the names are printed.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ampipe data``."""
    add = parser.add_argument
    directory = "tree of UTF-8 text files; without it, the source of the running Python's standard library"
    suffixes = f"take files with these suffixes (default: {SUFFIXES}; .py without DIRECTORY)"
    length = (
        "cut files that are longer than N bytes into documents of about N bytes, at ends of lines; 0 cuts "
        f"none (default: 0 for {_ENOUGH_DOCUMENTS} files or more; else what makes about as many documents, "
        f"but at least {_LEAST_DOCUMENT_BYTES})"
    )
    add("directory", metavar="DIRECTORY", type=Path, nargs="?", help=directory)
    prefix = "write PREFIX.bin and PREFIX.idx, for --data-path"
    add("--output", metavar="PREFIX", type=Path, required=True, help=prefix)
    add("--suffixes", metavar=".A,.B", help=suffixes)
    add("--document-bytes", metavar="N", type=at_least(0), help=length)
    force = "replace an existing dataset PREFIX, and remove Megatron's cache of it"
    add("--force", action="store_true", help=force)


def run(arguments: argparse.Namespace) -> int:
    """Make the dataset."""
    prefix, refuse = arguments.output, arguments.refuse
    final = outputs.check_prefix(prefix, suffixes=(".bin", ".idx"), flag="--output")
    if any(path.exists() for path in final) and not arguments.force:
        refuse(f"--output {prefix} exists. Add --force to replace it, or choose another name")
    directory = (arguments.directory or Path(sysconfig.get_path("stdlib"))).resolve()
    left_out = _NOT_ENTERED if arguments.directory else _NOT_ENTERED | _NOT_OF_THE_LIBRARY
    given = arguments.suffixes or (SUFFIXES if arguments.directory else ".py")
    suffixes = [suffix.strip().lower() for suffix in given.split(",")]
    paths = _files(directory, suffixes, left_out)
    if not paths:
        rule = f"there is no text file with the suffix {' or '.join(suffixes)} in {directory}"
        refuse(f"{rule}; name the suffixes of your files: --suffixes .txt,.md")
    document_bytes = arguments.document_bytes
    if document_bytes is None:
        few = len(paths) < _ENOUGH_DOCUMENTS
        total = sum(map(os.path.getsize, paths))
        document_bytes = max(_LEAST_DOCUMENT_BYTES, total // _ENOUGH_DOCUMENTS) if few else 0
    # Megatron identifies datasets by name, and would use its cache of an old dataset for this one.
    for folder in (prefix / "cache").glob("*_indices"):
        shutil.rmtree(folder)
    _make(paths, final, document_bytes)
    print(f"train with: --data-path {prefix} --tokenizer-type NullTokenizer --vocab-size {VOCABULARY}")
    return 0


def _files(directory: Path, suffixes: Sequence[str], left_out: set[str]) -> list[Path]:
    """The selected files that are not empty, by name."""
    paths = []
    for place, folders, names in directory.walk():
        folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
        for path in (place / name for name in names if not name.startswith(".")):
            # Opening a pipe would wait for a writer that never comes.
            if path.name.lower().endswith(tuple(suffixes)) and path.is_file() and path.stat().st_size:
                paths.append(path)
    return sorted(paths, key=lambda path: os.fsencode(path.relative_to(directory).as_posix()))


def _make(paths: Sequence[Path], final: Sequence[Path], document_bytes: int) -> None:
    """Write the dataset, and print what is in it."""
    # torch warns that there is no GPU, Megatron warns of each optional package that is not installed.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings(action="ignore"):
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    data, index = final
    size_bytes, num_documents, bad = 0, 0, []
    # The data file is renamed first: if there is an index, the dataset is finished.
    with outputs.atomic_file(index) as new_index, outputs.atomic_file(data) as new_data:
        builder = IndexedDatasetBuilder(str(new_data), dtype=numpy.uint16)
        # disable=None: no bar where stderr is no terminal.
        for path in tqdm(paths, leave=False, disable=None):
            try:
                content = path.read_bytes()
                content.decode()
            except (OSError, UnicodeDecodeError):
                bad.append(path)
                continue
            size_bytes += len(content)
            for tokens in _documents(content, document_bytes):
                builder.add_document(tokens, [tokens.size])
                num_documents += 1
        if not num_documents:
            raise RunFailed(f"none of {len(paths)} files is readable UTF-8 text. Choose others.")
        builder.finalize(str(new_index))
        # From here on there must be no index of other data.
        index.unlink(missing_ok=True)
    counts = f"{len(paths) - len(bad):,} files, {size_bytes:,} bytes, {size_bytes + num_documents:,} tokens"
    print(f"wrote {data} and {index}: {counts} in {num_documents:,} documents")
    if bad:
        named = ", ".join(map(str, bad))
        print(f"left out {len(bad):,} files that are no readable UTF-8 text: {named}")


def _documents(content: bytes, document_bytes: int) -> Iterator[numpy.ndarray]:
    """The tokens of each document of a file: the whole file, or lines of about ``document_bytes``."""
    ends: list[int] = []
    length = 0
    for line in content.splitlines(keepends=True) if document_bytes else ():
        length += len(line)
        if length - (ends[-1] if ends else 0) >= document_bytes:
            ends.append(length)
    for begin, end in itertools.pairwise(dict.fromkeys([0, *ends, len(content)])):
        tokens = numpy.full(end - begin + 1, END_OF_DOCUMENT, dtype=numpy.uint16)
        tokens[:-1] = numpy.frombuffer(content, dtype=numpy.uint8, count=end - begin, offset=begin)
        yield tokens
