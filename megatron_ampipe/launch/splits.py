"""How many documents of a dataset go to training, validation and test, before Megatron divides them.

Megatron gives each of the three a run of whole documents. A part with a share and without a document makes it
count epochs of no token forever; one that is evaluated and has no share ends the run at its first
evaluation. Called by :mod:`.data_paths`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.indexed_dataset import IndexedDataset

PARTS = ("training", "validation", "test")
_VALIDATION = 1
Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Use:
    """What a run wants of one part.

    Attributes:
        is_read: Whether samples of it are asked for at all.
        repeats: Whether Megatron takes it as often as it needs. Otherwise one pass over it has to hold a
            sample.
    """

    is_read: bool
    repeats: bool


def uses_of(args: argparse.Namespace) -> tuple[Use, Use, Use]:
    """What a run wants of training, validation and test."""
    # Not all versions have full validation.
    full_validation = getattr(args, "full_validation", False)
    evaluates = bool(full_validation or args.eval_iters)
    repeats = bool(args.eval_iters) and not full_validation
    # A test set is left out where it has no share, so nothing has to be in it.
    return Use(not args.skip_train, True), Use(evaluates, repeats), Use(False, bool(args.eval_iters))


def parts_of(split: str) -> list[Range | None]:
    """Where each part begins and ends, as shares of the documents, by Megatron's own reading of ``--split``.

    Raises:
        BadInput: It is not up to three numbers, of which one is positive.
    """
    numbers = [number.strip() for number in split.split(",")]
    is_well = len(numbers) <= len(PARTS) and all(re.fullmatch(r"\d+(\.\d*)?|\.\d+", n) for n in numbers)
    if not is_well or not any(map(float, numbers)):
        raise BadInput(
            "--split",
            split,
            rule="is not up to three shares, for training, validation and test, of which one is more than 0",
            remedy="Use --split 99,1,0.",
        )
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    ranges: list[Range | None] = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    return ranges


def check_split(
    datasets: Sequence[IndexedDataset], split: str, uses: Sequence[Use], *, eval_iters: int, seq_length: int
) -> None:
    """Refuse a ``--split`` that leaves a part without documents.

    Args:
        datasets: All that are divided by it.
        split: The flag's value.
        uses: What the run wants of each part.
        eval_iters: For the message.
        seq_length: Tokens of a sample.

    Raises:
        BadInput: Megatron could not begin, or would fail at the first evaluation.
    """
    parts = parts_of(split)
    if parts[_VALIDATION] is None and uses[_VALIDATION].is_read:
        raise BadInput(
            "--split",
            split,
            rule=f"leaves nothing for validation, and --eval-iters {eval_iters} asks for it",
            remedy="Add --eval-iters 0, or use --split 99,1,0.",
        )
    if parts[0] is None and uses[0].is_read:
        raise BadInput("--split", split, rule="leaves nothing to train on", remedy="Use --split 99,1,0.")
    for dataset in datasets:
        total = dataset.num_documents
        for part, name, use in zip(parts, PARTS, uses, strict=True):
            if part is None:
                continue
            # As Megatron rounds.
            first, last = (round(share * float(total)) for share in part)
            if last == first:
                raise BadInput(
                    "--split",
                    split,
                    rule=f"gives {name} none of the {total} documents of {dataset.prefix}",
                    remedy=_remedy(total, parts),
                )
            check_length(
                dataset, name, first, last, use=use, seq_length=seq_length, setting=("--split", split)
            )


def check_length(
    dataset: IndexedDataset,
    name: str,
    first: int,
    last: int,
    *,
    use: Use,
    seq_length: int,
    setting: tuple[str, str],
) -> None:
    """Refuse a part of a dataset that is shorter than Megatron can begin with.

    Args:
        dataset: The dataset.
        name: Of the part.
        first: Its first document.
        last: One after its last.
        use: What the run wants of it.
        seq_length: Tokens of a sample.
        setting: The flag that chose the documents, and its value.

    Raises:
        BadInput: The documents are too short.
    """
    tokens = int(dataset.lengths[first:last].sum(dtype="int64"))
    needed = 1 if use.repeats else seq_length + 1
    if tokens < needed:
        raise BadInput(
            *setting,
            rule=f"{name} gets {last - first} documents of {dataset.prefix}, which have {tokens} tokens "
            f"together, and it needs {needed}",
            remedy="Give it more documents, or make fewer and longer ones: ampipe data --document-bytes.",
        )


def _remedy(documents: int, parts: Sequence[Range | None]) -> str:
    """A split that works, with the same parts in use."""
    used = [part is not None for part in parts]
    more = "or make more documents of the same text: ampipe data --document-bytes"
    if documents >= sum(used):
        others = [1 if is_used else 0 for is_used in used[1:]]
        return f"Use --split {','.join(map(str, [documents - sum(others), *others]))}, {more}."
    return f"Use --split 100,0,0 with --eval-iters 0, {more}."
