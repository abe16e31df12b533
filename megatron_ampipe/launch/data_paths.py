"""Checks that the data a run names is there, before the run starts. Called by :mod:`.pretrain`."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from megatron_ampipe.errors import BadInput


def check_data_paths(args: argparse.Namespace) -> None:
    """Refuse a run whose data files are missing.

    Args:
        args: Megatron's parsed arguments.

    Raises:
        BadInput: No data is named, or a file of a named dataset is not there.
    """
    from megatron.training.utils import get_blend_and_blend_per_split

    if args.mock_data:
        return
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    if blend is None and blend_per_split is None:
        raise BadInput(
            "--data-path",
            "(not given)",
            rule="a run needs data",
            remedy="Give --data-path PREFIX, or --mock-data for a run on made-up tokens.",
        )
    for prefix in _prefixes([blend] if blend is not None else blend_per_split):
        # Object stores are looked at by Megatron itself.
        if "://" in prefix:
            continue
        for path in [prefix] if args.sft else [f"{prefix}.bin", f"{prefix}.idx"]:
            if not Path(path).exists():
                raise BadInput(
                    "--data-path",
                    prefix,
                    rule=f"the file {path} is not there",
                    remedy="Give the prefix of an indexed dataset, without .bin or .idx."
                    if not args.sft
                    else "Give the path of a JSON-lines file.",
                )


def _prefixes(blends: list[tuple[list[str], list[float] | None] | None]) -> Iterator[str]:
    for blend in blends:
        if blend is not None:
            yield from blend[0]
