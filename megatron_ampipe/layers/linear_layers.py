"""Temporarily changes what linear layers do when they are called; their hooks run as always.

A stage can run them without transfers, without weight gradients, or with fewer saved activations.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, Required, TypedDict, Unpack

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers as linear_layers
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    linear_with_frozen_weight,
)
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_ampipe.errors import BadInput
from megatron_ampipe.runtime.saved_tensors import ExpertTensors
from megatron_ampipe.runtime.segment import DelayedTensors, WeightProducts

LOCAL_LINEARS = (ColumnParallelLinear, RowParallelLinear)
"""Megatron's own linear layers."""
Products = tuple[tuple[Module, ...], tuple[Module, ...]]
"""The first and the second linear layers of the local experts; one of each for a grouped GEMM."""


@contextlib.contextmanager
def replaced(*values: tuple[Module, str, object]) -> Iterator[None]:
    """Set attributes or methods, as ``(module, name, value)``, on module objects; restore them on exit."""
    before = [vars(module).get(name) for module, name, _ in values]
    for module, name, value in values:
        vars(module)[name] = value
    try:
        yield
    finally:
        for (module, name, _), own in zip(values, before, strict=True):
            if own is None:
                del vars(module)[name]
            else:
                vars(module)[name] = own


def linears_of(parts: Iterable[Module | Parameter]) -> tuple[Module, ...]:
    """The linear layers within these modules whose weight gradients can be separate stages.

    These are Megatron's local layers, and its wrappers of Transformer Engine's layers with a wgrad store.
    """
    modules = (module for part in parts if isinstance(part, Module) for module in part.modules())
    delaying = (module for module in modules if type(module) in LOCAL_LINEARS or _delays_weights(module))
    return tuple(dict.fromkeys(delaying))


def _delays_weights(module: Module) -> bool:
    return hasattr(module, "is_first_microbatch") and getattr(module, "wgrad_store", None) is not None


def delay_wgrad(linears: Sequence[Module], products: WeightProducts) -> AbstractContextManager[None]:
    """A context in which these layers leave the gradients of their trained weights to ``products``."""
    values: list[tuple[Module, str, object]] = []
    for linear in linears:
        if type(linear) not in LOCAL_LINEARS:
            values.append((linear, "wgrad_store", _Store(linear, products)))
        elif isinstance(linear.weight, Parameter) and linear.weight.requires_grad:
            values.append((linear, "_forward_impl", functools.partial(_forward, linear.weight, products)))
    return replaced(*values)


def transfers_apart(linear: ColumnParallelLinear | RowParallelLinear) -> AbstractContextManager[None]:
    """A context in which a layer does not all-gather its input or reduce-scatter its output."""
    return replaced((linear, "explicit_expert_comm", True))


def refuse_overwritten_gradients(parameters: Iterable[Parameter]) -> None:
    """Raise :class:`BadInput` if a fused product would overwrite a sum of gradients (Megatron-FSDP)."""
    if any(getattr(parameter, "overwrite_main_grad", False) for parameter in parameters):
        rule = "with Megatron-FSDP, a fused product overwrites what earlier chunks have added"
        remedy = "Use --no-gradient-accumulation-fusion."
        raise BadInput("gradient_accumulation_fusion", True, rule=rule, remedy=remedy)


def expert_products(experts: Module) -> Products:
    """The linear layers inside Megatron's module of the local experts."""
    up, down = (
        tuple(module for path, module in experts.named_modules() if path.rpartition(".")[2] == name)
        for name in ("linear_fc1", "linear_fc2")
    )
    assert up and len(up) == len(down), f"{type(experts).__name__} has other products"
    return up, down


@contextlib.contextmanager
def products_run_by(inner: ExpertTensors | None, products: Products) -> Iterator[None]:
    """A context in which ``inner`` runs the forward of these layers; changes nothing if it is None."""
    if inner is None:
        yield
        return
    first, second = products
    forwards: list[tuple[Module, str, object]] = []
    for module in first:
        forwards.append((module, "forward", functools.partial(inner.up, module.forward)))
    for module in second:
        forwards.append((module, "forward", functools.partial(inner.down, module.forward)))
    with replaced(*forwards):
        yield


class _LinearOptions(TypedDict, total=False):
    """Further arguments of a ``_forward_impl``; the same for all of Megatron's, of which these are read."""

    gradient_accumulation_fusion: Required[bool]
    sequence_parallel: Required[bool]
    tp_group: dist.ProcessGroup


def _forward(
    parameter: Parameter,
    products: WeightProducts,
    *,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    **options: Unpack[_LinearOptions],
) -> Tensor:
    """As ``_forward_impl`` of Megatron's linear layers, without the gradient of the weight.

    Megatron's own function computes the gradients of input and weight in one backward.
    """
    # The bias is added below: Megatron's frozen layer has no gradient of a bias either.
    output: Tensor = linear_with_frozen_weight(input, weight.detach(), None, **options)
    product = functools.partial(
        _weight_gradient,
        parameter,
        fused=options["gradient_accumulation_fusion"],
        group=options["tp_group"] if options["sequence_parallel"] else None,
    )
    keep = functools.partial(products.keep, parameter, product)
    output = _KeepForWeight.apply(output, input.detach(), keep)
    return output if bias is None else output + bias


def products_of(linear: Module) -> WeightProducts | None:
    """Where a local layer leaves its weight's gradient at present; None outside of :func:`delay_wgrad`."""
    forward = vars(linear).get("_forward_impl")
    if not isinstance(forward, functools.partial) or forward.func is not _forward:
        return None
    products: WeightProducts = forward.args[1]
    return products


class _KeepContext(Protocol):
    """What a node of :class:`_KeepForWeight` saves."""

    keep: Callable[[Tensor, Tensor], None]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...

    def save_for_backward(self, *tensors: Tensor) -> None: ...

    def mark_dirty(self, *tensors: Tensor) -> None: ...


class _KeepForWeight(torch.autograd.Function):
    """Returns a layer's output ``[..., N]``; its backward keeps the inputs ``[..., K]`` and the gradient."""

    @staticmethod
    def forward(
        ctx: _KeepContext, output: Tensor, inputs: Tensor, keep: Callable[[Tensor, Tensor], None]
    ) -> Tensor:
        ctx.keep = keep
        ctx.save_for_backward(inputs)
        # Else the output would be a view, and Megatron adds a bias in place.
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: _KeepContext, gradient: Tensor) -> tuple[Tensor, None, None]:
        (inputs,) = ctx.saved_tensors
        ctx.keep(inputs, gradient)
        return gradient, None, None


def _weight_gradient(
    weight: Parameter, inputs: Tensor, gradient: Tensor, *, fused: bool, group: dist.ProcessGroup | None
) -> Tensor | None:
    """What ``LinearWithGradAccumulationAndAsyncCommunication.backward`` returns for the weight ``[N, K]``.

    ``inputs [R, K]`` are this rank's rows; ``gradient [..., N]`` has the rows of all ranks of ``group``. If
    ``fused``, the gradient is added to ``main_grad``, and a placeholder returned.
    """
    if group is not None:
        inputs = gather_from_sequence_parallel_region(inputs, group=group)
    gradient, inputs = gradient.contiguous(), inputs.contiguous()
    if not fused:
        return gradient.t().matmul(inputs)
    main_grad: Tensor = weight.main_grad  # type: ignore[attr-defined]  # set by Megatron
    add = (
        linear_layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32
        if main_grad.dtype == torch.float32
        else linear_layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp16
    )
    add(inputs, gradient, main_grad)
    return _placeholder(weight, inputs.dtype)


def _placeholder(weight: Parameter, dtype: torch.dtype) -> Tensor | None:
    """The dummy gradient for one that was added to ``main_grad``; None outside of Megatron's DDP."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    weight.grad_added_to_main_grad = True
    main_grad: Tensor = weight.main_grad  # type: ignore[attr-defined]  # set by Megatron
    return make(main_grad.shape, dtype=dtype, device=weight.device)


_DelayedProduct = Callable[..., Sequence[Any]]
"""Transformer Engine's function of a delayed product. Of a grouped layer, results are lists by expert."""


class _Store:
    """Replaces the ``WeightGradStore`` of a Transformer Engine layer during its forward in one stage.

    The backward of that forward puts its weight-gradient product here. The layer's own store is one queue
    without chunks or micro-batches. Called from the thread that runs that backward.
    """

    def __init__(self, linear: Module, products: WeightProducts) -> None:
        self._linear, self._products = linear, products

    def delay_wgrad_compute(self) -> bool:
        """Whether products are delayed."""
        return True

    def put(self, tensors: DelayedTensors, function: _DelayedProduct) -> None:
        """Delay the product ``function(*tensors)``.

        Args:
            tensors: Inputs and gradient. For a grouped layer, lists by expert, and a list for the results.
            function: Returns ``(weight gradient, bias gradient, ...)``; biases by expert in a grouped layer.
        """
        weights = _weights(self._linear, "weight")
        self._products.delay(weights, functools.partial(_delayed_gradients, self._linear, function), tensors)


def _weights(linear: Module, name: str) -> list[Parameter]:
    """The weights (or biases) of a Transformer Engine layer: several in a grouped layer."""
    count = getattr(linear, "num_gemms", None)
    return [getattr(linear, name)] if count is None else [getattr(linear, f"{name}{i}") for i in range(count)]


def _delayed_gradients(
    linear: Module, function: _DelayedProduct, tensors: DelayedTensors
) -> Iterator[tuple[Parameter, Tensor | None]]:
    """As ``backward_dw`` of Transformer Engine's layers, which writes the gradients to the parameters."""
    weight_gradients, bias_gradients, *_ = function(*tensors)
    if hasattr(linear, "num_gemms"):
        weight_gradients = tensors[2]
    else:
        weight_gradients, bias_gradients = [weight_gradients], [bias_gradients]
    for weight, gradient in zip(_weights(linear, "weight"), weight_gradients, strict=True):
        if weight.requires_grad:
            fused = linear.fuse_wgrad_accumulation
            yield weight, _placeholder(weight, weight.dtype) if fused else gradient
    # They are None or empty if the layer adds no bias, or has summed the bias gradient itself.
    present = [gradient is not None and gradient.numel() > 0 for gradient in bias_gradients]
    if linear.use_bias and any(present):
        for bias, gradient in zip(_weights(linear, "bias"), bias_gradients, strict=True):
            if bias.requires_grad:
                yield bias, gradient
