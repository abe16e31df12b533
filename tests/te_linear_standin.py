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
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import _gather_along_first_dim, _reduce_scatter_along_first_dim
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn import Module, Parameter


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

    def numbers(self) -> Numbers:
        return Numbers(self.weight)

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
        options = self, self.wgrad_store, self.is_first_microbatch, self.numbers()
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
        self.num_gemms = len(linears)

    def of_each(self, name: str) -> list[Parameter]:
        return [getattr(self, f"{name}{index}") for index in range(self.num_gemms)]

    def forward(self, rows: Tensor, counts: list[int]) -> tuple[Tensor, Any]:
        biases = self.of_each("bias") if self.use_bias else []
        applied = biases if self.applies_bias else []
        options = self, self.wgrad_store, self.is_first_microbatch, list(counts)
        output = _GroupedLinear.apply(rows, options, *self.of_each("weight"), *applied)
        return self.result(output, biases)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, options: Any, *parameters: Tensor) -> Tensor:
        ctx.linear, ctx.store, ctx.first, ctx.counts = options
        count = ctx.linear.num_gemms
        ctx.save_for_backward(rows, *parameters[:count])
        biases = parameters[count:]
        ctx.has_bias = bool(biases)
        parts = zip(rows.split(ctx.counts), parameters[:count], biases or [None] * count, strict=True)
        return torch.cat([F.linear(*part) for part in parts])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, *weights = ctx.saved_tensors
        linear, first, has_bias = ctx.linear, ctx.first, ctx.has_bias
        count, owners = linear.num_gemms, linear.of_each("weight")
        inputs, outputs = list(rows.split(ctx.counts)), list(gradient.split(ctx.counts))
        of_rows = torch.cat([part @ weight for part, weight in zip(outputs, weights, strict=True)])
        if linear.fuse_wgrad_accumulation:
            results = [weight.main_grad for weight in owners]
        else:
            results = [torch.full_like(weight, float("nan")) for weight in weights]

        def product(inputs: list[Tensor], outputs: list[Tensor], results: list[Tensor]) -> Any:
            for weight, *parts, result in zip(owners, inputs, outputs, results, strict=True):
                found = weight_gradient(linear, weight, first, *parts)
                if not linear.fuse_wgrad_accumulation:
                    result.copy_(found)
            empty = torch.empty(0)
            return results, [part.sum(0) if has_bias else empty for part in outputs], None

        found = linear.run_product(ctx, product, [inputs, outputs, results])
        of_biases = [None] * count if found is None else found[1]
        of_weights = [linear.for_autograd(*pair) for pair in zip(owners, results, strict=True)]
        return of_rows, None, *of_weights, *(of_biases if has_bias else [])


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


def delayed_products(layer: Module) -> dict[str, int]:
    """By name of the layer, how many products it has delayed."""
    return {name: one.delayed for name, one in layer.named_modules() if isinstance(one, Engine)}
