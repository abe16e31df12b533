"""Arguments that are changed for pipelined blocks, each with a row in the start-up table.

What cannot be changed without changing what is computed is refused instead (``refusals.py``).
"""

from __future__ import annotations

import argparse

from megatron_ampipe.launch import host
from megatron_ampipe.launch.flags import SWITCHED_OFF
from megatron_ampipe.launch.planned import block_of_args
from megatron_ampipe.layers.context import FullRecompute
from megatron_ampipe.schedule.features import gather_lane, ring_hindrance, uses_ring_attention
from megatron_ampipe.schedule.pipeline import AMPipeConfig

EXCHANGE_GROUPS = ("ep", "tp_ep_mp")
"""Megatron's names of the groups over which tokens and their counts travel."""
SHARING_GROUP = "ep_tp"
"""Megatron's name of the group of the ranks that share an expert."""


def adjust_arguments(args: argparse.Namespace, *, on_gpu: bool) -> list[host.Adjustment]:
    """Change the arguments that have to be changed, and return what was changed.

    Args:
        args: Megatron's validated arguments, above degree 1.
        on_gpu: Where the run is.
    """
    changes = [*_drop_attention_mask(args), *_unfuse_rotary(args)]
    losses = (
        args.moe_aux_loss_coeff if isinstance(args.moe_aux_loss_coeff, list) else [args.moe_aux_loss_coeff]
    )
    if max(losses) <= 0 and min(losses) != 0:
        changes.append(
            host.Adjustment(
                flag="--moe-aux-loss-coeff",
                value=" ".join(f"{coefficient:g}" for coefficient in losses),
                reason="ignored: Megatron adds no loss with a negative coefficient",
            )
        )
    if args.moe_pad_expert_input_to_capacity:
        reason = "ignored: chunks send only the kept tokens, with the same result"
        changes.append(host.Adjustment(flag="--moe-pad-expert-input-to-capacity", value=None, reason=reason))
    for flag, reason in SWITCHED_OFF.items():
        if flag in getattr(args, "ampipe_put_aside", ()):
            changes.append(host.Adjustment(flag=flag, value=None, reason=f"switched off: {reason}"))
    changes += _gather_keys_and_values(args)
    return [*changes, *_prioritize_exchanges(args)] if on_gpu else changes


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
    groups = list(EXCHANGE_GROUPS)
    if gather_lane(args, None):
        groups.append(SHARING_GROUP)
    if uses_ring_attention(args):
        groups.append("cp")
    missing = [name for name in groups if name not in args.high_priority_stream_groups]
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

    With ``--reset-attention-mask`` it says where documents begin, to layers that read it.
    """
    if not args.create_attention_mask_in_dataloader or reads_masks(args):
        return []
    args.create_attention_mask_in_dataloader = False
    reason = "chunks know their causal mask from their position"
    if args.reset_attention_mask:
        reason = (
            "no layer reads the mask of --reset-attention-mask, in a stock run neither: a token attends to "
            "earlier documents too. To separate them, use --dataloader-inter-document-masking"
        )
    return [host.Adjustment(flag="--no-create-attention-mask-in-dataloader", value=None, reason=reason)]


def reads_masks(args: argparse.Namespace) -> bool:
    """Whether a layer applies the masks of ``--reset-attention-mask``, as ``layers`` decides it for each."""
    return bool(
        args.reset_attention_mask
        and args.transformer_impl == "local"
        and not args.multi_latent_attention
        and args.context_parallel_size == 1
        and (args.window_size is None or args.window_attn_skip_freq is not None)
    )


def _unfuse_rotary(args: argparse.Namespace) -> list[host.Adjustment]:
    """Rotate latent attention without its fused kernel where rows of one index have several positions.

    A block runs packed sequences next to each other, and the kernel takes one position for all of them.
    """
    packed = args.sft or getattr(args, "dataloader_inter_document_masking", False)
    several = args.micro_batch_size > 1 and packed
    if not (several and args.multi_latent_attention and args.apply_rope_fusion):
        return []
    args.apply_rope_fusion = False
    return [
        host.Adjustment(
            flag="--no-rope-fusion",
            value=None,
            reason="rows of several packed sequences differ in position: the same function",
        )
    ]


def _gather_keys_and_values(args: argparse.Namespace) -> list[host.Adjustment]:
    """Report that context parallelism gathers where another method was asked for, and its memory."""
    modes = args.cp_comm_type if isinstance(args.cp_comm_type, list) else [args.cp_comm_type]
    ranks, why = args.context_parallel_size, ring_hindrance(args)
    others = [mode for mode in dict.fromkeys(modes) if mode != "all_gather"]
    if ranks == 1 or not others or uses_ring_attention(args):
        return []
    block = block_of_args(args)
    numbers = block.sequence_length * block.batch * block.key_value_width / block.tensor * (1 - 1 / ranks)
    size = f"{numbers * block.element_bytes / 2**20:.3g} MiB"
    return [
        host.Adjustment(
            flag="--cp-comm-type",
            value="all_gather",
            reason=f"in pipelined blocks, in place of {' and '.join(others)}"
            + (f" because of {why}" if why and "p2p" in others else "")
            + ": the same function; keys and "
            f"values of the other ranks take {size} in each block until its backward pass",
        )
    ]
