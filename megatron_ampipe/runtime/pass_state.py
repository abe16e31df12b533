"""What belongs to one forward pass of one micro-batch and its backward, so that several can be in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from megatron_ampipe.runtime.crossing import Crossing
from megatron_ampipe.runtime.segment import BlockParameters, GradientSums


class Draws(Protocol):
    """Keeps the random states with which functions ran, so that they can draw the same numbers once more."""

    def drawn(self, function: Callable[..., Any], key: object, *, again: bool) -> Callable[..., Any]:
        """The function, run with the states of now, which are kept; or with those that were kept."""
        ...


class BlockState(Protocol):
    """The state of one pass of one micro-batch through a block; made for every forward call."""

    halves: Sequence[Any]
    """What functions of stages get first (``BlockFunctions``)."""
    draws: Draws | None
    """None where no number is drawn twice."""

    def again(self) -> BlockState:
        """For a second run of the forward pass, which computes the same as the first.

        Called when the first has ended. Knows what kinds give that run forward only.
        """
        ...


class Pass:
    """What the steps of a tape read and write.

    Args:
        num_slots: Of the tape.
        blocks: Of each block the state.
        parameters: Of each block all trainable parameters.
        crossing: Told of what several streams use; None where no stream is crossed.

    Attributes:
        slots: Tensors and other things that steps hand to one another, by number.
        states: By block and half.
        draws: By block.
        sums: By block, of the gradients of its parameters.
        crossed: By kind, chunk and block, the crossed memory that a graph may use.
    """

    __slots__ = ("blocks", "crossed", "crossing", "draws", "slots", "states", "sums")

    def __init__(
        self,
        num_slots: int,
        blocks: Sequence[BlockState],
        parameters: Sequence[BlockParameters],
        crossing: Crossing | None,
    ) -> None:
        self.slots: list[Any] = [None] * num_slots
        self.blocks = list(blocks)
        self.states = [block.halves for block in blocks]
        self.draws = [block.draws for block in blocks]
        self.sums = [GradientSums(of_block) for of_block in parameters]
        self.crossing = crossing
        self.crossed: dict[Any, Any] = {}

    def run_again(self, layer: int) -> None:
        """From here on, the stages of a block run a second time."""
        block = self.blocks[layer] = self.blocks[layer].again()
        self.states[layer] = block.halves
