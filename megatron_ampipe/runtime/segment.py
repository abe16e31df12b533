"""The autograd boundary of one compute stage, and the sums of parameter gradients.

A segment runs a stage on detached inputs and keeps its small graph, so that the backward pass can be
walked stage by stage in an order of our own. Called by :mod:`megatron_ampipe.runtime.block_call`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Parameter


class Segment:
    """One stage's forward, and the graph for its backward.

    Holds edges of the graph, not tensors: what no operation has saved is freed as soon as it was read.

    Args:
        function: Takes tensors, returns a tuple of tensors.
        inputs: Its arguments; their history is cut here.
        keep_graph: Whether :meth:`backward` will be called. Without, nothing is kept.
        recompute: Keep the inputs alone, and run the stage again in :meth:`backward`. Only for stages
            that draw no random numbers and leave no trace.
    """

    __slots__ = ("_ends", "_entries", "_function", "_inputs", "values")

    def __init__(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        *inputs: Tensor,
        keep_graph: bool,
        recompute: bool = False,
    ) -> None:
        self._function: Callable[..., tuple[Tensor, ...]] | None = None
        self._inputs: tuple[Tensor, ...] = ()
        self._entries: tuple[GradientEdge, ...] = ()
        self._ends: tuple[GradientEdge | None, ...] = ()
        if keep_graph and recompute:
            self._function, self._inputs = function, tuple(tensor.detach() for tensor in inputs)
        if not keep_graph or recompute:
            with torch.no_grad():
                self.values = function(*inputs)
        else:
            self.values = self._build_graph(function, inputs)

    def backward(
        self, gradients: Sequence[Tensor | None], *, parameters: Sequence[Parameter], sums: GradientSums
    ) -> tuple[Tensor | None, ...]:
        """Differentiate once and let the graph go.

        Args:
            gradients: One per output; None where nothing depends on that output.
            parameters: Those the stage uses; their gradients go into ``sums``.
            sums: Where gradients of chunks are added up.

        Returns:
            The gradient of each input, None for an input that no output depends on.
        """
        if self._function is not None:
            self._build_graph(self._function, self._inputs)
            self._function, self._inputs = None, ()
        pairs = [
            (end, gradient)
            for end, gradient in zip(self._ends, gradients, strict=True)
            if gradient is not None and end is not None
        ]
        assert pairs, "backward of a stage that nothing depends on, or a second backward"
        found = torch.autograd.grad(
            [end for end, _ in pairs],
            [*self._entries, *parameters],
            [gradient for _, gradient in pairs],
            allow_unused=True,
        )
        count = len(self._entries)
        for parameter, gradient in zip(parameters, found[count:], strict=True):
            sums.add(parameter, gradient)
        self._ends = self._entries = ()
        return found[:count]

    def _build_graph(
        self, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            entered = _Entry.apply(_ANCHOR, *inputs)
            outputs = function(*entered)
        # The ends hold the graph, and with it the node of the entry.
        self._entries = tuple(GradientEdge(tensor.grad_fn, tensor.output_nr) for tensor in entered)
        self._ends = tuple(get_gradient_edge(output) if output.requires_grad else None for output in outputs)
        return tuple(output.detach() for output in outputs)


_ANCHOR = torch.zeros(0, requires_grad=True)
"""Makes the tensors of an entry seem to require gradients; has none itself."""


class _Entry(torch.autograd.Function):
    """Where a stage's graph begins. Unlike a leaf, keeps its tensors no longer than the graph needs them.

    ``data`` has a version counter of its own: rows behind those that a stage reads may still be written,
    and autograd would take that for a change of what the stage has saved.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Come out without their history, and as requiring a gradient, because ``anchor`` does."""
        return tuple(tensor.data for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        """Never called: gradients are taken at the entry."""
        raise AssertionError("a stage's gradients are taken at its entry, not behind it")


class GradientSums:
    """One gradient per parameter, summed over the stages and chunks of a block.

    16-bit gradients are summed in fp32 and rounded once. A gradient that Megatron's fused linear layers
    have written into ``main_grad`` themselves is a placeholder: it is passed on, never summed.
    """

    def __init__(self) -> None:
        self._sums: dict[Parameter, Tensor] = {}
        self._owned: set[Parameter] = set()

    def add(self, parameter: Parameter, gradient: Tensor | None) -> None:
        """Add one stage's gradient; None adds nothing."""
        if gradient is None:
            return
        if parameter not in self._sums or getattr(parameter, "grad_added_to_main_grad", False):
            self._sums[parameter] = gradient
        elif parameter in self._owned:
            self._sums[parameter].add_(gradient)
        else:
            # The first gradient may be shared with another tensor of the graph: never written into.
            first = self._sums[parameter]
            is_wide = first.element_size() >= 4
            self._sums[parameter] = first + gradient if is_wide else first.float().add_(gradient)
            self._owned.add(parameter)

    def take(self, parameter: Parameter) -> Tensor | None:
        """The sum in the parameter's dtype, None if no stage contributed."""
        total = self._sums.pop(parameter, None)
        return None if total is None else total.to(parameter.dtype)
