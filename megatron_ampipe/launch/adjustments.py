"""Arguments that are changed for pipelined blocks, each with a row in the start-up table.

What cannot be changed without changing what is computed is refused instead (``refusals.py``). Called by
:mod:`.attach`, before any process group is made.
"""

from __future__ import annotations

import argparse

from megatron_ampipe.config import AMPipeConfig
from megatron_ampipe.launch import host
from megatron_ampipe.launch.planned import workload_of_args
from megatron_ampipe.layers.recompute import FullRecompute
from megatron_ampipe.switched_off_flags import SWITCHED_OFF

EXCHANGE_GROUPS = ("ep", "tp_ep_mp")
"""Megatron's names of the groups over which tokens and their counts travel."""


def adjust_arguments(args: argparse.Namespace, *, on_gpu: bool) -> list[host.Adjustment]:
    """Change the arguments that have to be changed, and return what was changed.

    Args:
        args: Megatron's validated arguments, above degree 1.
        on_gpu: Where the run is.
    """
    return [
        *_drop_attention_mask(args),
        *_drop_padding(args),
        *_put_aside(args),
        *_gather_keys_and_values(args),
        *(_prioritize_exchanges(args) if on_gpu else []),
    ]


def take_over_recompute(args: argparse.Namespace, config: AMPipeConfig) -> FullRecompute | None:
    """Have the schedules recompute, where layers may share one, in place of Megatron's full recompute.

    Megatron's works around one layer, so layers could not share a schedule. It stays with Megatron where it
    spreads what is kept over tensor-parallel ranks, and in hybrid models, some of whose layers run unchanged.
    """
    shares = config.automatic or config.pipeline.stack != 1
    if args.recompute_granularity != "full" or not shares:
        return None
    if args.distribute_saved_activations or args.hybrid_layer_pattern is not None:
        return None
    args.recompute_granularity, args.ampipe_recomputes = None, True
    return FullRecompute(args.recompute_method, args.recompute_num_layers)


def _prioritize_exchanges(args: argparse.Namespace) -> list[host.Adjustment]:
    """Have NCCL run the exchanges on high-priority streams.

    Otherwise a collective that is ready waits until a matrix product that fills the device has finished.
    """
    missing = [name for name in EXCHANGE_GROUPS if name not in args.high_priority_stream_groups]
    if not missing:
        return []
    # Megatron also adds to the list in place, for its own overlaps.
    args.high_priority_stream_groups.extend(missing)
    return [
        host.Adjustment(
            flag="--high-priority-stream-groups",
            value=" ".join(args.high_priority_stream_groups),
            reason="collectives that are ready do not wait for computation",
        )
    ]


def _drop_attention_mask(args: argparse.Namespace) -> list[host.Adjustment]:
    """Keep the data loader from building a mask of sequence length squared that nobody reads.

    With ``--reset-attention-mask`` it says where documents begin.
    """
    if not args.create_attention_mask_in_dataloader or args.reset_attention_mask:
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
    """Report that padding is not sent: the dispatcher of a chunk leaves it out."""
    if not args.moe_pad_expert_input_to_capacity:
        return []
    return [
        host.Adjustment(
            flag="--moe-pad-expert-input-to-capacity",
            value=None,
            reason="ignored: chunks send only the kept tokens, with the same result",
        )
    ]


def _put_aside(args: argparse.Namespace) -> list[host.Adjustment]:
    """Report which other overlaps were switched off when the flags were parsed."""
    return [
        host.Adjustment(flag=one.setting, value=None, reason=f"switched off: {one.reason}")
        for one in SWITCHED_OFF
        if one.setting in getattr(args, "ampipe_put_aside", ())
    ]


def _gather_keys_and_values(args: argparse.Namespace) -> list[host.Adjustment]:
    """Report that context parallelism gathers where another method was asked for, and its memory."""
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
