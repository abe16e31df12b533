"""The two files of one of Megatron's indexed datasets: are they whole, and do they belong together?

Reads the index (``.idx``), a sample of the tokens (``.bin``) and what ``ampipe data`` wrote next to them
(``.json``). Builds no dataset and needs no process group. Called by :mod:`.data_paths`.

An index is: 9 bytes that mark it, a version (uint64), a code for the type of a token (uint8), the number of
sequences and of document ends (uint64 each); then for each sequence its length in tokens (int32) and its
offset in the ``.bin`` in bytes (int64), the document ends (int64), and in some a mode per sequence (int8).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy

from megatron_ampipe import inputs
from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.dataset_manifest import DatasetPaths, read_manifest

_MARK = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TOKEN_TYPES = {
    1: numpy.uint8,
    2: numpy.int8,
    3: numpy.int16,
    4: numpy.int32,
    5: numpy.int64,
    8: numpy.uint16,
}
"""Megatron's codes. Its codes 6 and 7 are for floating-point numbers, which are no tokens."""

_BLOCK = 1 << 20
"""Sequences that are looked at together."""
CHECKED_SEQUENCES = 1 << 24
"""How many sequences are looked at one by one, half of them from the beginning and half from the end; of
those in between the files' sizes alone speak."""
SAMPLED_BLOCKS = 64
SAMPLED_BLOCK_TOKENS = 16384
"""How many tokens are compared with the vocabulary where no ``.json`` says more: 64 blocks, evenly spread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedDataset:
    """What the index says.

    Attributes:
        flag: The flag that named the dataset, for messages.
        prefix: The files' name without suffix.
        token_type: Of a token in the ``.bin``.
        lengths: Tokens of each sequence, [sequences].
        offsets: Where each begins in the ``.bin``, in bytes, [sequences].
    """

    flag: str
    prefix: str
    token_type: type[numpy.integer]
    lengths: numpy.ndarray
    offsets: numpy.ndarray

    @property
    def num_documents(self) -> int:
        """What Megatron's GPT dataset divides among training, validation and test: sequences."""
        return len(self.lengths)

    @property
    def data(self) -> Path:
        return Path(f"{self.prefix}.bin")


def read_indexed_dataset(flag: str, prefix: str) -> IndexedDataset:
    """Read the index of a dataset, and compare it with the size of the data.

    Args:
        flag: The flag that names the dataset.
        prefix: What the flag says.

    Raises:
        BadInput: A file is missing, cut off or of another kind, or the two do not belong together.
    """
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (data, index):
        if not path.exists():
            raise BadInput(
                flag,
                prefix,
                rule=f"the file {path} is not there",
                remedy="Give the prefix of an indexed dataset, without .bin or .idx.",
            )
    try:
        inputs.require_regular_file(index)
        inputs.require_regular_file(data)
        found = _read_index(flag, prefix, index)
        _compare(found, data.stat().st_size)
    except OSError as error:
        path = error.filename or index
        raise BadInput(
            flag,
            prefix,
            rule=f"{path} cannot be read ({error.strerror})",
            remedy="Make it readable, or name another dataset.",
        ) from error
    return found


def check_tokens(dataset: IndexedDataset, vocabulary: int, *, vocabulary_flag: str) -> None:
    """Refuse a dataset whose tokens the model has no embedding for.

    What ``ampipe data`` wrote next to the files is believed where it is there; else a sample is looked at.

    Args:
        dataset: From :func:`read_indexed_dataset`.
        vocabulary: Tokens go from 0 to one less.
        vocabulary_flag: What says so, with its value.

    Raises:
        BadInput: A token is negative, or not in the vocabulary.
    """
    described = _described_vocabulary(dataset)
    if described is not None and described > vocabulary:
        raise BadInput(
            dataset.flag,
            dataset.prefix,
            rule=f"holds tokens up to {described - 1}, as {dataset.prefix}.json says, and {vocabulary_flag} "
            f"ends at {vocabulary - 1}",
            remedy=f"Use --vocab-size {described}.",
        )
    if described is not None:
        return
    for first, tokens in _sample(dataset):
        wrong = numpy.flatnonzero((tokens < 0) | (tokens >= vocabulary))
        if len(wrong):
            token = int(tokens[wrong[0]])
            offset = (first + int(wrong[0])) * tokens.itemsize
            raise BadInput(
                dataset.flag,
                dataset.prefix,
                rule=f"the token {token} at byte {offset} of {dataset.data} is not in the vocabulary: "
                f"{vocabulary_flag} goes from 0 to {vocabulary - 1}",
                remedy="Train with the tokenizer that the dataset was made with, or make it again.",
            )


def _read_index(flag: str, prefix: str, index: Path) -> IndexedDataset:
    remedy = "Copy or make the dataset again, or name another one."
    size = index.stat().st_size
    if size == 0:
        raise BadInput(flag, prefix, rule=f"{index} is empty", remedy=remedy)
    with index.open("rb") as file:
        header = file.read(_HEADER.size)
    if not _MARK.startswith(header[: len(_MARK)]):
        raise BadInput(
            flag,
            prefix,
            rule=f"{index} is no index of Megatron's: its first bytes are {header[:9]!r} instead "
            f"of {_MARK!r}",
            remedy=remedy,
        )
    if len(header) < _HEADER.size:
        rule = f"{index} is cut off: it has {size} bytes, and its header alone takes {_HEADER.size}"
        raise BadInput(flag, prefix, rule=rule, remedy=remedy)
    _, version, code, sequences, ends = _HEADER.unpack(header)
    if version != 1 or code not in _TOKEN_TYPES:
        what, value = ("version", version) if version != 1 else ("type of tokens", code)
        rule = (
            f"byte {9 if version != 1 else 17} of {index} says {what} {value}, which Megatron's do not have"
        )
        raise BadInput(flag, prefix, rule=rule, remedy=remedy)
    if sequences == 0 or ends == 0:
        raise BadInput(flag, prefix, rule=f"{index} lists no document", remedy="Name a dataset with text.")
    expected = _HEADER.size + sequences * (4 + 8) + ends * 8
    if size not in (expected, expected + sequences):
        is_cut = "is cut off" if size < expected else "has bytes too many"
        rule = (
            f"{index} {is_cut}: its header tells of {sequences} sequences, which take {expected} bytes, and "
        )
        raise BadInput(flag, prefix, rule=f"{rule}it has {size}", remedy=remedy)
    raw = numpy.memmap(index, mode="r", dtype=numpy.uint8)
    lengths_end = _HEADER.size + 4 * sequences
    offsets_end = lengths_end + 8 * sequences
    document_ends = raw[offsets_end : offsets_end + 8 * ends].view(numpy.int64)
    if document_ends[0] != 0 or document_ends[-1] != sequences:
        rule = (
            f"the documents that {index} lists from byte {offsets_end} on end at sequence "
            f"{document_ends[-1]}, "
            f"and there are {sequences}"
        )
        raise BadInput(flag, prefix, rule=rule, remedy=remedy)
    return IndexedDataset(
        flag=flag,
        prefix=prefix,
        token_type=_TOKEN_TYPES[code],
        lengths=raw[_HEADER.size : lengths_end].view(numpy.int32),
        offsets=raw[lengths_end:offsets_end].view(numpy.int64),
    )


def _compare(dataset: IndexedDataset, data_bytes: int) -> None:
    """Whether every sequence that is looked at lies in the data, and the last one ends it."""
    item_bytes = numpy.dtype(dataset.token_type).itemsize
    remedy = "The two files do not belong together, or one was cut off: copy or make the dataset again."
    end = 0
    for first, last in _looked_at(dataset.num_documents):
        lengths = dataset.lengths[first:last].astype(numpy.int64)
        ends = dataset.offsets[first:last] + lengths * item_bytes
        end = max(end, int(ends.max()))
        wrong = numpy.flatnonzero((lengths < 0) | (dataset.offsets[first:last] < 0) | (ends > data_bytes))
        if len(wrong):
            sequence = first + int(wrong[0])
            rule = (
                f"sequence {sequence} of {dataset.prefix}.idx has {dataset.lengths[sequence]} "
                "tokens from byte "
                f"{dataset.offsets[sequence]} on, and {dataset.data} has {data_bytes} bytes"
            )
            raise BadInput(dataset.flag, dataset.prefix, rule=rule, remedy=remedy)
    if end != data_bytes:
        rule = f"{dataset.prefix}.idx describes {end} bytes, and {dataset.data} has {data_bytes}"
        raise BadInput(dataset.flag, dataset.prefix, rule=rule, remedy=remedy)


def _looked_at(sequences: int) -> Iterator[tuple[int, int]]:
    """The blocks of sequences that are checked: all, or those at both ends of a very long dataset."""
    half = CHECKED_SEQUENCES // 2
    parts = [(0, sequences)] if sequences <= 2 * half else [(0, half), (sequences - half, sequences)]
    for begin, end in parts:
        for first in range(begin, end, _BLOCK):
            yield first, min(first + _BLOCK, end)


def _described_vocabulary(dataset: IndexedDataset) -> int | None:
    """The size of the vocabulary that ``ampipe data`` wrote down for these files; None where it did not."""
    manifest = read_manifest(DatasetPaths(Path(dataset.prefix)))
    # A file of another dataset under the same name says nothing of this one.
    if manifest is None or manifest.documents != dataset.num_documents:
        return None
    return manifest.vocabulary


def _sample(dataset: IndexedDataset) -> Iterator[tuple[int, numpy.ndarray]]:
    """Blocks of tokens and the place of each one's first, evenly spread over the data."""
    if dataset.data.stat().st_size == 0:
        return
    tokens = numpy.memmap(dataset.data, mode="r", dtype=dataset.token_type)
    last = max(0, len(tokens) - SAMPLED_BLOCK_TOKENS)
    for first in sorted({last * number // (SAMPLED_BLOCKS - 1) for number in range(SAMPLED_BLOCKS)}):
        yield first, tokens[first : first + SAMPLED_BLOCK_TOKENS]
