"""What is refused of the distribution over ranks: parallel groups, data parallelism, and partners."""

from __future__ import annotations

from megatron_ampipe.block.megatron_settings import Arguments
from megatron_ampipe.launch.environment import waits_for_stage
from megatron_ampipe.launch.refusals.refusal import OFF, Refusal, documents_flag, first_set, named_with
from megatron_ampipe.schedule.features import expert_tensor_ranks

_GATHERED = "a layer gathers its weights and reduces their gradients in every call, and chunks are more calls"


def _overlaps_tensor_ranks(args: Arguments) -> bool:
    """Whether ``--tp-comm-overlap`` is given, which pipelined runs switch off."""
    return bool(args.tp_comm_overlap) or "--tp-comm-overlap" in (args.ampipe_disabled_flags or ())


PARALLELISM: tuple[Refusal, ...] = (
    Refusal(
        "--ampipe-partner",
        "a pipeline stage without virtual stages waits for the next stage before every backward pass, so "
        "that no other micro-batch can run next to it",
        "Add --num-layers-per-virtual-pipeline-stage 1, or leave it out.",
        waits_for_stage,
    ),
    Refusal(
        "--tensor-model-parallel-size",
        "Megatron supports MoE layers with tensor parallelism only together with sequence parallelism",
        "Add --sequence-parallel.",
        lambda args: args.tensor_model_parallel_size > 1 and not args.sequence_parallel,
    ),
    Refusal(
        "--tp-comm-overlap-cfg",
        "the file may have reduce-scatters round to 8 bits, which they do not without the overlap",
        "Leave it out, or train with --ampipe-degree 1.",
        lambda args: (
            _overlaps_tensor_ranks(args)
            and named_with(args, "--tp-comm-overlap-cfg", first_set(args, "--fp8-format"))
        ),
    ),
    Refusal(
        "--tensor-parallel-num-weight-shards",
        _GATHERED,
        OFF,
        lambda args: args.tensor_parallel_num_weight_shards > (args.tensor_model_parallel_size or 1),
    ),
    Refusal(
        "--expert-tensor-parallel-num-weight-shards",
        _GATHERED,
        OFF,
        lambda args: args.expert_tensor_parallel_num_weight_shards > (expert_tensor_ranks(args) or 1),
    ),
    Refusal("--hybrid-context-parallel", "hybrid context parallelism is not supported", OFF),
    Refusal(
        "--micro-batch-size",
        "with context parallelism, a rank may hold the rows of less than two packed sequences, which "
        "Megatron's MoE layers would take for the batch",
        "Use --micro-batch-size 1.",
        lambda args: (
            (args.context_parallel_size or 1) > 1
            and args.micro_batch_size >= 2 * args.context_parallel_size
            and named_with(args, "--micro-batch-size", documents_flag(args))
        ),
    ),
    Refusal(
        "--num-distributed-optimizer-instances",
        "several instances reduce gradients on a separate stream, which --ampipe-grad-reduce placed does not "
        "hold back",
        "Use --ampipe-grad-reduce stock.",
        lambda args: args.num_distributed_optimizer_instances > 1 and args.ampipe_grad_reduce == "placed",
    ),
    Refusal(
        "--use-megatron-fsdp",
        "it gathers parameters for one pass at a time",
        "Leave out the flag that is named with it, or use --use-distributed-optimizer.",
        lambda args: named_with(args, "--use-megatron-fsdp", first_set(args, "--ampipe-partner")),
    ),
    Refusal(
        "--use-megatron-fsdp",
        "it reduces gradients itself",
        "Leave out --ampipe-grad-reduce, or use --use-distributed-optimizer.",
        lambda args: (
            args.ampipe_grad_reduce == "placed"
            and named_with(args, "--use-megatron-fsdp", "--ampipe-grad-reduce")
        ),
    ),
    Refusal(
        "--use-torch-fsdp2",
        "Megatron combines it with no expert-parallel ranks",
        "Use --use-megatron-fsdp or --use-distributed-optimizer.",
    ),
    Refusal(
        "--ampipe-grad-reduce",
        "has no effect without --overlap-grad-reduce: gradients are then reduced after all backward passes",
        "Add --overlap-grad-reduce, or leave it out.",
        lambda args: args.ampipe_grad_reduce == "placed" and not args.overlap_grad_reduce,
    ),
)
"""Refused settings of parallel groups and of the reduction of gradients."""
