"""Megatron's linear layers, run otherwise for a while; as modules that are called, so that their hooks run.

Without their transfers, without the gradients of their weights, or by what keeps less for the backward pass.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.tensor_parallel import layers as linear_layers
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    linear_with_frozen_weight,
)
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_ampipe.runtime.saved_tensors import InnerTensors
from megatron_ampipe.runtime.segment import WeightProducts, keep_for_weight

Linear = ColumnParallelLinear | RowParallelLinear
Products = tuple[tuple[Module, ...], tuple[Module, ...]]
"""The first and the last linear layers of the local experts; one each where they are a grouped product."""


@contextlib.contextmanager
def replaced(modules: Sequence[Module], name: str, values: Sequence[object]) -> Iterator[None]:
    """Within it, an attribute of each module, or the method of its class, is one of these values."""
    before = [vars(module).get(name) for module in modules]
    for module, value in zip(modules, values, strict=True):
        vars(module)[name] = value
    try:
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            if own is None:
                del vars(module)[name]
            else:
                vars(module)[name] = own


def linears_of(parts: Iterable[Module | Parameter]) -> tuple[Linear, ...]:
    """The linear layers within these modules whose weight gradients can be computed apart."""
    modules = (module for part in parts if isinstance(part, Module) for module in part.modules())
    return tuple({one: None for one in modules if type(one) in (ColumnParallelLinear, RowParallelLinear)})


def weights_apart(linears: Sequence[Linear], products: WeightProducts) -> AbstractContextManager[None]:
    """Within it, these layers leave the gradients of their trained weights to ``products``."""
    trained = [linear for linear in linears if linear.weight.requires_grad]
    forwards = [functools.partial(_forward, linear.weight, products) for linear in trained]
    return replaced(trained, "_forward_impl", forwards)


def transfers_apart(linear: Linear) -> AbstractContextManager[None]:
    """Within it, a layer neither gathers its input nor adds and scatters its output; it returns its bias."""
    return replaced([linear], "explicit_expert_comm", [True])


def expert_products(experts: Module) -> Products:
    """The linear layers inside Megatron's module of the local experts."""
    up, down = (
        tuple(module for path, module in experts.named_modules() if path.rpartition(".")[2] == name)
        for name in ("linear_fc1", "linear_fc2")
    )
    assert up and len(up) == len(down), f"{type(experts).__name__} has other products"
    return up, down


@contextlib.contextmanager
def products_run_by(inner: InnerTensors | None, products: Products) -> Iterator[None]:
    """Have ``inner`` run the products while this is open; nothing changes if it is None."""
    if inner is None:
        yield
        return
    ups, downs = (
        [functools.partial(run, module.forward) for module in modules]
        for modules, run in zip(products, (inner.up, inner.down), strict=True)
    )
    with replaced(products[0], "forward", ups), replaced(products[1], "forward", downs):
        yield


def _forward(
    parameter: Parameter,
    products: WeightProducts,
    *,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    **options: Any,
) -> Tensor:
    """As ``_forward_impl`` of Megatron's linear layers, without the gradient of the weight.

    Megatron's own function computes the gradients of input and weight in one backward.
    """
    # Megatron's frozen layer has no gradient of a bias either.
    output = linear_with_frozen_weight(input, weight.detach(), None, **options)
    product = functools.partial(
        _weight_gradient,
        parameter,
        fused=options["gradient_accumulation_fusion"],
        group=options["tp_group"] if options["sequence_parallel"] else None,
    )
    output = keep_for_weight(output, inputs=input, weight=parameter, product=product, products=products)
    return output if bias is None else output + bias


def _weight_gradient(
    weight: Parameter, inputs: Tensor, gradient: Tensor, *, fused: bool, group: Any
) -> Tensor | None:
    """What ``LinearWithGradAccumulationAndAsyncCommunication.backward`` returns for the weight ``[N, K]``.

    From ``inputs [R, K]``, this rank's rows, and ``gradient``, ``[R, N]`` of the rows of all ranks of
    ``group``. If ``fused``, it is added to ``main_grad``.
    """
    if group is not None:
        inputs = gather_from_sequence_parallel_region(inputs, group=group)
    gradient, inputs = gradient.contiguous(), inputs.contiguous()
    if not fused:
        return gradient.t().matmul(inputs)
    main_grad = weight.main_grad
    add = (
        linear_layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32
        if main_grad.dtype == torch.float32
        else linear_layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp16
    )
    add(inputs, gradient, main_grad)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    weight.grad_added_to_main_grad = True
    return make(main_grad.shape, dtype=inputs.dtype, device=inputs.device)
