"""Megatron's linear layers without the gradients of their weights, and these gradients as separate products;
and without their transfers.

``LinearWithGradAccumulationAndAsyncCommunication`` computes the gradients of input and weight in one
backward, whichever is asked for. With a frozen weight, ``linear_with_frozen_weight`` computes the first;
:func:`_weight_gradient` mirrors the second. Used by :mod:`.block_modules`, :mod:`.megatron_stages`
and :mod:`.attention_stages`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
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

from megatron_ampipe.runtime.segment import WeightProducts, keep_for_weight

Linear = ColumnParallelLinear | RowParallelLinear


def linears_of(modules: Iterable[Module]) -> tuple[Linear, ...]:
    """The linear layers within these modules whose weight gradients can be computed apart."""
    found = (part for module in modules for part in module.modules())
    return tuple({part: None for part in found if type(part) in (ColumnParallelLinear, RowParallelLinear)})


@contextlib.contextmanager
def weights_apart(linears: Sequence[Linear], products: WeightProducts) -> Iterator[None]:
    """Within it, these layers leave the gradients of their trained weights to ``products``."""
    trained = [one for one in linears if one.weight.requires_grad]
    for one in trained:
        # In place of the method. The module is still called, so that its hooks run.
        one.__dict__["_forward_impl"] = functools.partial(_forward, one.weight, products)
    try:
        yield
    finally:
        for one in trained:
            del one.__dict__["_forward_impl"]


@contextlib.contextmanager
def transfers_apart(linear: Linear) -> Iterator[None]:
    """Within it, a layer neither gathers its input nor adds and scatters its output.

    As for experts whose tokens are gathered and scattered elsewhere. A layer that scatters must return its
    bias, not add it.
    """
    before = linear.explicit_expert_comm
    linear.explicit_expert_comm = True
    try:
        yield
    finally:
        linear.explicit_expert_comm = before


def _forward(
    parameter: Parameter,
    products: WeightProducts,
    *,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    sequence_parallel: bool,
    tp_group: Any,
    **others: Any,
) -> Tensor:
    """As ``_forward_impl`` of Megatron's linear layers, without the gradient of the weight."""
    output = linear_with_frozen_weight(
        input,
        weight.detach(),
        # Megatron's frozen layer has no gradient of a bias either.
        None,
        gradient_accumulation_fusion=gradient_accumulation_fusion,
        sequence_parallel=sequence_parallel,
        tp_group=tp_group,
        **others,
    )
    output = keep_for_weight(
        output,
        inputs=input,
        weight=parameter,
        product=functools.partial(
            _weight_gradient,
            parameter,
            fused=gradient_accumulation_fusion,
            group=tp_group if sequence_parallel else None,
        ),
        products=products,
    )
    return output if bias is None else output + bias


def _weight_gradient(
    weight: Parameter, inputs: Tensor, gradient: Tensor, *, fused: bool, group: Any
) -> Tensor | None:
    """What ``LinearWithGradAccumulationAndAsyncCommunication.backward`` returns for the weight.

    Args:
        weight: ``[N, K]``.
        inputs: ``[R, K]``, this rank's rows.
        gradient: ``[R, N]``; with sequence parallelism of the rows of all ranks.
        fused: Whether it is added to ``main_grad``.
        group: The ranks that hold the other rows of the input; None if this one has them all.
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
