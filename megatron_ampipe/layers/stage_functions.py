"""The table of stage functions: what runs for each kind of stage, and which modules of a block it reads.

:mod:`.attention_stages` and :mod:`.moe_stages` fill it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict, Unpack

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_ampipe.runtime.block_functions import Function
from megatron_ampipe.schedule import StageKind

Tensors = Sequence[Sequence[Tensor]]
"""The tensors that a transfer sends, by chunk."""


class ReadBlock(Protocol):
    """What says which modules of a block (``block_modules.BlockModules``) a stage reads."""

    attention_layer: TransformerLayer
    moe_layer: TransformerLayer
    moe: MoELayer
    attends: bool
    """Whether the block includes attention."""
    is_latent: bool
    """Whether the experts work on projected tokens."""

    @property
    def chooses(self) -> bool:
        """Whether the router chooses for all chunks at once."""

    @property
    def scatters_rows(self) -> bool:
        """Whether the reduce-scatter of attention's output projection is a separate stage."""


Reads = Callable[[ReadBlock], Iterable[Module | Parameter | None]]


@dataclass(frozen=True, slots=True)
class StageFunction:
    """The function of a kind, see :class:`~megatron_ampipe.runtime.block_functions.BlockFunctions`."""

    run: Function
    reads: Reads = lambda _: ()
    """Gives the modules of a block that the function calls, and the parameters that it reads directly."""
    backward: Function | None = None
    """The backward function of a kind with ``own_backward``; None if autograd differentiates ``run``."""


FUNCTIONS: dict[StageKind, StageFunction] = {}
"""The function of each kind. The function of a computed kind with steps takes the step's index first."""


class StageOptions(TypedDict, total=False):
    """The fields of a :class:`StageFunction` beyond its function."""

    reads: Reads
    backward: Function | None


def runs[F: Function](*stage_kinds: StageKind, **options: Unpack[StageOptions]) -> Callable[[F], F]:
    """Register a function for these kinds."""

    def register(function: F) -> F:
        FUNCTIONS.update(dict.fromkeys(stage_kinds, StageFunction(function, **options)))
        return function

    return register


def bound_to_step(function: Function, kind: StageKind) -> Function:
    """The function of ``kind``, bound to its step if the kind is computed in steps."""
    has_steps = kind.step_of is not None and kind.lane.computes
    return functools.partial(function, kind.step) if has_steps else function
