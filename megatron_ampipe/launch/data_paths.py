"""Opens the data that a run names, with Megatron's readers, before the run starts.

Refuses what Megatron would hang at (a part of the data without a token, of which it counts epochs forever),
notice in the middle of a training, or never notice. The rest is left to Megatron, see :mod:`.failures`.
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
from packaging.version import Version

from megatron_ampipe import compat
from megatron_ampipe.errors import BadInput
from megatron_ampipe.files import inputs
from megatron_ampipe.launch.dataset_manifest import DatasetPaths, read_manifest
from megatron_ampipe.launch.refuse import reason_of

_PART_FLAGS = {
    "training": "--train-data-path",
    "validation": "--valid-data-path",
    "test": "--test-data-path",
}
_COPY_AGAIN = "Copy or make the dataset again, or name another one."
_SAMPLED_BLOCKS, _SAMPLED_BLOCK_TOKENS = 64, 16384
"""How many tokens are compared with the vocabulary, where no ``.json`` of ``ampipe data`` describes them."""


def check_data_paths(args: argparse.Namespace, *, of_script: bool = False) -> None:
    """Refuse a run whose data it could not train on.

    Args:
        args: Megatron's parsed arguments.
        of_script: A custom script reads the data, so that what is no indexed dataset is not checked.

    Raises:
        BadInput: No data is named, or a dataset cannot be used as it is.
    """
    from megatron.training.utils import get_blend_and_blend_per_split

    if args.mock_data:
        return
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    if blend is None and blend_per_split is None and not of_script:
        remedy = "Give --data-path PREFIX, or --mock-data for a run on made-up tokens."
        raise BadInput("--data-path", "(not given)", rule="a run needs data", remedy=remedy)
    # Of a file of JSON lines, Megatron's reader is not called early: it converts all of it.
    if args.sft:
        return
    if blend is not None:
        flag = "--data-path" if args.data_path is not None else "--data-args-path"
        parts = _divided(args.split)
        for prefix, index in _opened(flag, blend, args, of_script=of_script):
            for name, part in parts.items():
                _check_part(args, ("--split", args.split), name, part, prefix, index, len(blend[0]) > 1)
    for (name, flag), part_blend in zip(_PART_FLAGS.items(), blend_per_split or (), strict=False):
        if part_blend is None and not of_script:
            _check_part(args, (flag, "(not given)"), name, None, "", None)
        for prefix, index in _opened(flag, part_blend, args, of_script=of_script):
            _check_part(args, (flag, prefix), name, (0.0, 1.0), prefix, index)


def _divided(split: str) -> dict[str, tuple[float, float] | None]:
    """Where each part begins and ends, as shares of the documents, by Megatron's reading of ``--split``."""
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    try:
        with numpy.errstate(all="raise"):
            shares = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    except (ValueError, ArithmeticError, AssertionError) as error:
        rule = "is not up to three shares, for training, validation and test, of which one is more than 0"
        raise BadInput("--split", split, rule=rule, remedy="Use --split 99,1,0.") from error
    return dict(zip(_PART_FLAGS, shares, strict=True))


def _opened(flag: str, blend: Any, args: argparse.Namespace, *, of_script: bool) -> Iterator[tuple[str, Any]]:
    """Prefix and index of every dataset of a blend that lies in a file system.

    The index has to be kept as long as its arrays are used: Megatron's reader unmaps the file with it.
    """
    prefixes, weights = blend or ((), None)
    if weights is not None and not (all(0 <= weight < math.inf for weight in weights) and any(weights)):
        rule = "weights of a blend must be at least 0, and one of them above"
        remedy = f"Write for example {flag} 0.3 {prefixes[0]} 0.7 {prefixes[-1]}."
        raise BadInput(flag, " ".join(f"{weight:g}" for weight in weights), rule=rule, remedy=remedy)
    for prefix in prefixes:
        is_there = any(Path(f"{prefix}{suffix}").exists() for suffix in (".bin", ".idx"))
        # Megatron itself checks object stores.
        if "://" in prefix or (of_script and not is_there):
            continue
        index = _open(flag, prefix)
        _check_tokens(flag, prefix, index, args)
        yield prefix, index


def _open(flag: str, prefix: str) -> Any:
    """Megatron's reader of an index, if the index describes as many bytes as the data has."""
    # In place of IndexedDataset, which after a failure prints tracebacks from its destructor.
    from megatron.core.datasets.indexed_dataset import _IndexReader

    data, path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    try:
        inputs.require_regular_file(path)
        size = data.stat().st_size
        index = _IndexReader(str(path), multimodal=False)
        first, last = index.document_indices[[0, -1]]
    except Exception as error:
        rule = f"Megatron cannot read {path} ({reason_of(error)})"
        raise BadInput(flag, prefix, rule=rule, remedy=_COPY_AGAIN) from error
    if (first, last) != (0, len(index)) or not index.sequence_lengths.any():
        raise BadInput(flag, prefix, rule=f"{path} lists no tokens, or is damaged", remedy=_COPY_AGAIN)
    described = int(index.sequence_pointers[-1]) + int(index.sequence_lengths[-1]) * index.dtype_size
    if described != size:
        rule = f"{path} describes {described} bytes, and {data} has {size}"
        raise BadInput(flag, prefix, rule=rule, remedy=_COPY_AGAIN)
    return index


def _check_part(
    args: argparse.Namespace,
    setting: tuple[str, object],
    name: str,
    part: tuple[float, float] | None,
    prefix: str,
    index: Any,
    is_repeated: bool = False,
) -> None:
    """Refuse a part of a dataset that a run reads, and in which there is nothing to read.

    Args:
        args: Megatron's arguments.
        setting: The flag that chose the documents, and its value.
        name: Of the part.
        part: Where it begins and ends, as shares of the documents; None for no part.
        prefix: Of the dataset.
        index: Of the dataset.
        is_repeated: The dataset is one of a blend, and gives as many samples as its weight asks for.
    """
    full_validation = getattr(args, "full_validation", False)
    evaluates = bool(full_validation or args.eval_iters)
    is_read = {"training": not args.skip_train, "validation": evaluates, "test": False}[name]
    if part is None:
        if is_read:
            asked = f", and --eval-iters {args.eval_iters} asks for it" if name == "validation" else ""
            remedy = "Give it documents, for example by --split 99,1,0, or add --eval-iters 0."
            raise BadInput(*setting, rule=f"leaves nothing for {name}{asked}", remedy=remedy)
        return
    # As Megatron rounds.
    first, last = (round(share * float(len(index))) for share in part)
    tokens = int(index.sequence_lengths[first:last].sum(dtype="int64"))
    # What is not repeated has to hold a sample.
    repeats = is_repeated or name == "training" or (bool(args.eval_iters) and not full_validation)
    needed = 1 if repeats else args.seq_length + 1
    if tokens < needed:
        rule = (
            f"gives {name} {last - first} of the {len(index)} documents of {prefix}, which have {tokens} "
            f"tokens, and it needs {needed}"
        )
        remedy = "Use --split 100,0,0 and --eval-iters 0, or use ampipe data --document-bytes for more."
        raise BadInput(*setting, rule=rule, remedy=remedy)


def _check_tokens(flag: str, prefix: str, index: Any, args: argparse.Namespace) -> None:
    """Refuse a dataset whose tokens the model has no embedding for: a GPU fails at them without a reason.

    Only with ``NullTokenizer``, where the command line gives the vocabulary.
    """
    if args.tokenizer_type != "NullTokenizer" or args.vocab_size is None:
        return
    # Up to 0.17, Megatron adds a token for the end of a document to the given ones.
    version = compat.found_version("megatron-core")
    vocabulary = int(args.vocab_size) + (version is not None and version < Version("0.18"))
    manifest = read_manifest(DatasetPaths(Path(prefix)))
    # A file of another dataset under the same name does not describe this one.
    if manifest is not None and manifest.documents == len(index):
        least, most = 0, manifest.vocabulary - 1
    else:
        tokens = numpy.memmap(f"{prefix}.bin", mode="r", dtype=index.dtype)
        starts = numpy.linspace(0, max(0, len(tokens) - _SAMPLED_BLOCK_TOKENS), _SAMPLED_BLOCKS, dtype=int)
        blocks = [tokens[start : start + _SAMPLED_BLOCK_TOKENS] for start in starts]
        least, most = min(block.min() for block in blocks), max(block.max() for block in blocks)
    if least < 0 or most >= vocabulary:
        token = least if least < 0 else most
        rule = f"holds the token {token}, and --vocab-size {args.vocab_size} allows 0 to {vocabulary - 1}"
        remedy = f"Use --vocab-size {most + 1}, or train with the tokenizer that the dataset was made with."
        raise BadInput(flag, prefix, rule=rule, remedy=remedy)
