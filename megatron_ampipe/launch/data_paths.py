"""Checks of the data that a run names, before the run starts.

What is checked: that the files are there and whole, that index and data belong together, that the tokens are
in the vocabulary, and that training, validation and test have documents. Called by :mod:`.session`.
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

from packaging.version import Version

from megatron_ampipe import compat
from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.indexed_dataset import IndexedDataset, check_tokens, read_indexed_dataset
from megatron_ampipe.launch.splits import PARTS, Use, check_length, check_split, uses_of

_PART_FLAGS = ("--train-data-path", "--valid-data-path", "--test-data-path")
Blend = tuple[list[str], list[float] | None]


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
    _check_lists(args)
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    if blend is None and blend_per_split is None:
        if of_script:
            return
        raise BadInput(
            "--data-path",
            "(not given)",
            rule="a run needs data",
            remedy="Give --data-path PREFIX, or --mock-data for a run on made-up tokens.",
        )
    if args.sft:
        _check_lines([blend] if blend is not None else blend_per_split, of_script=of_script)
        return
    if blend is not None:
        flag = "--data-path" if args.data_path is not None else "--data-args-path"
        datasets = list(_read(flag, blend, args, of_script=of_script))
        if datasets:
            # Of a blend, each dataset gives what its weight asks for.
            uses = [Use(use.is_read, use.repeats or len(blend[0]) > 1) for use in uses_of(args)]
            check_split(
                datasets,
                args.split,
                uses,
                eval_iters=args.eval_iters or 0,
                seq_length=args.seq_length,
            )
    else:
        _check_each_part(blend_per_split, args, of_script=of_script)


def _check_lists(args: argparse.Namespace) -> None:
    """Check files that list datasets, and the cache folder, which are read before any dataset."""
    for flag in ("--data-args-path", "--per-split-data-args-path"):
        path = getattr(args, flag.removeprefix("--").replace("-", "_"), None)
        if path is not None and not Path(path).is_file():
            rule, remedy = "there is no such plain file", "Give a file that lists the datasets."
            raise BadInput(flag, path or "(empty)", rule=rule, remedy=remedy)
    cache = getattr(args, "data_cache_path", None)
    if cache is not None and Path(cache).exists() and not Path(cache).is_dir():
        raise BadInput(
            "--data-cache-path", cache, rule="is a file", remedy="Name a folder, which may be new."
        )


def _check_each_part(blends: list[Blend | None], args: argparse.Namespace, *, of_script: bool) -> None:
    """The same where training, validation and test each have their own datasets."""
    uses = uses_of(args)
    for flag, name, blend, use in zip(_PART_FLAGS, PARTS, blends, uses, strict=True):
        if blend is None:
            if use.is_read and not of_script:
                wanted = f", and --eval-iters {args.eval_iters} asks for it" if name == "validation" else ""
                raise BadInput(
                    flag,
                    "(not given)",
                    rule=f"{name} has no data{wanted}",
                    remedy="Give it" + (", or --eval-iters 0." if name == "validation" else "."),
                )
            continue
        for dataset in _read(flag, blend, args, of_script=of_script):
            check_length(
                dataset,
                name,
                0,
                dataset.num_documents,
                use=use,
                seq_length=args.seq_length,
                setting=(flag, dataset.prefix),
            )


def _read(flag: str, blend: Blend, args: argparse.Namespace, *, of_script: bool) -> Iterator[IndexedDataset]:
    """Every dataset of a blend that lies in a file system, checked on its own."""
    vocabulary = _vocabulary(args)
    weights = [1.0] if blend[1] is None else blend[1]
    if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
        raise BadInput(
            flag,
            " ".join(f"{weight:g}" for weight in weights),
            rule="weights of a blend must be at least 0, and one of them above",
            remedy=f"Write for example {flag} 0.3 {blend[0][0]} 0.7 {blend[0][-1]}.",
        )
    for prefix in blend[0]:
        # Megatron itself checks object stores.
        if "://" in prefix:
            continue
        if of_script and not any(Path(f"{prefix}{suffix}").exists() for suffix in (".bin", ".idx")):
            continue
        dataset = read_indexed_dataset(flag, prefix)
        if vocabulary is not None:
            check_tokens(dataset, vocabulary, vocabulary_flag=f"--vocab-size {args.vocab_size}")
        yield dataset


def _vocabulary(args: argparse.Namespace) -> int | None:
    """How many tokens there are, where the command line says so: the tokenizer is not built yet."""
    if args.tokenizer_type != "NullTokenizer" or args.vocab_size is None:
        return None
    # Up to 0.17 it adds a token for the end of a document to the given ones.
    version = compat.found_version("megatron-core")
    return int(args.vocab_size) + (version is not None and version < Version("0.18"))


def _check_lines(blends: list[Blend | None], *, of_script: bool) -> None:
    """Files of JSON lines, of which only the existence is checked."""
    for blend in blends:
        for path in blend[0] if blend is not None else ():
            if "://" not in path and not of_script and not Path(path).exists():
                raise BadInput(
                    "--data-path",
                    path,
                    rule=f"the file {path} is not there",
                    remedy="Give the path of a JSON-lines file.",
                )
