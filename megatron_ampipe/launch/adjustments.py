"""Arguments that are changed for pipelined blocks, each with its row of the start-up table.

What cannot be changed without changing what is computed is refused instead (``refusals.py``). Called by
:mod:`.attach`, before any process group is made.
"""

from __future__ import annotations

import argparse

from megatron_ampipe.launch import host
from megatron_ampipe.launch.planned import workload_of_args
from megatron_ampipe.switched_off_flags import SWITCHED_OFF

EXCHANGE_GROUPS = ("ep", "tp_ep_mp")
"""Megatron's names of the groups over which tokens and their counts travel."""


def adjust_arguments(args: argparse.Namespace, *, on_gpu: bool) -> list[host.Adjustment]:
    """Change what has to be changed, and say so.

    Args:
        args: Megatron's validated arguments, above degree 1.
        on_gpu: Where the run is.
    """
    return [
        *_drop_attention_mask(args),
        *_drop_padding(args),
        *_put_aside(args),
        *_gather_keys_and_values(args),
        *(_let_exchanges_go_first(args) if on_gpu else []),
    ]


def _let_exchanges_go_first(args: argparse.Namespace) -> list[host.Adjustment]:
    """Have NCCL run the exchanges at high priority: its kernels run on streams of its own.

    Otherwise a collective that is ready stands behind the blocks of a product that has filled the device.
    """
    missing = [name for name in EXCHANGE_GROUPS if name not in args.high_priority_stream_groups]
    if not missing:
        return []
    # Megatron adds to the list in place as well, for its own overlaps.
    args.high_priority_stream_groups.extend(missing)
    return [
        host.Adjustment(
            flag="--high-priority-stream-groups",
            value=" ".join(args.high_priority_stream_groups),
            reason="collectives that are ready do not stand behind computation",
        )
    ]


def _drop_attention_mask(args: argparse.Namespace) -> list[host.Adjustment]:
    """Keep the data loader from building a mask of sequence length squared that nothing reads."""
    if not args.create_attention_mask_in_dataloader:
        return []
    args.create_attention_mask_in_dataloader = False
    return [
        host.Adjustment(
            flag="--no-create-attention-mask-in-dataloader",
            value=None,
            reason="chunks know their causal mask from their position",
        )
    ]


def _drop_padding(args: argparse.Namespace) -> list[host.Adjustment]:
    """Say that padding is not sent; the dispatcher of a chunk leaves it out."""
    if not args.moe_pad_expert_input_to_capacity:
        return []
    return [
        host.Adjustment(
            flag="--moe-pad-expert-input-to-capacity",
            value=None,
            reason="ignored: chunks send the kept tokens alone, with the same result",
        )
    ]


def _put_aside(args: argparse.Namespace) -> list[host.Adjustment]:
    """Say which other overlaps were switched off when the flags were parsed."""
    return [
        host.Adjustment(flag=one.setting, value=None, reason=f"switched off: {one.reason}")
        for one in SWITCHED_OFF
        if one.setting in getattr(args, "ampipe_put_aside", ())
    ]


def _gather_keys_and_values(args: argparse.Namespace) -> list[host.Adjustment]:
    """Say that context parallelism gathers, where another way was asked for, and what memory that costs."""
    modes = args.cp_comm_type if isinstance(args.cp_comm_type, list) else [args.cp_comm_type]
    ranks = args.context_parallel_size
    others = [mode for mode in dict.fromkeys(modes) if mode != "all_gather"]
    if ranks == 1 or not others:
        return []
    block = workload_of_args(args, None)
    numbers = block.sequence_length * block.batch * block.key_value_width / block.tensor * (1 - 1 / ranks)
    size = f"{numbers * block.element_bytes / 2**20:.3g} MiB"
    return [
        host.Adjustment(
            flag="--cp-comm-type",
            value="all_gather",
            reason=f"in pipelined blocks, in place of {' and '.join(others)}: the same function; keys and "
            f"values of the other ranks take {size} in each block until its backward pass",
        )
    ]
