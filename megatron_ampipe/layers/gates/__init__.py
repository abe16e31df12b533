"""Routers other than Megatron's: those that AMPipe ships, and how a class of the user is found.

Each shipped gate is a subclass of Megatron's ``TopKRouter`` and knows nothing of chunks; :mod:`..router`
makes it route them. What a class must promise is in docs/gates.md.
"""

from __future__ import annotations

from megatron.core.transformer.moe.router import InferenceTopKRouter, TopKRouter

from megatron_ampipe.block.named_values import ROUTER_FLAG as FLAG
from megatron_ampipe.block.named_values import class_path, import_class


def load_gate(name: str) -> type[TopKRouter]:
    """The class that ``--ampipe-router NAME`` names. Imports its module.

    Raises:
        BadInput: there is no such module or class, or it is no subclass of ``TopKRouter``.
    """
    return import_class(
        FLAG,
        name,
        class_path(name),
        fits=is_gate,
        kind="Routers",
        rule="is not a subclass of megatron.core.transformer.moe.router.TopKRouter",
        remedy="Derive the class from TopKRouter and override gating or routing; see docs/gates.md.",
    )


def is_gate(found: type) -> bool:
    """Whether a class can be the router of a pipelined layer."""
    return issubclass(found, TopKRouter) and not issubclass(found, InferenceTopKRouter)


def needs_all_tokens(gate: type[TopKRouter]) -> str | None:
    """Why the choice of ``gate`` for a token depends on other tokens, as the class says; None if not."""
    reason: str | None = getattr(gate, "needs_all_tokens", None)
    return reason
