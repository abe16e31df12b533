"""What is read of Megatron's settings: its parsed arguments, or the configuration of a layer.

Megatron declares arguments with argparse, which has no types, and both have most names in common. What only
some versions or only one of both have is read with ``getattr``, and not listed here. Where the settings are
in neither, :class:`Arguments` presents them under the same names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class LayoutSettings(Protocol):
    """How tensors are divided over ranks."""

    @property
    def tensor_model_parallel_size(self) -> int: ...

    @property
    def expert_model_parallel_size(self) -> int: ...

    @property
    def expert_tensor_parallel_size(self) -> int | None: ...

    @property
    def sequence_parallel(self) -> bool: ...


class RouterSettings(Protocol):
    """How tokens are routed."""

    @property
    def moe_router_load_balancing_type(self) -> str | Sequence[str]: ...

    @property
    def moe_aux_loss_coeff(self) -> float | Sequence[float] | None: ...

    @property
    def moe_z_loss_coeff(self) -> float | None: ...

    @property
    def moe_token_drop_policy(self) -> str: ...


class AttentionSettings(Protocol):
    """What attention computes, and over how many ranks a sequence is divided."""

    @property
    def attention_dropout(self) -> float: ...

    @property
    def window_size(self) -> object: ...

    @property
    def context_parallel_size(self) -> int: ...


class ModuleSettings(Protocol):
    """Which modules a layer is built from."""

    @property
    def transformer_impl(self) -> str | None: ...


class MegatronSettings(LayoutSettings, RouterSettings, AttentionSettings, ModuleSettings, Protocol):
    """What decides the stages of a block."""

    @property
    def moe_token_dispatcher_type(self) -> str: ...

    @property
    def moe_router_topk(self) -> int: ...

    @property
    def moe_shared_expert_intermediate_size(self) -> int | None: ...

    @property
    def multi_latent_attention(self) -> bool: ...

    @property
    def recompute_granularity(self) -> str | None: ...


_DESTS = {"--fp8-format": "fp8", "--fp4-format": "fp4"}
"""Flags whose argument has another name in Megatron."""


class Arguments:
    """Megatron's arguments by name, from all places where a run has them.

    This is the only type that stands for them. Its values come from the sizes of a planned block, from the
    parts of a recipe, or from parsed arguments, also with values that a plan has replaced.

    An argument that is nowhere is None: versions of Megatron, and recipes, have different ones.

    Args:
        sources: Objects with arguments as attributes; the first that has an argument counts.
        values: Arguments that count before those of all sources.
    """

    def __init__(self, *sources: object, **values: object) -> None:
        self._sources = sources
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        # Only called for a name that is not among the values.
        if name.startswith("__"):
            # Of Python's own protocols, such as copying.
            raise AttributeError(name)
        for source in self._sources:
            if hasattr(source, name):
                return getattr(source, name)
        return None

    def of(self, flag: str) -> Any:
        """The value of a flag, by its name on a command line."""
        return getattr(self, _DESTS.get(flag, flag[2:].replace("-", "_")))
