"""The autograd boundary of one compute stage, and the gradients of parameters.

A segment runs a stage on detached inputs and keeps the autograd graph of that stage, so that backward can run
stage by stage in the order of the schedule. Gradients of parameters are summed over stages; those of weights
can be left to separate stages (:class:`WeightProducts`), and those of keys and values are summed over chunks
(:class:`KeyValueSums`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from megatron_ampipe.schedule.kinds import SUM_BYTES

# R rows, K inputs, N outputs of a linear layer.
# S keys, B batch, G key/value heads, C head size of keys, V of values.


class Segment:
    """The forward of one stage, and the autograd graph for its backward.

    Holds edges of the graph, not tensors: a tensor that no operation has saved is freed after its last use.
    Create and differentiate it with gradients enabled.

    Args:
        function: Takes tensors, returns a tuple of tensors.
        inputs: Its arguments; they are detached here.
        recall: Returns the inputs again. If given, nothing is saved, and :meth:`backward` runs the stage
            again. Only for stages that draw no random numbers and have no side effects.
        releases: :meth:`backward` releases its input gradients after their first use. Only for stages with
            one output.

    Attributes:
        values: The outputs of the function, detached. The caller removes them, so that they are freed early.
        comm_memory: Memory that the graph may use and that several streams use.
        is_captured: The graph is kept after :meth:`backward`, because CUDA graphs use its saved tensors.
    """

    __slots__ = ("_again", "_given", "_input_edges", "_output_edges", "comm_memory", "is_captured", "values")
    _input_edges: Sequence[GradientEdge]
    _output_edges: Sequence[GradientEdge | None]
    values: Sequence[Tensor]

    def __init__(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        inputs: Sequence[Tensor],
        *,
        recall: Callable[[], Sequence[Tensor]] | None = None,
        releases: bool = False,
    ) -> None:
        self.comm_memory: tuple[StorageWeakRef, ...] = ()
        self.is_captured = False
        self._given: list[Tensor | None] | None = [] if releases else None
        self._again: Callable[[], object] | None = None
        if recall is None:
            self.values = self._build_graph(function, inputs)
            return
        self._again = lambda: self._build_graph(function, recall())
        with torch.no_grad():
            self.values = function(*inputs)

    def backward(
        self,
        gradients: list[Tensor | None],
        *,
        parameters: Sequence[int],
        sums: GradientSums,
        products: WeightProducts | None = None,
    ) -> Sequence[Tensor | None]:
        """Compute the gradients and release the graph. Can be called once.

        Args:
            gradients: One per output; None if nothing depends on that output. The list is emptied, so that
                gradients are freed when they are no longer needed.
            parameters: Numbers in ``sums`` of the parameters that the stage uses; their gradients are added.
            sums: Accumulates the parameter gradients of the chunks.
            products: Where the stage has delayed gradients of weights; autograd's placeholders for them are
                not added.

        Returns:
            The gradient of each input; None for an input that no output depends on.
        """
        if self._again is not None:
            self._again()
            self._again = None
        if self._given is not None:
            assert len(gradients) == 1, "a stage with several outputs cannot release their gradients"
            self._given += gradients
            gradients[:] = [None if gradients[0] is None else gradients[0].new_empty(0)]
        begins = [
            (edge, gradient)
            for edge, gradient in zip(self._output_edges, gradients, strict=True)
            if gradient is not None and edge is not None
        ]
        gradients.clear()
        assert begins, "backward of a stage that nothing depends on, or a second backward"
        count = len(self._input_edges)
        trained = sums.parameters
        # torch.autograd.grad without the checks that it makes in Python: for a small graph they cost the host
        # more than its backward, and there is one for every stage of every chunk. The engine checks as well.
        run = _engine_run_backward if not sums.hooked else sums.run_without_hooks
        computed: Sequence[Tensor | None] = run(
            tuple([edge for edge, _ in begins]),
            tuple([gradient for _, gradient in begins]),
            self.is_captured,
            False,
            (*self._input_edges, *[trained[number] for number in parameters]),
            True,
            accumulate_grad=False,
        )
        late = () if products is None else products.late
        for place, number in enumerate(parameters, count):
            if computed[place] is not None and trained[number] not in late:
                sums.add(number, computed[place])
        if not self.is_captured:
            self._output_edges = self._input_edges = ()
        return computed[:count]

    def _build_graph(
        self, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        detached = with_history(inputs)
        outputs = function(*detached)
        ends = outputs if self._given is None else (_TakeGradients.apply(self._given, *outputs),)
        # The output edges keep the graph alive, including the node that the input edges point to.
        first = detached[0].grad_fn
        assert first is not None
        self._input_edges = [GradientEdge(first, number) for number in range(len(detached))]
        self._output_edges = [
            # As ``get_gradient_edge``, quickly where the node itself keeps the graph alive.
            GradientEdge(node, end.output_nr)
            if not isinstance(node := end.grad_fn, _NOT_KEPT)
            else get_gradient_edge(end)
            if node is not None
            else None
            for end in ends
        ]
        return [output.detach() for output in outputs]


_NOT_KEPT = (type(None), torch._C._FunctionBase)
"""No node; and nodes of Python functions, which do not keep the graph alive."""


def with_history(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors as inputs of a separate graph: operations on them save what their backward needs."""
    detached: tuple[Tensor, ...] = _DetachInputs.apply(_ANCHOR, *tensors)
    return detached


_ANCHOR = torch.zeros(0, requires_grad=True)
"""An input of :class:`_DetachInputs` that requires a gradient, so that its outputs do; it receives none."""


class _DetachInputs(torch.autograd.Function):
    """The first node of a stage's graph. Its outputs, unlike leaves, live only while the graph needs them.

    Returns ``data``, which has a separate version counter: a later stage may write other rows of the same
    buffer, which autograd would report as a modification of a saved tensor.
    """

    @staticmethod
    def forward(ctx: object, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors detached, but requiring a gradient, because ``anchor`` does."""
        return tuple([tensor.data for tensor in tensors])

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> None:
        """Never called: the gradients of a stage end at this node."""
        raise AssertionError("backward went past the inputs of a stage")


def accumulate_param_grads(parameters: Sequence[Parameter], gradients: list[Tensor | None]) -> None:
    """Give each parameter its gradient through its accumulation node, which runs the hooks there.

    Args:
        parameters: At least one.
        gradients: One per parameter. The list is emptied, so that accumulation need not copy a gradient.
    """
    with torch.enable_grad():
        end = _TakeGradients.apply(gradients, *parameters)
    torch.autograd.backward(end, end.new_empty(0))


class _TakeContext(Protocol):
    """What a node of :class:`_TakeGradients` saves."""

    given: list[Tensor | None]


class _TakeGradients(torch.autograd.Function):
    """The last node of a graph: its backward returns the gradients in a list, and empties the list.

    The caller of ``torch.autograd`` and the engine keep the gradient that they start with until the end. With
    this node that is the gradient of an empty tensor.
    """

    @staticmethod
    def forward(ctx: _TakeContext, given: list[Tensor | None], *outputs: Tensor) -> Tensor:
        """Return an empty tensor on the device of the outputs, which may be quantized."""
        ctx.given = given
        return torch.empty(0, device=outputs[0].device)

    @staticmethod
    def backward(ctx: _TakeContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients in the list."""
        gradients = (None, *ctx.given)
        ctx.given.clear()
        return gradients


class BlockParameters:
    """The trainable parameters of a block, each once.

    Args:
        feed_forward: The parameters that only kinds of ``kinds.FEED_FORWARD`` use.
        others: All others.

    Attributes:
        all: All parameters, in the order of their numbers.
        numbers: The number of each parameter.
    """

    def __init__(self, feed_forward: Sequence[Parameter], others: Sequence[Parameter]) -> None:
        self.feed_forward, self.others = tuple(feed_forward), tuple(others)
        self.all = self.feed_forward + self.others
        self.numbers = {parameter: number for number, parameter in enumerate(self.all)}


class GradientSums:
    """One gradient per parameter, summed over the stages and chunks of a block.

    16-bit gradients are summed in fp32 and rounded once. If Megatron's fused linear layers have already added
    a gradient to ``main_grad``, they return a placeholder, which is passed on and never summed.

    Args:
        parameters: The parameters of the block; methods take their numbers.

    Attributes:
        hooked: The parameters with gradient hooks (``Tensor.register_hook``), see :meth:`find_hooks`.
    """

    __slots__ = ("_sums", "_writable", "hooked", "numbers", "parameters")

    def __init__(self, parameters: BlockParameters) -> None:
        self.parameters, self.numbers = parameters.all, parameters.numbers
        self.hooked: list[Parameter] = []
        self._sums: list[Tensor | None] = [None] * len(self.parameters)
        self._writable = [False] * len(self.parameters)

    def add(self, number: int, gradient: Tensor | None) -> None:
        """Add one stage's gradient; None adds nothing."""
        if gradient is None:
            return
        first = self._sums[number]
        if first is None or getattr(self.parameters[number], "grad_added_to_main_grad", False):
            self._sums[number] = gradient
        elif self._writable[number]:
            first.add_(gradient)
        else:
            # The first gradient may share memory with another tensor of the graph: never written in place.
            is_wide = first.element_size() >= 4
            self._sums[number] = first + gradient if is_wide else first.float().add_(gradient)
            self._writable[number] = True

    def find_hooks(self) -> None:
        """Look for gradient hooks; called when a backward pass begins."""
        self.hooked = [parameter for parameter in self.parameters if parameter._backward_hooks]

    def run_without_hooks(
        self, ends: Sequence[GradientEdge], *args: object, **kwargs: object
    ) -> Sequence[Tensor | None]:
        """Run torch's engine for one stage, without the gradient hooks of the parameters.

        The engine would call them with the gradient of one stage of one chunk. They run once, with the sum,
        when :func:`accumulate_param_grads` or the node of the block gives it to autograd.
        """
        all_hooks = [parameter._backward_hooks for parameter in self.hooked]
        taken = [(hooks, dict(hooks)) for hooks in all_hooks if hooks is not None]
        try:
            for hooks, _ in taken:
                # Emptied, not replaced: handles of the user refer to this dictionary.
                hooks.clear()
            computed: Sequence[Tensor | None] = _engine_run_backward(ends, *args, **kwargs)
        finally:
            for hooks, kept in taken:
                hooks.update(kept)
        return computed

    def entry(self, number: int) -> tuple[Tensor | None, bool]:
        """The sum so far, and whether it can be written in place."""
        return self._sums[number], self._writable[number]

    def put(self, number: int, total: Tensor | None, is_writable: bool) -> None:
        """Set a sum to what :meth:`entry` returned for the same stages of another pass."""
        self._sums[number], self._writable[number] = total, is_writable

    def take(self, number: int) -> Tensor | None:
        """Remove and return the sum, in the parameter's dtype; None if no stage contributed."""
        total, self._sums[number] = self._sums[number], None
        dtype = self.parameters[number].dtype
        return total if total is None or total.dtype == dtype else total.to(dtype)


WeightProduct = Callable[[Tensor, Tensor], Tensor | None]
"""Computes the gradient ``[N, K]`` of a weight from ``inputs [R, K]`` and ``gradient [R, N]``. Returns
Megatron's placeholder if it has added the gradient to ``main_grad``."""
DelayedTensors = list[Tensor | list[Tensor] | None]
"""The tensors of a delayed product: of a grouped layer, lists by expert.

In place of a tensor, Transformer Engine can give an object that holds tensors: quantized ones, or the rows of
all experts.
"""
Delayed = Callable[[DelayedTensors], Iterable[tuple[Parameter, Tensor | None]]]
"""Computes a layer's delayed products from the tensors that it gave. Yields parameters with their gradients,
or with Megatron's placeholder for a gradient that was added to ``main_grad``."""


class WeightProducts:
    """The delayed weight-gradient products (wgrad) of one stage of one chunk.

    A linear layer's backward is two products. Only the input's gradient (dgrad) is on the critical path.
    Within ``BlockFunctions.delay_wgrad``, a layer computes only dgrad, and stores here the operands of
    the wgrad. torch's own graph cannot be split for this, because Megatron's linear function always
    computes both products. Transformer Engine's layers delay their wgrad themselves.
    """

    def __init__(self) -> None:
        self._waiting: dict[Parameter, tuple[WeightProduct, list[Tensor], list[Tensor]]] = {}
        self._delayed: list[tuple[Delayed, DelayedTensors]] = []
        self.late: set[Parameter] = set()
        """Weights of layers that delay their wgrad themselves."""

    def keep(self, weight: Parameter, product: WeightProduct, inputs: Tensor, gradient: Tensor) -> None:
        """Keep the operands of a product; both may have several leading dimensions of rows."""
        _, rows, gradients = self._waiting.setdefault(weight, (product, [], []))
        rows.append(inputs.reshape(-1, inputs.shape[-1]))
        gradients.append(gradient.reshape(-1, gradient.shape[-1]))

    def delay(self, weights: Iterable[Parameter], product: Delayed, tensors: DelayedTensors) -> None:
        """Keep a product that a layer has delayed itself."""
        self.late.update(weights)
        self._delayed.append((product, tensors))

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that are kept."""
        kept = [tensor for _, *kept in self._waiting.values() for part in kept for tensor in part]
        for _, parts in self._delayed:
            for part in parts:
                for operand in part if isinstance(part, list) else [part]:
                    kept += _tensors_of(operand)
        return kept

    @classmethod
    def joined(cls, parts: Iterable[WeightProducts]) -> WeightProducts:
        """Join the products of several chunks into one product for each weight."""
        joined = cls()
        for part in parts:
            for weight, (product, rows, gradients) in part._waiting.items():
                _, all_rows, all_gradients = joined._waiting.setdefault(weight, (product, [], []))
                all_rows += rows
                all_gradients += gradients
            joined._delayed += part._delayed
        return joined

    def add_to(self, sums: GradientSums) -> None:
        """Compute and release the products; those of a weight as one product if :func:`is_one_product`."""
        waiting, self._waiting = self._waiting, {}
        with torch.no_grad():
            while waiting:
                weight = next(iter(waiting))
                product, rows, gradients = waiting.pop(weight)
                if len(rows) > 1 and is_one_product(rows, gradients):
                    rows, gradients = [torch.cat(rows)], [torch.cat(gradients)]
                number = sums.numbers[weight]
                while rows:
                    sums.add(number, product(rows.pop(0), gradients.pop(0)))
            while self._delayed:
                delayed, tensors = self._delayed.pop(0)
                for parameter, gradient in delayed(tensors):
                    sums.add(sums.numbers[parameter], gradient)
                del tensors


def _tensors_of(operand: object) -> list[Tensor]:
    """A tensor, or those that an object of Transformer Engine holds."""
    held = [operand] if isinstance(operand, Tensor) else getattr(operand, "__dict__", {}).values()
    return [tensor for tensor in held if isinstance(tensor, Tensor)]


def is_one_product(rows: Sequence[Tensor], gradients: Sequence[Tensor]) -> bool:
    """Whether to concatenate the rows of several chunks: if that moves fewer bytes than summing per chunk.

    Concatenation moves the inputs ``[R, K]`` and gradients ``[R, N]``; summing moves ``[N, K]`` in fp32.
    """
    inputs, outputs = rows[0].shape[-1], gradients[0].shape[-1]
    row_bytes = rows[0].element_size() * sum(map(len, gradients)) * (inputs + outputs)
    return row_bytes <= SUM_BYTES * (len(rows) - 1) * inputs * outputs


class KeyValueSums:
    """The gradients of keys and values, summed in fp32 over all chunks that attend to them.

    Args:
        key: ``[S, B, G, C]``, all rows; only shape, dtype and device are used.
        value: ``[S, B, G, V]``, likewise.
    """

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self._like = key, value
        self.allocated: tuple[Tensor, ...] = ()
        """The buffers of the sums, if there are any yet."""

    def add(self, start: int, key: Tensor, value: Tensor, *, sequence: int | None = None) -> None:
        """Add the gradients of the rows from ``start`` on, ``[rows, B, G, ...]``. With ``sequence``, of only
        that sequence of the micro-batch, ``[rows, 1, G, ...]``."""
        for total, part in zip(self.totals(), (key, value), strict=True):
            target = total if sequence is None else total[:, sequence : sequence + 1]
            target[start : start + part.shape[0]].add_(part)

    def totals(self) -> tuple[Tensor, ...]:
        """The sums so far, for keys and for values; later calls of :meth:`add` change these tensors."""
        if not self.allocated:
            self.allocated = tuple(
                torch.zeros(like.shape, dtype=sum_dtype(like), device=like.device) for like in self._like
            )
        return self.allocated

    def rounded(self, total: Tensor, index: int) -> Tensor:
        """A sum in the dtype of the keys (index 0) or values (1)."""
        return total.to(self._like[index].dtype)


def sum_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which several gradients of a tensor are summed: at least fp32."""
    return torch.float32 if tensor.element_size() < 4 else tensor.dtype
