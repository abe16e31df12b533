"""Local experts over rows of fixed number: grouped products whose groups end where tensors on the device say.

In place of ``SequentialMLP.forward``, which the host must tell the number of rows of each expert. Weights are
read after their module was called, so that Megatron's hooks run; activation and probabilities are those of
Megatron's MLP, over the rows of all experts. Rows after the last offset may hold anything: no group has them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_ampipe.block.settings import SETTING
from megatron_ampipe.exchange.fixed_rows import ExpertOffsets
from megatron_ampipe.layers.linear_layers import keep_for_weights, products_of, replaced
from megatron_ampipe.runtime.segment import DelayedTensors, WeightProducts

# R rows, K inputs and N outputs of a linear layer, L local experts.

_GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT = 16
"""Bytes that the rows of both operands of torch's grouped product must be a multiple of."""


def require_local_experts(experts: Module) -> None:
    """Raise :class:`BadInput` unless these experts can run over fixed rows."""
    if type(experts) is not SequentialMLP:
        rule = f"the experts are {type(experts).__name__}, whose products take numbers of rows from the host"
        remedy = "Use --transformer-impl local without --moe-grouped-gemm, or --ampipe-rows exact."
        raise SETTING["rows"].refuse("fixed", rule, remedy)


def run_experts(experts: Module, rows: Tensor, offsets: ExpertOffsets, probs: Tensor) -> Tensor:
    """Apply Megatron's local experts to ``[R, D]``, sorted by expert, with probabilities ``[R]``."""
    assert isinstance(experts, SequentialMLP)
    if experts.config.moe_apply_probs_on_input:
        rows = (probs.unsqueeze(-1) * rows).to(rows.dtype)
        probs = torch.ones_like(probs)
    layers: Sequence[Any] = list(experts.local_experts)
    up, down = [layer.linear_fc1 for layer in layers], [layer.linear_fc2 for layer in layers]
    forwards: list[tuple[Module, str, object]] = []
    for linears, scale in ((up, None), (down, probs)):
        forwards += [(linear, "forward", _enter) for linear in linears[1:]]
        forwards.append((linears[0], "forward", functools.partial(_products, linears, offsets, scale)))
    with replaced(*forwards):
        output, bias = layers[0](rows, probs)
    assert bias is None
    result: Tensor = output
    return result


def _enter() -> None:
    """In place of the forward of a linear layer whose weight is read: only its hooks run."""


def _products(
    linears: Sequence[Any], offsets: ExpertOffsets, scale: Tensor | None, rows: Tensor
) -> tuple[Tensor, None]:
    """In place of the forward of the first of these linear layers: ``[R, K]`` to ``[R, N]``."""
    for other in linears[1:]:
        other()
    weights = [linear.weight for linear in linears]
    output = grouped_product(rows, weights, offsets, products_of(linears[0]))
    if linears[0].bias is not None:
        numbers = torch.arange(len(rows), device=rows.device, dtype=torch.int32)
        # Padding has the number after the last expert, whose bias gets what gradient its rows have.
        expert = torch.searchsorted(offsets.ends, numbers, right=True)
        biases = torch.stack([*(linear.bias for linear in linears), torch.zeros_like(linears[0].bias)])
        added = biases.index_select(0, expert)
        output = output + (added if scale is None else (added * scale.unsqueeze(-1)).to(added.dtype))
    return output, None


def grouped_product(
    rows: Tensor, weights: Sequence[Parameter], offsets: ExpertOffsets, products: WeightProducts | None = None
) -> Tensor:
    """Multiply the rows of each expert ``[R, K]`` by its weight ``[N, K]``, to ``[R, N]``.

    The gradients of trained weights are left to ``products``, if given.
    """
    if products is None or not any(weight.requires_grad for weight in weights):
        return _multiply(rows, torch.stack(list(weights)).transpose(1, 2), offsets.ends)
    detached = torch.stack([weight.detach() for weight in weights])
    output = _multiply(rows, detached.transpose(1, 2), offsets.ends)

    def keep(inputs: Tensor, gradient: Tensor) -> None:
        delayed = functools.partial(_delayed_gradients, weights)
        products.delay(weights, delayed, [inputs, gradient, offsets.ends])

    return keep_for_weights(output, rows.detach(), keep)


def _delayed_gradients(
    weights: Sequence[Parameter], tensors: DelayedTensors
) -> Iterator[tuple[Parameter, Tensor | None]]:
    """The gradients of all weights, from their inputs ``[R, K]`` and the gradient ``[R, N]``."""
    inputs, gradient, ends = tensors
    assert isinstance(inputs, Tensor) and isinstance(gradient, Tensor) and isinstance(ends, Tensor)
    with torch.enable_grad():
        stacked = torch.stack([weight.detach() for weight in weights]).requires_grad_()
        output = _multiply(inputs, stacked.transpose(1, 2), ends)
    (computed,) = torch.autograd.grad(output, stacked, gradient)
    for weight, part in zip(weights, computed, strict=True):
        if weight.requires_grad:
            yield weight, part


def _multiply(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """``[R, K]`` times ``weights [L, K, N]``; rows after the last of ``ends [L]`` come out as anything."""
    sizes = (weights.shape[1] * rows.element_size(), weights.shape[2] * rows.element_size())
    is_aligned = all(size % _ALIGNMENT == 0 for size in sizes)
    grouped = getattr(torch.nn.functional, "grouped_mm", None)
    if grouped is not None and is_aligned and rows.dtype in _GROUPED_DTYPES and len(rows):
        product: Tensor = grouped(rows, weights, offs=ends)
        return product
    # Each expert multiplies all rows, of which those of other experts are zero.
    numbers = torch.arange(len(rows), device=rows.device, dtype=torch.int32)
    expert = torch.searchsorted(ends, numbers, right=True).unsqueeze(1)
    output = rows.new_zeros((len(rows), weights.shape[2]))
    for number, weight in enumerate(weights):
        is_own = expert == number
        output = torch.where(is_own, torch.where(is_own, rows, 0) @ weight, output)
    return output
