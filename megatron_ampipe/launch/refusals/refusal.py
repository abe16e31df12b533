"""A row of the tables of refusals, and what conditions of several subjects share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_ampipe.block.megatron_settings import Arguments
from megatron_ampipe.schedule.features import expert_tensor_ranks

DISPATCHER = "--moe-token-dispatcher-type"
OFF = "Leave it out, or train with --ampipe-degree 1."


@dataclass(frozen=True, slots=True)
class Refusal:
    """A combination of settings that AMPipe does not support; ``rule`` says why, in one clause."""

    setting: str
    """The flag, as users write it."""
    rule: str
    remedy: str
    when: Callable[[Arguments], object] | None = None
    """Called with the arguments if the flag has a value: returns whether they are refused, or the part of the
    value that is refused. None: refused whenever the flag is set."""
    required: bool = False
    """Whether it is refused only if the flag is not set."""
    also_with_plan: bool = False
    """Whether the remedy is right too if a plan has the value; else another plan has to be made."""

    def applies(self, args: Arguments) -> object:
        """Return the refused value; None if the combination is supported."""
        value = args.of(self.setting)
        if self.required:
            return None if value else "(not set)"
        if value is None or value is False:
            return None
        refused = bool(value) if self.when is None else self.when(args)
        if refused is None or refused is False:
            return None
        return value if refused is True else refused


def named_with(args: Arguments, setting: str, *conflicts: str | None) -> str | None:
    """The value of a flag with the first of these that is in conflict with it; None if nothing is.

    A conflict is a flag, which is shown with its value, or None.
    """
    conflict = next((flag for flag in conflicts if flag is not None), None)
    if conflict is None:
        return None
    words = [args.of(setting), "with", conflict, args.of(conflict)]
    lists = (word if isinstance(word, list) else [word] for word in words if word is not True)
    return " ".join(str(word) for words in lists for word in words)


def first_set(args: Arguments, *flags: str) -> str | None:
    """The first of these flags that is set; None if none is."""
    return next((flag for flag in flags if args.of(flag)), None)


def documents_flag(args: Arguments) -> str | None:
    """The flag that packs documents."""
    return first_set(args, "--sft", "--dataloader-inter-document-masking")


def sends_rows(args: Arguments) -> bool:
    """Whether the dispatcher is ``alltoall``, whose rows AMPipe sends in its own collectives."""
    return args.moe_token_dispatcher_type in (None, "alltoall")


def uses_hybridep(args: Arguments) -> bool:
    """Whether the dispatcher sends tokens through HybridEP."""
    backend = args.moe_flex_dispatcher_backend if args.moe_token_dispatcher_type == "flex" else None
    return bool(backend == "hybridep")


def expert_ranks(args: Arguments) -> int:
    """Number of ranks that share the experts of a layer."""
    return int((args.expert_model_parallel_size or 1) * (expert_tensor_ranks(args) or 1))
