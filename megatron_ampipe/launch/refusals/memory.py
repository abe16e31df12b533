"""What is refused of the memory of activations: strategies, budgets, offloading."""

from __future__ import annotations

from megatron_ampipe.block.megatron_settings import Arguments
from megatron_ampipe.launch.refusals.refusal import OFF, Refusal, first_set, named_with
from megatron_ampipe.schedule import KEEP

_OFFLOADED = {"expert_fc1", "moe_act"}
"""The modules of ``--offload-modules`` whose activations ``--ampipe-memory offload`` copies to the host."""
_OFFLOADING = "--fine-grained-activation-offloading"
_OTHER_TENSORS = "experts then keep other tensors than the strategies of --ampipe-memory know"


def offloads_experts(arguments: object) -> bool:
    """Whether ``--ampipe-memory offload`` can replace Megatron's fine-grained offloading.

    It offloads all saved activations of experts, maybe more than ``--offload-modules``, with equal results.
    """
    args = Arguments(arguments)
    return bool(
        args.fine_grained_activation_offloading
        and args.offload_modules
        and {*args.offload_modules} <= _OFFLOADED
        and not (args.ampipe_memory or args.ampipe_memory_budget or args.ampipe_plan)
        and not (recomputes_experts(args) or keeps_other_tensors(args))
    )


def _offloads_other_modules(args: Arguments) -> str | None:
    """The modules that Megatron would offload and ``--ampipe-memory offload`` does not."""
    others = [module for module in args.offload_modules or () if module not in _OFFLOADED]
    return f"with --offload-modules {' '.join(others)}" if others else None


def _says_where_experts_keep(args: Arguments) -> str | None:
    """The flag of AMPipe that says what experts keep, with Megatron's offloading of them."""
    own = first_set(args, "--ampipe-plan", "--ampipe-memory-budget", "--ampipe-memory")
    return None if offloads_experts(args) else named_with(args, _OFFLOADING, own)


def recomputes_experts(args: Arguments) -> str | None:
    """The flag with which Megatron recomputes experts."""
    if args.recompute_granularity == "full":
        return "--recompute-granularity"
    is_selective = args.recompute_granularity == "selective"
    return "--recompute-modules" if is_selective and "moe" in (args.recompute_modules or []) else None


def keeps_other_tensors(args: Arguments) -> str | None:
    """The flag with which experts save other tensors for their backward pass than inputs of linear layers."""
    return first_set(args, "--fp8-format", "--use-transformer-engine-op-fuser")


MEMORY: tuple[Refusal, ...] = (
    Refusal("--cpu-offloading-num-layers", "activation offloading is not supported yet", OFF),
    Refusal(
        _OFFLOADING,
        "host copies exist of what experts keep, and not of what these modules keep: they are saved by the "
        "small autograd graphs of chunks",
        "Leave these modules out, and the flag if no other is left; or train with --ampipe-degree 1.",
        _offloads_other_modules,
    ),
    Refusal(
        _OFFLOADING,
        "recomputed experts keep nothing that could be put away",
        "Leave it out, or the flag that is named with it.",
        lambda args: named_with(args, _OFFLOADING, recomputes_experts(args)),
    ),
    Refusal(
        _OFFLOADING,
        _OTHER_TENSORS,
        "Leave it out, or the flag that is named with it.",
        lambda args: named_with(args, _OFFLOADING, keeps_other_tensors(args)),
    ),
    Refusal(
        _OFFLOADING,
        "the flag that is named with it says where activations of experts are kept",
        "Leave it out, or the flag that is named with it.",
        _says_where_experts_keep,
    ),
    Refusal(
        "--ampipe-memory",
        "recomputing experts keeps less of them than this",
        "Leave it out, or recompute other modules: --recompute-granularity selective --recompute-modules "
        "core_attn.",
        lambda args: (
            args.ampipe_memory != KEEP and named_with(args, "--ampipe-memory", recomputes_experts(args))
        ),
    ),
    Refusal(
        "--ampipe-memory",
        _OTHER_TENSORS,
        "Leave it out, or the flag that is named with it.",
        lambda args: (
            args.ampipe_memory != KEEP and named_with(args, "--ampipe-memory", keeps_other_tensors(args))
        ),
    ),
    Refusal(
        "--ampipe-memory-budget",
        _OTHER_TENSORS,
        "Leave it out, or the flag that is named with it.",
        lambda args: named_with(args, "--ampipe-memory-budget", keeps_other_tensors(args)),
    ),
    Refusal(
        "--moe-paged-stash",
        "it puts tensors away in the order of Megatron's layers, and chunks run in another",
        OFF,
    ),
)
"""Refused settings of what is kept for the backward pass, and where."""
