"""The autograd boundary of one compute stage, and the sums of parameter gradients.

A segment runs a stage on detached inputs and keeps its small graph, so that the backward pass can be
walked stage by stage in an order of our own. Called by :mod:`megatron_ampipe.runtime.block`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter


class Segment:
    """One stage's forward, and the graph for its backward.

    Args:
        function: Takes tensors, returns a tuple of tensors.
        inputs: Its arguments; their history is cut here.
        keep_graph: Whether :meth:`backward` will be called. Without, nothing is kept.
        recompute: Keep the inputs alone, and run the stage again in :meth:`backward`. Only for stages
            that draw no random numbers and leave no trace.
    """

    __slots__ = ("_function", "_outputs", "inputs", "values")

    def __init__(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        *inputs: Tensor,
        keep_graph: bool,
        recompute: bool = False,
    ) -> None:
        self._function = function if recompute else None
        self._outputs: tuple[Tensor, ...] = ()
        self.inputs: tuple[Tensor, ...] = ()
        if keep_graph:
            self.inputs = tuple(tensor.detach().requires_grad_() for tensor in inputs)
        if not keep_graph or recompute:
            with torch.no_grad():
                self.values = function(*inputs)
            return
        with torch.enable_grad():
            self._outputs = function(*self.inputs)
        self.values = tuple(output.detach() for output in self._outputs)

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
            with torch.enable_grad():
                self._outputs = self._function(*self.inputs)
        pairs = [
            (output, gradient)
            for output, gradient in zip(self._outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        assert pairs, "backward of a stage that nothing depends on, or a second backward"
        found = torch.autograd.grad(
            [output for output, _ in pairs],
            [*self.inputs, *parameters],
            [gradient for _, gradient in pairs],
            allow_unused=True,
        )
        count = len(self.inputs)
        for parameter, gradient in zip(parameters, found[count:], strict=True):
            sums.add(parameter, gradient)
        self.inputs = self._outputs = self.values = ()
        self._function = None
        return found[:count]


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
            wide = torch.float32 if gradient.element_size() < 4 else gradient.dtype
            self._sums[parameter] = self._sums[parameter].to(wide, copy=True).add_(gradient)
            self._owned.add(parameter)

    def take(self, parameter: Parameter) -> Tensor | None:
        """The sum in the parameter's dtype, None if no stage contributed."""
        total = self._sums.pop(parameter, None)
        return None if total is None else total.to(parameter.dtype)
