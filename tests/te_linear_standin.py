"""Stand-ins for Transformer Engine's linear layers in 16 bits and Megatron's wrappers, for tests on a CPU.

They treat gradients of weights as its releases 2.3 to 2.18 do:

- A layer takes its ``wgrad_store`` when it runs forward; the backward of that run asks it whether to delay.
- A delayed product is put there with what it takes: inputs and gradient, of all ranks under sequence
  parallelism; of a grouped layer lists by expert, and the memory for its results.
- With ``fuse_wgrad_accumulation`` the product adds to ``main_grad``, and overwrites it in the backward of a
  call that was marked as the first micro-batch. ``grad_added_to_main_grad`` is set in the backward itself,
  also where the product is still to come. Autograd gets what is not to be read: here NaN.
- Without, a grouped layer that delays gives autograd the memory that the product will write, and another
  layer None.
- The gradient of a bias that the layer adds is a result of the weight's product; of one that it returns, not.
- A grouped layer takes numbers of rows in a list; from 2.17 on also in a tensor, and there may be more rows,
  which are neither read nor written. Its delayed product then takes objects that hold tensors, and gradients
  of biases are not its result. Where a variable or another setting would make it read the tensor on the host,
  the stand-in fails.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import _gather_along_first_dim, _reduce_scatter_along_first_dim
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_ampipe import compat


class WeightGradStore:
    """Of a layer that was made without ``delay_wgrad_compute``."""

    def delay_wgrad_compute(self) -> bool:
        return False

    def put(self, tensors: list[Any], function: Callable[..., Any]) -> None:
        raise AssertionError("a product is put into a store that does not delay")


class Engine(Module):
    """What all layers have; their weights are those of ``parameters``, which keep their attributes.

    Attributes:
        delayed: How many products were delayed.
    """

    def __init__(self, config: Any, parameters: dict[str, Parameter], *, applies_bias: bool) -> None:
        super().__init__()
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)
        self.use_bias = any(name.startswith("bias") for name in parameters)
        self.applies_bias = applies_bias and self.use_bias
        self.fuse_wgrad_accumulation = config.gradient_accumulation_fusion
        self.is_first_microbatch = True
        self.wgrad_store: Any = WeightGradStore()
        self.delayed = 0

    def numbers_of(self, name: str) -> "Numbers":
        """What products with the weight of this name read."""
        return Numbers(getattr(self, name))

    def result(self, output: Tensor, bias: Any) -> tuple[Tensor, Any]:
        """As Megatron's wrappers."""
        self.is_first_microbatch = False
        return output, None if self.applies_bias or not self.use_bias else bias

    def run_product(self, ctx: Any, product: Callable[..., Any], tensors: list[Any]) -> Any:
        """The product's result; None if it is delayed."""
        if ctx.store.delay_wgrad_compute():
            self.delayed += 1
            ctx.store.put(tensors, product)
            return None
        return product(*tensors)

    def for_autograd(self, weight: Any, gradient: Tensor | None) -> Tensor | None:
        if not self.fuse_wgrad_accumulation:
            return gradient
        weight.grad_added_to_main_grad = True
        return torch.full_like(weight, float("nan"))


def weight_gradient(engine: Engine, weight: Any, first: bool, rows: Tensor, gradient: Tensor) -> Tensor:
    """``[N, K]`` of ``rows [R, K]`` and ``gradient [R, N]``; in ``main_grad`` where that is fused."""
    found = gradient.t() @ rows
    if not engine.fuse_wgrad_accumulation:
        return found
    total: Tensor = weight.main_grad
    return total.copy_(found) if first else total.add_(found)


class Numbers:
    """What the products of one call of a layer read: here, the numbers as they are.

    Attributes:
        along_rows, along_columns: The weight ``[N, K]`` for products over its columns, and over its rows.
    """

    def __init__(self, weight: Tensor) -> None:
        self.along_rows, self.along_columns = weight, weight

    def operand(self, numbers: Tensor, dim: int) -> Tensor:
        """Of a product that sums over a dimension: -1 with the weight, 0 for the gradient of the weight."""
        return numbers


class Linear(Engine):
    """``TEColumnParallelLinear``, ``TERowParallelLinear`` and ``TELayerNormColumnParallelLinear``.

    Args:
        linear: The layer of Megatron in whose place it is.
        norm: The norm before it, if it is computed here.
    """

    def __init__(self, linear: Any, norm: Any = None) -> None:
        parameters = dict(linear.named_parameters(recurse=False))
        applies = not linear.skip_bias_add and isinstance(linear, ColumnParallelLinear)
        super().__init__(linear.config, parameters, applies_bias=applies)
        if norm is not None:
            self.layer_norm_weight = norm.weight
            self.layer_norm_bias = getattr(norm, "bias", None)
            self.eps = norm.eps
        parallel = linear.sequence_parallel and not linear.explicit_expert_comm
        self.gathers = parallel and isinstance(linear, ColumnParallelLinear)
        self.scatters = parallel and isinstance(linear, RowParallelLinear)
        self.tp_group = linear.tp_group

    def forward(self, rows: Tensor) -> tuple[Tensor, Any]:
        if hasattr(self, "layer_norm_weight"):
            weight, bias, width = self.layer_norm_weight, self.layer_norm_bias, rows.shape[-1:]
            rows = (
                F.rms_norm(rows, width, weight, self.eps)
                if bias is None
                else F.layer_norm(rows, width, weight, bias, self.eps)
            )
        bias = self.bias if self.use_bias else None
        applied = bias if self.applies_bias else None
        options = self, self.wgrad_store, self.is_first_microbatch, self.numbers_of("weight")
        output = _Linear.apply(rows, self.weight, applied, options)
        return self.result(output, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, options: Any) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.linear, ctx.store, ctx.first, ctx.numbers = options
        ctx.has_bias, linear = bias is not None, ctx.linear
        given = _gather_along_first_dim(rows, linear.tp_group) if linear.gathers else rows
        output = F.linear(ctx.numbers.operand(given, -1), ctx.numbers.along_rows, bias)
        return _reduce_scatter_along_first_dim(output, linear.tp_group) if linear.scatters else output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (rows, _), linear, numbers = ctx.saved_tensors, ctx.linear, ctx.numbers
        if linear.scatters:
            gradient = _gather_along_first_dim(gradient.contiguous(), linear.tp_group)
        of_rows = numbers.operand(gradient, -1) @ numbers.along_columns
        if linear.gathers:
            rows = _gather_along_first_dim(rows, linear.tp_group)
            of_rows = _reduce_scatter_along_first_dim(of_rows.contiguous(), linear.tp_group)
        of_weight = functools.partial(weight_gradient, linear, linear.weight, ctx.first)
        has_bias = ctx.has_bias

        def product(inputs: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor | None]:
            return of_weight(inputs, outputs), outputs.sum(0) if has_bias else None

        operands = [numbers.operand(tensor.flatten(0, -2), 0) for tensor in (rows, gradient)]
        found = linear.run_product(ctx, product, operands)
        now, of_bias = (None, None) if found is None else found
        return of_rows, linear.for_autograd(linear.weight, now), of_bias, None


class GroupedLinear(Engine):
    """``TEColumnParallelGroupedLinear`` and ``TERowParallelGroupedLinear``.

    Args:
        linears: The layers of Megatron in whose place it is, one for each expert.
    """

    def __init__(self, linears: Sequence[Any]) -> None:
        parameters = {
            f"{name}{index}": parameter
            for name in ("weight", "bias")
            for index, linear in enumerate(linears)
            if (parameter := getattr(linear, name, None)) is not None
        }
        applies = isinstance(linears[0], ColumnParallelLinear)
        super().__init__(linears[0].config, parameters, applies_bias=applies)
        self.num_gemms, self.save_original_input = len(linears), False
        # Not modules of this one.
        self.linears = tuple(linears)

    def of_each(self, name: str) -> list[Parameter]:
        return [getattr(self, f"{name}{index}") for index in range(self.num_gemms)]

    def forward(self, rows: Tensor, counts: list[int] | Tensor) -> tuple[Tensor, Any]:
        if isinstance(counts, Tensor):
            assert type(counts) is Tensor and counts.dtype == torch.int64, type(counts)
            assert counts.shape == (self.num_gemms,)
            reads = os.environ.get(SWITCH) != "1" or self.save_original_input
            assert not reads, "the layer reads the numbers on the host"
        else:
            assert len(rows) == sum(counts)
        biases = self.of_each("bias") if self.use_bias else []
        applied = biases if self.applies_bias else []
        numbers = [self.numbers_of(f"weight{index}") for index in range(self.num_gemms)]
        options = self, self.wgrad_store, self.is_first_microbatch, numbers, counts
        output = _GroupedLinear.apply(rows, options, *self.of_each("weight"), *applied)
        return self.result(output, biases)


SWITCH = "NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM"


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, options: Any, *parameters: Tensor) -> Tensor:
        ctx.linear, ctx.store, ctx.first, ctx.numbers, counts = options
        count = ctx.linear.num_gemms
        ctx.shape, ctx.on_device = rows.shape, isinstance(counts, Tensor)
        if ctx.on_device:
            # As there: each of these, some of them twice.
            offsets = counts.cumsum(0)
            ctx.save_for_backward(rows.reshape(-1), counts, offsets, *parameters[:count], counts, offsets)
            parts = _Groups(offsets, len(rows))
        else:
            ctx.save_for_backward(rows, *parameters[:count])
            ctx.parts = parts = _Lists(counts)
        biases = parameters[count:]
        ctx.has_bias = bool(biases)
        inputs = zip(parts.split(rows), ctx.numbers, biases or [None] * count, strict=True)
        outputs = [F.linear(one.operand(part, -1), one.along_rows, bias) for part, one, bias in inputs]
        return parts.joined(outputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, *others = ctx.saved_tensors
        linear, first, has_bias, numbers = ctx.linear, ctx.first, ctx.has_bias, ctx.numbers
        count, owners, on_device = linear.num_gemms, linear.of_each("weight"), ctx.on_device
        rows = rows.view(ctx.shape)
        parts: Any = _Groups(others[-1], len(rows)) if on_device else ctx.parts
        outputs = parts.split(gradient)
        of_parts = [
            one.operand(part, -1) @ one.along_columns for part, one in zip(outputs, numbers, strict=True)
        ]
        of_rows = parts.joined(of_parts)
        if linear.fuse_wgrad_accumulation:
            results = [weight.main_grad for weight in owners]
        else:
            results = [torch.full_like(weight, float("nan")) for weight in owners]
        empty = torch.empty(0)
        of_biases = [part.sum(0) if has_bias else empty for part in outputs]

        def product(inputs: Any, outputs: Any, results: list[Tensor]) -> Any:
            if on_device:
                inputs, outputs = parts.split(inputs.data), parts.split(outputs.data)
            for weight, *pair, one, result in zip(owners, inputs, outputs, numbers, results, strict=True):
                computed = weight_gradient(linear, weight, first, *[one.operand(part, 0) for part in pair])
                if not linear.fuse_wgrad_accumulation:
                    result.copy_(computed)
            return (None, [None] * count, None) if on_device else (results, of_biases, None)

        operands: list[Any] = [parts.split(rows), outputs, results]
        if on_device:
            operands[:2] = SimpleNamespace(data=rows), SimpleNamespace(data=gradient)
        is_done = linear.run_product(ctx, product, operands) is not None
        of_weights = [linear.for_autograd(*pair) for pair in zip(owners, results, strict=True)]
        given = of_biases if is_done or on_device else [None] * count
        return of_rows, None, *of_weights, *(given if has_bias else [])


class _Lists:
    """The rows of each expert, of numbers that the host has."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = list(counts)

    def split(self, rows: Tensor) -> list[Tensor]:
        return list(rows.split(self.counts))

    def joined(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts)


class _Groups:
    """The rows of each expert, which the host does not know: in all rows, among zeros."""

    def __init__(self, ends: Tensor, num_rows: int) -> None:
        numbers = torch.arange(num_rows, device=ends.device)
        expert = torch.searchsorted(ends, numbers, right=True).unsqueeze(1)
        self.masks = [expert == number for number in range(len(ends))]

    def split(self, rows: Tensor) -> list[Tensor]:
        return [torch.where(mask, rows, 0) for mask in self.masks]

    def joined(self, parts: list[Tensor]) -> Tensor:
        """Rows of no expert are not written."""
        found = torch.full_like(parts[0], float("nan"))
        for mask, part in zip(self.masks, parts, strict=True):
            found = torch.where(mask, part, found)
        return found


def use_engine(layer: Module, *, grouped: bool) -> None:
    """Replace the linear layers of Megatron's layers in ``layer``, and, if ``grouped``, their experts.

    As in Megatron's specification for Transformer Engine, the norm before a linear layer is in it, unless it
    is recomputed.
    """
    for block in list(layer.modules()):
        if isinstance(block, TransformerLayer):
            _join_norms(block)
    for parent in list(layer.modules()):
        experts = getattr(parent, "experts", None)
        if grouped and experts is not None and hasattr(experts, "local_experts"):
            parent.experts = _grouped(experts)
        for name, module in list(parent.named_children()):
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                setattr(parent, name, Linear(module))


def _join_norms(block: Any) -> None:
    attention = block.self_attention
    if hasattr(attention, "linear_qkv") and not block.recompute_input_layernorm:
        attention.linear_qkv = Linear(attention.linear_qkv, block.input_layernorm)
        block.input_layernorm = IdentityOp()
    if not (block.is_moe_layer or block.recompute_pre_mlp_layernorm):
        block.mlp.linear_fc1 = Linear(block.mlp.linear_fc1, block.pre_mlp_layernorm)
        block.pre_mlp_layernorm = IdentityOp()


def _grouped(experts: Any) -> TEGroupedMLP:
    layers = {
        name: [getattr(expert, name) for expert in experts.local_experts]
        for name in ("linear_fc1", "linear_fc2")
    }
    submodules = GroupedMLPSubmodules(
        *[lambda *_, of_name=of_name, **__: GroupedLinear(of_name) for of_name in layers.values()]
    )
    groups = type("Groups", (), {"ep": experts.ep_group, "expt_tp": experts.tp_group})
    return TEGroupedMLP(len(experts.local_experts), experts.config, submodules, groups)


def with_grouped_experts(spec: Any) -> Any:
    """A layer's specification, with these layers in its experts from the beginning."""
    if compat.mlp_class(spec.submodules.mlp) is not MoELayer:
        return spec
    build = functools.partial(
        TEGroupedMLP,
        submodules=GroupedMLPSubmodules(
            functools.partial(_build_grouped, ColumnParallelLinear, gather_output=False),
            functools.partial(_build_grouped, RowParallelLinear, input_is_parallel=True),
        ),
    )
    moe = dataclasses.replace(compat.moe_submodules(spec.submodules.mlp), experts=build)
    mlp = compat.with_moe_submodules(spec.submodules.mlp, moe)
    return dataclasses.replace(spec, submodules=dataclasses.replace(spec.submodules, mlp=mlp))


def _build_grouped(
    kind: Any, num_experts: int, *sizes: int, pg_collection: Any, **options: Any
) -> GroupedLinear:
    del options["name"]
    return GroupedLinear(
        [kind(*sizes, tp_group=pg_collection.expt_tp, **options) for _ in range(num_experts)]
    )


def delayed_products(layer: Module) -> dict[str, int]:
    """By name of the layer, how many products it has delayed."""
    return {name: one.delayed for name, one in layer.named_modules() if isinstance(one, Engine)}
