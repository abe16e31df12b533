"""Checks the data of a run before it starts, and avoids a rebuild of Megatron's compiled index builder.

It refuses data at which Megatron would hang (a split without a token, whose epochs it counts forever), and an
index that its reader cannot read. Megatron checks the rest, see :mod:`.ending`.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.ending import reason_of

_OF_SCRIPTS = (
    "--check-for-spiky-loss", "--fim-data", "--hybrid-context-parallel", "--log-straggler",
    "--logits-load-dir", "--per-dataset-sequences-path",
)  # fmt: skip
"""Flags of Megatron that AMPipe's own entry does not support."""

Replace = Callable[[object, str, object], None]
"""Replaces a function of Megatron, given its owner, its name and the replacement."""


def check_data(args: argparse.Namespace, replace: Replace, *, custom_script: bool = False) -> None:
    """Raise :class:`BadInput` if the run cannot train on its data.

    ``custom_script``: a custom script reads the data, so only indexed datasets are checked.
    """
    from megatron.training.utils import get_blend_and_blend_per_split

    for flag in () if custom_script else _OF_SCRIPTS:
        if value := getattr(args, flag[2:].replace("-", "_")):
            remedy = "Run its pretrain_gpt.py with -m megatron_ampipe.launch."
            raise BadInput(flag, value, rule="is supported by the script of a checkout only", remedy=remedy)
    if args.mock_data:
        return
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    if blend is None and blend_per_split is None and not custom_script:
        remedy = "Give --data-path PREFIX, or --mock-data for a run on made-up tokens."
        raise BadInput("--data-path", "(not given)", rule="a run needs data", remedy=remedy)
    # Not checked for JSON lines: Megatron's reader would convert the whole file.
    if args.sft:
        return
    _refuse_parts_without_tokens(replace)
    for prefixes, _weights in filter(None, (blend, *(blend_per_split or ()))):
        for prefix in prefixes:
            is_there = any(Path(f"{prefix}{suffix}").exists() for suffix in (".bin", ".idx"))
            # Megatron checks data in object stores itself.
            if "://" not in prefix and (is_there or not custom_script):
                _check_index(prefix)


def _check_index(prefix: str) -> None:
    # Not IndexedDataset, whose destructor prints tracebacks after a failure.
    from megatron.core.datasets.indexed_dataset import _IndexReader

    path = Path(f"{prefix}.idx")
    try:
        # Opening a pipe would block.
        if path.exists() and not path.is_file():
            raise OSError("not a regular file")
        Path(f"{prefix}.bin").stat()
        _IndexReader(str(path), multimodal=False)
    except Exception as error:
        rule = f"Megatron cannot read {path} ({reason_of(error)})"
        remedy = "Copy or make the dataset again, or name another one."
        raise BadInput("dataset", prefix, rule=rule, remedy=remedy) from error


def _refuse_parts_without_tokens(replace: Replace) -> None:
    """Make Megatron fail at a split without tokens, for which it would count epochs forever."""
    from megatron.core.datasets.gpt_dataset import GPTDataset

    count = GPTDataset._get_num_tokens_per_epoch

    @functools.wraps(count)
    def counting(dataset: GPTDataset) -> int:
        tokens: int = count(dataset)
        if tokens == 0:
            raise BadInput(
                "--split",
                dataset.config.split or "(not given)",
                rule=f"gives {dataset.index_split.name} no token of {dataset.dataset_path}",
                remedy="Use --split 100,0,0 and --eval-iters 0, or ampipe data --document-bytes for more "
                "documents.",
            )
        return tokens

    replace(GPTDataset, "_get_num_tokens_per_epoch", counting)


def use_built_helpers(replace: Replace) -> None:
    """Keep Megatron from running ``make`` for a helper that is already built, as in a wheel."""
    from megatron.core.datasets import utils

    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        replace(utils, "compile_helpers", lambda: None)
