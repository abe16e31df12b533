"""What is refused of the transfers between experts: dispatchers, exchanges, and codecs."""

from __future__ import annotations

from megatron_ampipe.block.megatron_settings import Arguments
from megatron_ampipe.block.settings import AUTO
from megatron_ampipe.launch.environment import exchanges_of, ranks_per_node
from megatron_ampipe.launch.refusals.refusal import (
    DISPATCHER,
    Refusal,
    documents_flag,
    expert_ranks,
    first_set,
    named_with,
    sends_rows,
)
from megatron_ampipe.schedule import KEEP, STRATEGIES, Exchange, Saved, chunk_strategies


def _resends(memory: str | None) -> bool:
    """Whether tokens of a chunk are (or may be) redispatched with this ``--ampipe-memory``."""
    return memory == AUTO or any(
        STRATEGIES[name].tokens is Saved.RESEND for name in chunk_strategies(memory or KEEP)
    )


def _is_not_in_nodes(args: Arguments) -> str | None:
    """The exchange over nodes, with the sizes of a layout that does not allow it."""
    per_node = ranks_per_node(args.ampipe_ranks_per_node)
    if not _has_two_hops(args) or per_node is None or args.ampipe_exchange in exchanges_of(args, per_node):
        return None
    return (
        f"{args.ampipe_exchange} with --expert-model-parallel-size {args.expert_model_parallel_size} and "
        f"{per_node} ranks per node"
    )


def _has_two_hops(args: Arguments) -> bool:
    return args.ampipe_exchange in (Exchange.NODES, Exchange.TWO_DIMENSIONAL)


def _joins_copies(args: Arguments) -> bool:
    return args.ampipe_exchange in (Exchange.RANKS, Exchange.NODES)


EXCHANGES: tuple[Refusal, ...] = (
    Refusal(
        "--moe-ncclep-zero-copy",
        "it has one buffer for all calls, which chunks in flight would overwrite",
        "Leave out --moe-ncclep-zero-copy.",
    ),
    Refusal(
        "--moe-ncclep-static-shape",
        "NCCL EP has one capacity for all calls, so every chunk would keep the rows of the whole sequence",
        "Leave out --moe-ncclep-static-shape.",
    ),
    Refusal(
        "--moe-token-dispatcher-type",
        "this dispatcher cannot send the tokens of a chunk once more, for the backward pass",
        "Use --ampipe-memory rebuild, or --moe-token-dispatcher-type alltoall.",
        lambda args: (
            args.moe_token_dispatcher_type == "flex"
            and _resends(args.ampipe_memory)
            and named_with(args, DISPATCHER, "--ampipe-memory")
        ),
    ),
    Refusal(
        "--moe-token-dispatcher-type",
        "its buffers would be padded for chunks of equal sizes only",
        "Leave out --moe-hybridep-pad-uneven-dispatch-inputs, or use --moe-token-dispatcher-type alltoall.",
        lambda args: (
            args.moe_token_dispatcher_type == "flex"
            and named_with(args, DISPATCHER, first_set(args, "--moe-hybridep-pad-uneven-dispatch-inputs"))
        ),
    ),
    Refusal(
        "--ampipe-exchange",
        "only the dispatcher alltoall sends rows that can be grouped",
        "Use --moe-token-dispatcher-type alltoall, or --ampipe-exchange rows.",
        lambda args: (
            args.ampipe_exchange not in (AUTO, Exchange.ROWS)
            and not sends_rows(args)
            and named_with(args, "--ampipe-exchange", DISPATCHER)
        ),
    ),
    Refusal(
        "--ampipe-exchange",
        "has nothing to save: a token has one copy, for one expert",
        "Use --ampipe-exchange rows.",
        lambda args: (
            _joins_copies(args)
            and args.moe_router_topk == 1
            and named_with(args, "--ampipe-exchange", "--moe-router-topk")
        ),
    ),
    Refusal(
        "--ampipe-exchange",
        "has nothing to save: one rank has all experts",
        "Add --expert-model-parallel-size 2 or more, or use --ampipe-exchange rows.",
        lambda args: args.ampipe_exchange == Exchange.RANKS and expert_ranks(args) == 1,
    ),
    Refusal(
        "--ampipe-exchange",
        "has nothing to save: every rank has one expert, so it gets a token at most once",
        "Use fewer expert-parallel ranks than experts, or --ampipe-exchange rows.",
        lambda args: (
            args.ampipe_exchange == Exchange.RANKS
            and args.num_experts <= args.expert_model_parallel_size
            and named_with(args, "--ampipe-exchange", "--expert-model-parallel-size")
        ),
    ),
    Refusal(
        "--ampipe-exchange",
        "it is not known how many ranks share a node",
        "Start the run with torchrun, which says so, or add --ampipe-ranks-per-node 8, or "
        "--ranks-per-node 8 to ampipe config.",
        lambda args: _has_two_hops(args) and ranks_per_node(args.ampipe_ranks_per_node) is None,
        also_with_plan=True,
    ),
    Refusal(
        "--ampipe-exchange",
        "has nothing to save: it needs expert-parallel ranks on several nodes, as many on each, and several",
        "Use --ampipe-exchange rows, or other numbers of ranks.",
        _is_not_in_nodes,
    ),
    Refusal(
        "--ampipe-wire",
        "only the dispatcher alltoall sends rows as they are",
        "Use --moe-token-dispatcher-type alltoall, or leave it out.",
        lambda args: not sends_rows(args) and named_with(args, "--ampipe-wire", DISPATCHER),
    ),
    Refusal(
        "--ampipe-wire",
        "it halves rows of 32 bit, and these have 16",
        "Use --ampipe-wire fp8, or leave it out.",
        lambda args: (
            args.ampipe_wire == "bf16"
            and named_with(args, "--ampipe-wire", first_set(args, "--bf16", "--fp16"))
        ),
    ),
    Refusal(
        "--ampipe-condense",
        "only the dispatcher alltoall sends rows as they are",
        "Use --moe-token-dispatcher-type alltoall, or leave it out.",
        lambda args: not sends_rows(args) and named_with(args, "--ampipe-condense", DISPATCHER),
    ),
    Refusal(
        "--ampipe-condense",
        "tokens of several documents would be joined, and so those of none may be",
        "Leave it out, or the flag that is named with it.",
        lambda args: named_with(
            args, "--ampipe-condense", documents_flag(args) or first_set(args, "--reset-attention-mask")
        ),
    ),
    Refusal(
        "--ampipe-condense",
        "experts would get inputs with the weight of another token, where their results should be weighted",
        "Leave out --moe-apply-probs-on-input, or --ampipe-condense.",
        lambda args: named_with(args, "--ampipe-condense", first_set(args, "--moe-apply-probs-on-input")),
    ),
)
"""Refused settings of transfers."""
