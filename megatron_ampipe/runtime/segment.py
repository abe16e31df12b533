"""The autograd boundary of one compute stage, and the sums of parameter gradients.

A segment runs a stage on detached inputs and keeps the autograd graph of that stage, so that backward can run
stage by stage in the order of the schedule. Called by :mod:`megatron_ampipe.runtime.block_call`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Parameter


class Segment:
    """The forward of one stage, and the autograd graph for its backward.

    Holds edges of the graph, not tensors: a tensor that no operation has saved is freed after its last use.

    Args:
        function: Takes tensors, returns a tuple of tensors.
        inputs: Its arguments; they are detached here.
        keep_graph: Whether :meth:`backward` will be called. If not, nothing is kept.
        recompute: Keep only the inputs, and run the stage again in :meth:`backward`. Only for stages that
            draw no random numbers and have no side effects.
        releases: :meth:`backward` releases the gradients that it is given after their first use. Only for
            stages with one output.
    """

    __slots__ = ("_function", "_given", "_input_edges", "_inputs", "_output_edges", "values")

    def __init__(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        *inputs: Tensor,
        keep_graph: bool,
        recompute: bool = False,
        releases: bool = False,
    ) -> None:
        self._given: list[Tensor | None] | None = [] if releases else None
        self._function: Callable[..., tuple[Tensor, ...]] | None = None
        self._inputs: tuple[Tensor, ...] = ()
        self._input_edges: tuple[GradientEdge, ...] = ()
        self._output_edges: tuple[GradientEdge | None, ...] = ()
        if keep_graph and recompute:
            self._function, self._inputs = function, tuple(tensor.detach() for tensor in inputs)
        if not keep_graph or recompute:
            with torch.no_grad():
                self.values = function(*inputs)
        else:
            self.values = self._build_graph(function, inputs)

    def backward(
        self, gradients: list[Tensor | None], *, parameters: Sequence[Parameter], sums: GradientSums
    ) -> tuple[Tensor | None, ...]:
        """Compute the gradients and release the graph; can be called once.

        Args:
            gradients: One per output; None if nothing depends on that output. Emptied here: where nobody else
                refers to them, they are freed when they are no longer needed.
            parameters: The parameters that the stage uses; their gradients are added to ``sums``.
            sums: Accumulates the parameter gradients of the chunks.

        Returns:
            The gradient of each input; None for an input that no output depends on.
        """
        if self._function is not None:
            self._build_graph(self._function, self._inputs)
            self._function, self._inputs = None, ()
        if self._given is not None:
            assert len(gradients) == 1, "a stage with several outputs cannot release their gradients"
            self._given += gradients
            gradients[:] = [None if gradients[0] is None else gradients[0].new_empty(0)]
        pairs = [
            (edge, gradient)
            for edge, gradient in zip(self._output_edges, gradients, strict=True)
            if gradient is not None and edge is not None
        ]
        gradients.clear()
        assert pairs, "backward of a stage that nothing depends on, or a second backward"
        computed = torch.autograd.grad(
            [edge for edge, _ in pairs],
            [*self._input_edges, *parameters],
            [gradient for _, gradient in pairs],
            allow_unused=True,
        )
        count = len(self._input_edges)
        for parameter, gradient in zip(parameters, computed[count:], strict=True):
            sums.add(parameter, gradient)
        self._output_edges = self._input_edges = ()
        return computed[:count]

    def _build_graph(
        self, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            detached = with_history(inputs)
            outputs = function(*detached)
            ends = outputs if self._given is None else (_TakeGradients.apply(self._given, *outputs),)
        # The output edges keep the graph alive, including the node that the input edges point to.
        self._input_edges = tuple(GradientEdge(tensor.grad_fn, tensor.output_nr) for tensor in detached)
        self._output_edges = tuple(get_gradient_edge(end) if end.requires_grad else None for end in ends)
        return tuple(output.detach() for output in outputs)


def with_history(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors as inputs of a separate graph: operations on them save what their backward needs."""
    detached: tuple[Tensor, ...] = _DetachInputs.apply(_ANCHOR, *tensors)
    return detached


_ANCHOR = torch.zeros(0, requires_grad=True)
"""An input of :class:`_DetachInputs` that requires a gradient, so that its outputs do; it receives none."""


class _DetachInputs(torch.autograd.Function):
    """The first node of a stage's graph. Unlike leaves, its outputs live only while the graph needs them.

    Returns ``data``, which has a separate version counter: a later stage may still write other rows of the
    same buffer, and autograd would report that as a modification of a saved tensor.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors detached, but requiring a gradient, because ``anchor`` does."""
        return tuple(tensor.data for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        """Never called: the gradients of a stage end at this node."""
        raise AssertionError("backward went past the inputs of a stage")


def hand_over(parameters: Sequence[Parameter], gradients: list[Tensor | None]) -> None:
    """Give each parameter its gradient, through its accumulation node and the hooks there.

    Args:
        parameters: At least one.
        gradients: One per parameter. Emptied here: a gradient to which nobody else refers is not copied.
    """
    with torch.enable_grad():
        end = _TakeGradients.apply(gradients, *parameters)
    torch.autograd.backward(end, end.new_empty(0))


class _TakeGradients(torch.autograd.Function):
    """The last node of a graph: its backward begins with the gradients in a list, and empties it.

    Whoever calls ``torch.autograd``, and the engine, refer to what they begin with until the end. So they
    begin with the gradient of an empty tensor.
    """

    @staticmethod
    def forward(ctx: Any, given: list[Tensor | None], *outputs: Tensor) -> Tensor:
        """``[0]``, of the device of the outputs."""
        ctx.given = given
        return outputs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """What the list holds."""
        found = (None, *ctx.given)
        ctx.given.clear()
        return found


class GradientSums:
    """One gradient per parameter, summed over the stages and chunks of a block.

    16-bit gradients are summed in fp32 and rounded once. If Megatron's fused linear layers have already added
    a gradient to ``main_grad``, what they return is a placeholder: it is passed on and never summed.
    """

    def __init__(self) -> None:
        self._sums: dict[Parameter, Tensor] = {}
        self._writable: set[Parameter] = set()

    def add(self, parameter: Parameter, gradient: Tensor | None) -> None:
        """Add one stage's gradient; None adds nothing."""
        if gradient is None:
            return
        if parameter not in self._sums or getattr(parameter, "grad_added_to_main_grad", False):
            self._sums[parameter] = gradient
        elif parameter in self._writable:
            self._sums[parameter].add_(gradient)
        else:
            # The first gradient may share memory with another tensor of the graph: never written in place.
            first = self._sums[parameter]
            is_wide = first.element_size() >= 4
            self._sums[parameter] = first + gradient if is_wide else first.float().add_(gradient)
            self._writable.add(parameter)

    def take(self, parameter: Parameter) -> Tensor | None:
        """Remove and return the sum, in the parameter's dtype; None if no stage contributed."""
        total = self._sums.pop(parameter, None)
        return None if total is None else total.to(parameter.dtype)
