"""What layers implement for the runtime: a block's stage functions, and the state of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Module, Parameter

from megatron_ampipe.runtime.segment import BlockParameters, WeightProducts
from megatron_ampipe.schedule import StageKind

Function = Callable[..., Any]
"""A stage function. Its first argument is the state of the block."""


class BlockFunctions(Protocol):
    """The stage functions of a block. Each takes the block's state (:class:`BlockState`) first.

    The function of a computed kind is called as ``(state, chunk, *values)`` and returns the kind's outputs.
    The chunk is an index, or None for the whole sequence. A kind that takes keys and values also gets
    ``sums``, a :class:`~.segment.KeyValueSums`: its backward may add their gradients to it, and then returns
    None for them.

    If its policy drops an activation, a kind gets an object of :mod:`.saved_tensors` through which it
    computes that: ``norm`` to run a norm, ``core`` to run core attention, ``inner`` to run the experts. The
    kinds that restore the experts' inner tensors get the same ``inner``.
    """

    @property
    def stage_parameters(self) -> Mapping[StageKind, Sequence[Parameter]]:
        """The trainable parameters of each kind that has any."""

    @property
    def parameters(self) -> BlockParameters:
        """All trainable parameters of the block."""

    @property
    def stage_modules(self) -> Mapping[StageKind, Sequence[Module]]:
        """The modules that each kind calls and that have parameters."""

    @property
    def buffer_modules(self) -> Mapping[StageKind, Sequence[Module]]:
        """The modules that each kind calls and that have buffers."""

    @property
    def caching_modules(self) -> Sequence[Module]:
        """Modules whose outputs are in a cache, which other calls can empty."""

    def forget_quantized_weights(self) -> None:
        """Have the next call of each linear layer quantize its weight again, if it keeps a quantized one."""

    def function_of(self, kind: StageKind) -> Function:
        """The function of a kind.

        For a communication kind it is called as ``(state, chunks, tensors, direction)``, with the tensors of
        each chunk, and returns a transfer. In the backward pass it sends gradients in the other direction.
        """

    def differentiate(self, kind: StageKind) -> Function:
        """The backward function of a kind with ``own_backward``: ``(state, chunk, *gradients, *kv, sums=)``.

        Takes the gradients of the stage's outputs, and the keys and values that were its inputs. Returns the
        gradients of its inputs; None for keys and values, whose gradients it adds to ``sums``.
        """

    def delay_wgrad(self, kind: StageKind, products: WeightProducts) -> AbstractContextManager[None]:
        """A context in which the function of a kind leaves the gradients of its weights to ``products``."""


class BlockState(Protocol):
    """The state of one micro-batch in a block, forward and backward; made for every forward call."""

    draws: bool
    """Whether stages draw random numbers, which a recompute must draw again."""
    outside: tuple[Tensor, ...]
    """Tensors that stages read in addition to their inputs; the same for all blocks of a pass."""

    def with_rng_state(self, function: Function, key: object, *, is_recompute: bool) -> Function:
        """The function, with the random states saved under ``key``; if ``is_recompute``, run with those."""

    def for_recompute(self) -> BlockState:
        """The state for a recompute of the forward pass; called when the first run has ended."""

    def export_state(self, kind: StageKind, chunk: int | None) -> object:
        """What a stage has stored in this state for later stages; None if nothing."""

    def import_state(self, kind: StageKind, chunk: int | None, left: object) -> None:
        """Store in this state what :meth:`export_state` returned for the same stage of another pass."""
