"""Gradients of weights as separate stages: what is kept for them when inputs are differentiated.

A linear layer's backward is two products, and only that for its input is on the critical path. A layer that
runs within ``BlockFunctions.weights_apart`` computes that one alone, and :func:`keep_for_weight` notes what
the other takes. torch's own graph cannot be split for this: Megatron's linear function computes both products
whichever is asked for. Called by :mod:`.steps`; layers call :func:`keep_for_weight`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_ampipe.runtime.segment import GradientSums

# R rows, K inputs, N outputs of a linear layer.

WeightProduct = Callable[[Tensor, Tensor], Tensor | None]
"""``inputs [R, K]`` and ``gradient [R, N]`` to the weight's gradient ``[N, K]``, or to what Megatron returns
in its place where it was added to ``main_grad``."""
SUM_BYTES = 4
"""Of a number in a sum of gradients."""


class WeightProducts:
    """The products of the weight gradients of one stage of one chunk that are still to be computed."""

    def __init__(self) -> None:
        self._waiting: dict[Parameter, tuple[WeightProduct, list[Tensor], list[Tensor]]] = {}

    def keep(self, weight: Parameter, product: WeightProduct, inputs: Tensor, gradient: Tensor) -> None:
        """Keep what a product takes; rows may be spread over several leading dimensions."""
        _, rows, gradients = self._waiting.setdefault(weight, (product, [], []))
        rows.append(inputs.reshape(-1, inputs.shape[-1]))
        gradients.append(gradient.reshape(-1, gradient.shape[-1]))

    @property
    def tensors(self) -> list[Tensor]:
        """Everything that is kept."""
        return [tensor for _, *kept in self._waiting.values() for part in kept for tensor in part]

    @classmethod
    def joined(cls, parts: Iterable[WeightProducts]) -> WeightProducts:
        """The products of several chunks, as one product for each weight."""
        found = cls()
        for part in parts:
            for weight, (product, rows, gradients) in part._waiting.items():
                _, of_all, gradients_of_all = found._waiting.setdefault(weight, (product, [], []))
                of_all += rows
                gradients_of_all += gradients
        return found

    def add_to(self, sums: GradientSums) -> None:
        """Compute the products, each weight's as one if :func:`is_one_product`, and release all."""
        waiting, self._waiting = self._waiting, {}
        with torch.no_grad():
            while waiting:
                weight = next(iter(waiting))
                product, rows, gradients = waiting.pop(weight)
                if len(rows) > 1 and _are_one_product(rows, gradients):
                    rows, gradients = [torch.cat(rows)], [torch.cat(gradients)]
                number = sums.numbers[weight]
                while rows:
                    sums.add(number, product(rows.pop(0), gradients.pop(0)))


def _are_one_product(rows: Sequence[Tensor], gradients: Sequence[Tensor]) -> bool:
    counts, inputs, outputs = [len(one) for one in gradients], rows[0].shape[-1], gradients[0].shape[-1]
    return is_one_product(counts, inputs, outputs, element_bytes=rows[0].element_size())


def is_one_product(rows: Sequence[int], inputs: int, outputs: int, *, element_bytes: int) -> bool:
    """Whether rows of several chunks are put together: where that moves less than a further sum for each.

    Both read and write: rows of inputs and gradients, and sums in fp32.

    Args:
        rows: Of each chunk.
        inputs: Columns of the weight, K.
        outputs: Rows of the weight, N.
        element_bytes: Of a number of the rows.
    """
    return element_bytes * sum(rows) * (inputs + outputs) <= SUM_BYTES * (len(rows) - 1) * inputs * outputs


def keep_for_weight(
    output: Tensor, *, inputs: Tensor, weight: Parameter, product: WeightProduct, products: WeightProducts
) -> Tensor:
    """The output of a linear layer unchanged; its backward keeps what the weight's gradient takes.

    Args:
        output: ``[..., N]``, of the product with a weight that is not differentiated.
        inputs: ``[..., K]``, what the layer was given.
        weight: ``[N, K]``.
        product: Computes the gradient.
        products: Where it waits.
    """
    result: Tensor = _KeepForWeight.apply(
        output, inputs.detach(), lambda *tensors: products.keep(weight, product, *tensors)
    )
    return result


class _KeepForWeight(torch.autograd.Function):
    """The identity."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, inputs: Tensor, keep: Callable[[Tensor, Tensor], None]) -> Tensor:
        ctx.keep = keep
        ctx.save_for_backward(inputs)
        # Not as a view: Megatron adds a bias in place.
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (inputs,) = ctx.saved_tensors
        ctx.keep(inputs, gradient)
        return gradient, None, None
