"""Flags that training needs although Megatron's own check accepts a command line without them.

Called by :mod:`.session`, after Megatron's check.
"""

from __future__ import annotations

import argparse

from megatron_ampipe.errors import BadInput


def check_required(args: argparse.Namespace) -> None:
    """Refuse what Megatron's own check accepts and its training loop then fails on.

    Args:
        args: Megatron's validated arguments.

    Raises:
        BadInput: A flag is missing that training cannot do without, or warm-up would not end.
    """
    if args.skip_train:
        return
    for flag, value, example in (
        ("--train-iters", args.train_iters or args.train_samples, 1000),
        ("--eval-interval", args.eval_interval, 1000),
        ("--lr", args.lr, 1e-4),
    ):
        if value is None:
            raise BadInput(
                flag,
                "(not given)",
                rule="training needs it",
                remedy=f"Give it, for example {flag} {example}.",
            )
    decay_iters = args.lr_decay_iters or args.train_iters
    if args.train_iters and args.lr_warmup_fraction is None and args.lr_warmup_iters >= decay_iters:
        raise BadInput(
            "--lr-warmup-iters",
            args.lr_warmup_iters,
            rule=f"is not less than the {decay_iters} iterations over which the learning rate changes",
            remedy=f"Use --lr-warmup-iters {decay_iters // 10}.",
        )
