"""Stand-in for Transformer Engine's linear layers in FP8 and for its contexts, for tests on a CPU.

Rounds as its recipes do: e4m3, with a scale for each tile. ``blockwise`` has tiles of 128 x 128 for weights
and of 128 numbers for others, ``mxfp8`` of 32, ``tensorwise`` one for a tensor. An operand is quantized along
the dimension that its product sums over: tokens, for the gradient of a weight. Products are computed in fp64
from the rounded numbers. As there, a layer keeps its quantized weight, and renews it when it is marked as the
first micro-batch, or has none; the backward of a call with that mark overwrites ``main_grad``, and of any
other adds to it.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_ampipe import compat

LARGEST = 448.0
"""Of e4m3."""
WHOLE = 10**9
"""Length of a tile that is a whole tensor."""


class FP8GlobalStateManager:
    """Whether layers quantize at present, for the whole process."""

    enabled = False

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.enabled


@contextlib.contextmanager
def fp8_autocast(enabled: bool = True) -> Iterator[None]:
    before, FP8GlobalStateManager.enabled = FP8GlobalStateManager.enabled, enabled
    try:
        yield
    finally:
        FP8GlobalStateManager.enabled = before


def get_fp8_context(config: Any, layer_no: int = -1, is_init: bool = False) -> Any:
    """As ``megatron.core.fp8_utils.get_fp8_context``."""
    from megatron.core.fp8_utils import is_first_last_bf16_layer

    assert not is_init
    in_bf16 = is_first_last_bf16_layer(config, layer_no)
    return fp8_autocast() if config.fp8 and not in_bf16 else contextlib.nullcontext()


def install() -> None:
    """Make the stand-ins what Megatron has found of Transformer Engine."""
    from megatron.core import fp8_utils
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer import transformer_config

    # The stand-in saves nothing else.
    transformer_engine.set_save_original_input = lambda module: None
    fp8_utils.get_fp8_context = get_fp8_context
    compat._switch_of_transformer_engine = lambda: (FP8GlobalStateManager.is_fp8_enabled, fp8_autocast)
    transformer_config.is_te_min_version = lambda *_, **__: True


def rounded(numbers: Tensor, tile: tuple[int, int]) -> Tensor:
    """``[M, N]`` rounded to e4m3 with a scale for each tile of so many rows and columns.

    The scale of a tile is a power of two; that of a whole tensor is not.
    """
    rows, columns = numbers.shape
    if WHOLE in tile:
        tile = (WHOLE, WHOLE)
    height, width = min(tile[0], max(rows, 1)), min(tile[1], columns)
    whole = torch.nn.functional.pad(numbers, (0, -columns % width, 0, -rows % height))
    tiles = whole.unflatten(0, (-1, height)).unflatten(2, (-1, width))
    largest = tiles.abs().amax(dim=(1, 3), keepdim=True).clamp_min(1e-30)
    scale = LARGEST / largest
    if WHOLE not in tile:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    values = (tiles * scale).to(torch.float8_e4m3fn).to(numbers.dtype) / scale
    return values.flatten(2, 3).flatten(0, 1)[:rows, :columns]


class Kept:
    """A quantized weight ``[N, K]``: for products over its columns, and for those over its rows."""

    def __init__(self, weight: Tensor, recipe: str, *, backward: bool) -> None:
        height = 128 if recipe == "blockwise" else 1
        self.along_rows = rounded(weight, (height, width_of(recipe)))
        self.along_columns: Tensor | None = rounded(weight, (width_of(recipe), height)) if backward else None
        if recipe != "mxfp8":
            # One can be made of the other.
            self.along_columns = self.along_rows


def width_of(recipe: str) -> int:
    """Numbers that share a scale, in the dimension over which a product sums."""
    return {"blockwise": 128, "mxfp8": 32, "tensorwise": WHOLE}[recipe]


class QuantizedLinear(torch.nn.Module):
    """Replaces a linear layer without bias and tensor parallelism.

    Args:
        weight: The weight of the layer, with the attributes that Megatron has set on it.
        recipe: Of Megatron's names.
        rounds_gradient: Whether the operands of the weight's gradient are rounded.

    Attributes:
        calls: Of each call, whether it was in FP8.
        quantized: How often the weight was.
    """

    def __init__(self, weight: torch.nn.Parameter, recipe: str, *, rounds_gradient: bool = True) -> None:
        from tests.te_linear_standin import WeightGradStore

        super().__init__()
        self.weight, self.recipe, self.rounds_gradient = weight, recipe, rounds_gradient
        self.is_first_microbatch = True
        self.use_bias, self.fuse_wgrad_accumulation = False, True
        self.wgrad_store: Any = WeightGradStore()
        self._fp8_workspaces: dict[str, Kept] = {}
        self.calls: list[bool] = []
        self.quantized = 0

    def forward(self, rows: Tensor) -> tuple[Tensor, None]:
        kept = None
        self.calls.append(FP8GlobalStateManager.is_fp8_enabled())
        if self.calls[-1]:
            kept = self._kept(backward=torch.is_grad_enabled())
        options = self, self.wgrad_store, kept, self.is_first_microbatch
        output = _Linear.apply(rows, self.weight, options)
        self.is_first_microbatch = False
        return output, None

    def _kept(self, *, backward: bool) -> Kept:
        kept = self._fp8_workspaces.get("weight")
        lacks = kept is not None and backward and kept.along_columns is None
        with torch.no_grad():
            now = Kept(self.weight, self.recipe, backward=backward)
        if kept is None or lacks or self.is_first_microbatch:
            self._fp8_workspaces["weight"] = kept = now
            self.quantized += 1
        assert torch.equal(kept.along_rows, now.along_rows), "the kept weight is an old one"
        return kept


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Any, options: Any) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.weight, (ctx.linear, ctx.store, ctx.kept, ctx.first) = weight, options
        linear, _, kept, _ = options
        flat = rows.flatten(0, -2)
        if kept is None:
            return rows @ weight.t()
        product = rounded(flat, (1, width_of(linear.recipe))) @ kept.along_rows.t()
        return product.view(*rows.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (rows,), weight, kept, first = ctx.saved_tensors, ctx.weight, ctx.kept, ctx.first
        flat, of_output = rows.flatten(0, -2), gradient.flatten(0, -2)
        if kept is None:
            of_rows, tile = of_output @ weight, None
        else:
            tile = width_of(ctx.linear.recipe)
            of_rows = rounded(of_output, (1, tile)) @ kept.along_columns
        if tile is not None and ctx.linear.rounds_gradient:
            flat, of_output = rounded(flat, (tile, 1)), rounded(of_output, (tile, 1))

        def product(inputs: Tensor, outputs: Tensor) -> tuple[Tensor, None]:
            of_weight = outputs.t() @ inputs
            total: Tensor = weight.main_grad
            return total.copy_(of_weight) if first else total.add_(of_weight), None

        if ctx.store.delay_wgrad_compute():
            ctx.store.put([flat, of_output], product)
        else:
            product(flat, of_output)
        weight.grad_added_to_main_grad = True
        # A placeholder: this gradient must not be read.
        return of_rows.view_as(rows), torch.full_like(weight, float("nan")), None


def quantize_linears(layer: torch.nn.Module, recipe: str, *, experts_round_gradients: bool) -> None:
    """Replace all linear layers of Megatron in ``layer``; names and parameters stay the same."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    for path, parent in list(layer.named_modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                rounds = experts_round_gradients or "local_experts" not in path
                setattr(parent, name, QuantizedLinear(module.weight, recipe, rounds_gradient=rounds))
