"""Local experts over rows of fixed number: grouped products whose groups end where tensors on the device say.

In place of ``SequentialMLP.forward``, which the host must tell the number of rows of each expert. Weights are
read after their module was called, so that Megatron's hooks run; activation and probabilities are those of
Megatron's MLP, over the rows of all experts. Rows after the last offset may hold anything: no group has them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_ampipe.exchange.fixed_rows import ExpertOffsets
from megatron_ampipe.layers.linear_layers import (
    LOCAL_LINEARS,
    expert_products,
    products_of,
    replaced,
)
from megatron_ampipe.runtime.saved_tensors import ExpertTensors, LinearOutput
from megatron_ampipe.runtime.segment import DelayedTensors, WeightProducts, sum_dtype
from megatron_ampipe.schedule import Direction

# R rows, K inputs and N outputs of a linear layer, L local experts.

Product = Callable[[Tensor], LinearOutput]
"""Multiplies rows ``[R, K]`` to ``[R, N]``."""
_GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT = 16
"""Bytes that the rows of both operands of torch's grouped product must be a multiple of."""


GROUPED_CAPABILITIES = (9, 10)
"""Major compute capabilities for which torch has a grouped product that takes its sizes from the device."""


def has_local_experts(experts: Module) -> bool:
    """Whether grouped products of torch can run in place of these experts: Megatron's local ones."""
    if type(experts) is not SequentialMLP:
        return False
    first, second = expert_products(experts)
    return all(type(linear) in LOCAL_LINEARS for linear in first + second)


def local_products_problem(capability: tuple[int, int]) -> str | None:
    """Why products over local experts make the host of a GPU wait; None if they do not."""
    if capability[0] in GROUPED_CAPABILITIES:
        return None
    return (
        "torch's products over experts take their sizes from the device on GPUs of compute capability 9 and "
        f"10, and this one has {capability[0]}.{capability[1]}"
    )


def run_experts(experts: Module, rows: Tensor, probs: Tensor, products: FixedProducts) -> Tensor:
    """Apply Megatron's local experts to ``[R, D]``, sorted by expert, with probabilities ``[R]``."""
    assert isinstance(experts, SequentialMLP)
    if experts.config.moe_apply_probs_on_input:
        rows = (probs.unsqueeze(-1) * rows).to(rows.dtype)
        probs = torch.ones_like(probs)
    layers: Sequence[Any] = list(experts.local_experts)
    up, down = [layer.linear_fc1 for layer in layers], [layer.linear_fc2 for layer in layers]
    forwards: list[tuple[Module, str, object]] = []
    for linears, run in ((up, products.up(up)), (down, products.down(down, probs))):
        forwards += [(linear, "forward", _enter) for linear in linears[1:]]
        forwards.append((linears[0], "forward", run))
    with replaced(*forwards):
        output, bias = layers[0](rows, probs)
    assert bias is None
    result: Tensor = output
    return result


class FixedProducts(NamedTuple):
    """How the products over the local experts of one chunk run."""

    offsets: ExpertOffsets
    weights: ExpertWeights
    inner: ExpertTensors | None
    """What runs them, if they save less."""

    def up(self, linears: Sequence[Any]) -> Product:
        """In place of the forward of the first of the experts' first linear layers."""
        run = functools.partial(_products, linears, self.offsets, self.weights.up, None)
        return run if self.inner is None else functools.partial(self.inner.up, run)

    def down(self, linears: Sequence[Any], probs: Tensor) -> Product:
        """The same of the last linear layers, whose biases are weighted by ``probs``."""
        run = functools.partial(_products, linears, self.offsets, self.weights.down, probs)
        return run if self.inner is None else functools.partial(self.inner.down, run)


def _enter() -> None:
    """In place of the forward of a linear layer whose weight is read: only its hooks run."""


def _products(
    linears: Sequence[Any],
    offsets: ExpertOffsets,
    stacked: StackedWeights,
    scale: Tensor | None,
    rows: Tensor,
) -> LinearOutput:
    """In place of the forward of the first of these linear layers: ``[R, K]`` to ``[R, N]``."""
    for other in linears[1:]:
        other()
    weights = [linear.weight for linear in linears]
    products = products_of(linears[0])
    output = grouped_product(rows, weights, offsets, stacked=stacked, products=products)
    if linears[0].bias is not None:
        added = biases_of_rows([linear.bias for linear in linears], offsets.ends, len(rows))
        output = output + (added if scale is None else (added * scale.unsqueeze(-1)).to(added.dtype))
    return output, None


def biases_of_rows(biases: Sequence[Tensor], ends: Tensor, num_rows: int) -> Tensor:
    """``[R, N]``: of each row the bias of its expert, whose rows end at ``ends [L]``.

    Gradients of 16 bits are summed in fp32, as in a linear layer.
    """
    numbers = torch.arange(num_rows, device=ends.device, dtype=ends.dtype)
    # Padding has the number after the last expert, whose bias gets what gradient its rows have.
    expert = torch.searchsorted(ends, numbers, right=True)
    every_bias = torch.stack([*biases, torch.zeros_like(biases[0])])
    wide = every_bias.to(sum_dtype(every_bias))
    return wide.index_select(0, expert).to(every_bias.dtype)


class StackedWeights:
    """The weights of one linear layer of all local experts, as one tensor for the chunks of a pass.

    The first chunk of a pass stacks them, and the last one releases the copy. The backward pass makes
    another: kept in between, every micro-batch in flight would hold a copy of the weights.
    """

    def __init__(self, num_chunks: int) -> None:
        self._num_chunks = num_chunks
        self._stacked: Tensor | None = None
        self._num_uses = {Direction.FORWARD: 0, Direction.BACKWARD: 0}

    def take(self, weights: Sequence[Tensor], direction: Direction) -> Tensor:
        """The weights ``[L, N, K]``, for the product of one chunk."""
        stacked = self._stacked
        if stacked is None:
            with torch.no_grad():
                stacked = self._stacked = torch.stack(list(weights))
        self._num_uses[direction] += 1
        num_forward, num_backward = self._num_uses.values()
        if num_backward == self._num_chunks:
            # Fewer chunks than all may have run again before.
            self._num_uses = {Direction.FORWARD: 0, Direction.BACKWARD: 0}
            self._stacked = None
        elif num_forward == self._num_chunks and num_backward == 0:
            self._num_uses[Direction.FORWARD] = 0
            self._stacked = None
        return stacked


class ExpertWeights:
    """The :class:`StackedWeights` of both linear layers of a block, in the passes of one micro-batch."""

    def __init__(self, num_chunks: int) -> None:
        self.up = StackedWeights(num_chunks)
        self.down = StackedWeights(num_chunks)


def grouped_product(
    rows: Tensor,
    weights: Sequence[Parameter],
    offsets: ExpertOffsets,
    *,
    stacked: StackedWeights,
    products: WeightProducts | None = None,
) -> Tensor:
    """Multiply the rows of each expert ``[R, K]`` by its weight ``[N, K]``, to ``[R, N]``.

    The gradients of trained weights are left to ``products``, if given.
    """
    if not any(weight.requires_grad for weight in weights):
        products = None
    # Without gradients to compute, the weights are only read.
    inputs = weights if products is None else [weight.detach() for weight in weights]
    output: Tensor = _GroupedProduct.apply(rows, offsets.ends, stacked, (weights, products), *inputs)
    return output


_Delaying = tuple[Sequence[Parameter], WeightProducts | None]
"""The weights of a product, and where to leave their gradients."""


class _ProductContext(Protocol):
    """What a node of :class:`_GroupedProduct` saves."""

    stacked: StackedWeights
    delaying: _Delaying
    needs_input_grad: tuple[bool, ...]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _GroupedProduct(torch.autograd.Function):
    """A product for each expert. Saves its input, and no copy of the weights."""

    @staticmethod
    def forward(
        ctx: _ProductContext,
        rows: Tensor,
        ends: Tensor,
        stacked: StackedWeights,
        delaying: _Delaying,
        *weights: Tensor,
    ) -> Tensor:
        """``[R, K]`` and ``L`` weights ``[N, K]`` to ``[R, N]``."""
        ctx.stacked, ctx.delaying = stacked, delaying
        ctx.save_for_backward(rows, ends)
        return _multiply(rows, stacked.take(weights, Direction.FORWARD).transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: _ProductContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the rows, and of the weights unless they are delayed."""
        rows, ends = ctx.saved_tensors
        weights, products = ctx.delaying
        gradient = gradient.contiguous()
        of_rows = _multiply(gradient, ctx.stacked.take(weights, Direction.BACKWARD), ends)
        of_weights: list[Tensor | None] = [None] * len(weights)
        if products is not None:
            delayed = functools.partial(_delayed_gradients, weights)
            products.delay(weights, delayed, [rows, gradient, ends])
        elif any(ctx.needs_input_grad[4:]):
            of_weights = list(weight_gradients(rows, gradient, ends))
        return of_rows, None, None, None, *of_weights


def _delayed_gradients(
    weights: Sequence[Parameter], tensors: DelayedTensors
) -> Iterator[tuple[Parameter, Tensor | None]]:
    """The gradients of all weights, from their inputs ``[R, K]`` and the gradient ``[R, N]``."""
    inputs, gradient, ends = tensors
    assert isinstance(inputs, Tensor) and isinstance(gradient, Tensor) and isinstance(ends, Tensor)
    computed = weight_gradients(inputs, gradient, ends)
    for weight, part in zip(weights, computed, strict=True):
        if weight.requires_grad:
            yield weight, part


def _multiply(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """``[R, K]`` times ``weights [L, K, N]``; rows after the last of ``ends [L]`` are undefined."""
    if _can_group(rows, weights.shape[1], weights.shape[2]):
        product: Tensor = torch.nn.functional.grouped_mm(rows, weights, offs=ends)
        return product
    # Each expert multiplies all rows, of which those of other experts are zero.
    output = rows.new_zeros((len(rows), weights.shape[2]))
    for weight, is_own in zip(weights, _masks_of(ends, len(rows)), strict=True):
        output = torch.where(is_own, torch.where(is_own, rows, 0) @ weight, output)
    return output


def weight_gradients(inputs: Tensor, gradient: Tensor, ends: Tensor) -> Sequence[Tensor]:
    """``[N, K]`` for each expert, from the inputs ``[R, K]`` of a product and its gradient ``[R, N]``."""
    if _can_group(inputs, inputs.shape[1], gradient.shape[1]):
        product: Tensor = torch.nn.functional.grouped_mm(gradient.t(), inputs, offs=ends)
        return product.unbind()
    return [
        torch.where(is_own, gradient, 0).t() @ torch.where(is_own, inputs, 0)
        for is_own in _masks_of(ends, len(inputs))
    ]


def _can_group(rows: Tensor, *sizes: int) -> bool:
    """Whether torch has a grouped product of these rows, for operands of these widths.

    On a GPU that of other dtypes than bf16 reads the offsets on the host.
    """
    dtypes = (torch.bfloat16,) if rows.is_cuda else _GROUPED_DTYPES
    has_it = hasattr(torch.nn.functional, "grouped_mm") and rows.dtype in dtypes and len(rows) > 0
    return has_it and all(size * rows.element_size() % _ALIGNMENT == 0 for size in sizes)


def _masks_of(ends: Tensor, num_rows: int) -> Iterator[Tensor]:
    """For each expert ``[R, 1]``: which rows are its own."""
    numbers = torch.arange(num_rows, device=ends.device, dtype=torch.int32)
    expert = torch.searchsorted(ends, numbers, right=True).unsqueeze(1)
    for number in range(len(ends)):
        yield expert == number
