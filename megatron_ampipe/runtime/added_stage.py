"""Stages beyond those of the table, for extensions and tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import Parameter

from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.schedule import StageKind


@dataclass(frozen=True, slots=True)
class AddedStage:
    """A stage beyond those of the table, which runs in every block.

    Attributes:
        kind: Its row; says which row it follows.
        compute: Its function, if it is computed: as in ``BlockFunctions``, without the state.
        communicate: Its function, if it is started and waited for, likewise.
        parameters: The trainable parameters that it uses; must belong to the layers of the block.
    """

    kind: StageKind
    compute: Callable[..., tuple[Tensor, ...]] | None = None
    communicate: Callable[..., Transfer] | None = None
    parameters: Sequence[Parameter] = ()
