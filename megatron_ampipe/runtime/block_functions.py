"""What the runtime asks of the layers: the functions of the stages of a block, and the state of one pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Module, Parameter

from megatron_ampipe.runtime.segment import BlockParameters, WeightProducts
from megatron_ampipe.schedule import StageKind

Function = Callable[..., Any]
"""Of a stage, with the state of the block as first argument."""


class BlockFunctions(Protocol):
    """What the stages of a block compute: functions of its state (:class:`BlockState`).

    A function of a kind that is computed takes ``(state, chunk, *values it takes)`` to the values it gives.
    The chunk is an index, or None for the whole sequence. A kind that takes keys and values also gets
    ``sums``, a :class:`~.segment.KeyValueSums` to which its backward may add their gradients; it then
    returns none. A kind that does not keep all that its backward needs, and the kind that restores it, get
    the same ``inner``, an :class:`~.saved_tensors.InnerTensors` that must run its products: the first within
    its ``dropped``, the second within its ``restored``.
    """

    recomputed: Collection[StageKind]
    """Kinds of stages of which only the inputs are kept, and that run again right before their backward."""
    stage_parameters: Mapping[StageKind, Sequence[Parameter]]
    """The trainable parameters of each kind that has any."""
    parameters: BlockParameters
    """All of the block."""
    stage_modules: Mapping[StageKind, Sequence[Module]]
    """The modules with parameters that each kind calls."""

    def run(self, kind: StageKind) -> Function:
        """The function of a kind.

        Of one that is started and waited for: ``(state, chunks, tensors, direction)`` to a transfer, chunk by
        chunk of what it takes to what it gives; in the backward pass of the gradients, the other way.
        """

    def differentiate(self, kind: StageKind) -> Function:
        """The backward of a kind that has its own, ``(state, chunk, *gradients, *recalled, sums=)``.

        From gradients of what the stage gave, and the keys and values that it took, to those of what it took;
        None for keys and values, whose gradients go to ``sums``.
        """

    def weights_apart(self, kind: StageKind, products: WeightProducts) -> AbstractContextManager[None]:
        """Within it, the function of a kind leaves the gradients of its weights to ``products``."""


class BlockState(Protocol):
    """The state of one pass of one micro-batch through a block, made for every forward call."""

    draws: bool
    """Whether stages draw random numbers that a second run draws once more."""
    outside: tuple[Tensor, ...]
    """What stages read besides what they take: the same of all blocks of a pass."""

    def recall(
        self, kind: StageKind, chunk: int | None, inputs: Sequence[Tensor]
    ) -> Callable[[], Sequence[Tensor]]:
        """What gives these inputs of a stage once more, in the backward pass."""

    def drawn(self, function: Function, key: object, *, again: bool) -> Function:
        """The function, run with the random states of now, which are kept; or with those that were kept."""

    def again(self) -> BlockState:
        """For a second run of the forward pass, which computes the same; called when the first has ended."""

    def left_by(self, kind: StageKind, chunk: int | None) -> object:
        """What a stage has left here for later ones; None if nothing."""

    def leave(self, kind: StageKind, chunk: int | None, left: object) -> None:
        """Put here what the same stage of another pass has left."""
