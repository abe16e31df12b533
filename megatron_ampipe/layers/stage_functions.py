"""Which function runs a kind of stage, and which parameters it reads: stated where the function is written.

A decorator names the kinds::

    @MOE.runs(kinds.SHARED, reads=lambda block: [block.moe.shared_experts])
    def shared(self, chunk: int, normed: Tensor) -> tuple[Tensor, ...]: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter

from megatron_ampipe.runtime.block_functions import Function
from megatron_ampipe.schedule import StageKind

Reads = Callable[[Any], Iterable[Module | Parameter | None]]
"""Of a block (``BlockModules``) the modules that a stage calls, and parameters that it reads besides."""
Tensors = Sequence[Sequence[Tensor]]
"""What a transfer is given of each of its chunks."""


@dataclass(frozen=True, slots=True)
class StageFunction:
    """The function of a kind.

    Attributes:
        half: Number of the half of a block whose state is its first argument.
        run: See :class:`~megatron_ampipe.runtime.block_functions.BlockFunctions`.
        reads: The modules and parameters that it uses; asked for blocks that have the kind.
        recompute: Names of Megatron's ``--recompute-modules`` with which it runs again before its backward.
    """

    half: int
    run: Function
    reads: Reads
    recompute: tuple[str, ...]


FUNCTIONS: dict[StageKind, StageFunction] = {}
"""By kind; what computes a kind with steps takes the number of the step after the state."""
BACKWARDS: dict[StageKind, StageFunction] = {}
"""The backward of kinds with ``own_backward``, likewise."""


@dataclass(frozen=True, slots=True)
class Half:
    """One of the two halves of a block, whose stages share a state.

    Attributes:
        number: Place of its state in ``BlockState.halves``.
    """

    number: int

    def runs[F: Function](
        self, *kinds: StageKind, reads: Reads = lambda _: (), recompute: tuple[str, ...] = ()
    ) -> Callable[[F], F]:
        """Decorate the function of these kinds; the arguments are those of :class:`StageFunction`."""

        def register(function: F) -> F:
            for kind in kinds:
                assert kind not in FUNCTIONS, f"two functions of {kind}"
                FUNCTIONS[kind] = StageFunction(self.number, function, reads, recompute)
            return function

        return register

    def differentiates[F: Function](self, kind: StageKind) -> Callable[[F], F]:
        """Decorate the backward of a kind that autograd does not differentiate (``own_backward``)."""

        def register(function: F) -> F:
            BACKWARDS[kind] = StageFunction(self.number, function, lambda _: (), ())
            return function

        return register


ATTENTION, MOE = Half(0), Half(1)
