"""Stand-in for Transformer Engine's linear layers in FP8 and for its contexts, for tests on a CPU.

Rounds as its recipes do: e4m3, with a scale for each tile. ``blockwise`` has tiles of 128 x 128 for weights
and of 128 numbers for others, ``mxfp8`` of 32, ``tensorwise`` one for a tensor. An operand is quantized along
the dimension that its product sums over: tokens, for the gradient of a weight. Products are computed in fp64
from the rounded numbers. As there, a layer keeps its quantized weight, and renews it when it is marked as the
first micro-batch, or has none. So a captured pass whose layer has one does not quantize, nor do its replays.
Else layers are those of :mod:`.te_linear_standin`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from megatron_ampipe import compat
from tests import cuda_graph_standin
from tests.te_linear_standin import Engine, GroupedLinear, Linear, Numbers

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
    from megatron.core.transformer.moe import experts

    def set_save_original_input(module: Any) -> None:
        module.save_original_input = True

    # The stand-in saves nothing else anyway.
    transformer_engine.set_save_original_input = set_save_original_input
    experts.HAVE_TE, experts.Fp8Padding, experts.Fp8Unpadding = True, Padding, Unpadding
    fp8_utils.get_fp8_context = get_fp8_context
    compat._switch_of_transformer_engine = lambda: (FP8GlobalStateManager.is_fp8_enabled, fp8_autocast)
    transformer_config.is_te_min_version = lambda *_, **__: True


def is_captured() -> bool:
    """Whether operations are captured rather than run."""
    return any(graph.is_capturing for graph in cuda_graph_standin.CAPTURED)


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


def width_of(recipe: str) -> int:
    """Numbers that share a scale, in the dimension over which a product sums."""
    return {"blockwise": 128, "mxfp8": 32, "tensorwise": WHOLE}[recipe]


class Kept(Numbers):
    """A quantized weight ``[N, K]``, and how the other operands of its products are rounded."""

    def __init__(self, linear: Any, weight: Tensor, *, backward: bool) -> None:
        self._width, self._rounds_gradient = width_of(linear.recipe), linear.rounds_gradient
        height = 128 if linear.recipe == "blockwise" else 1
        self.along_rows = rounded(weight, (height, self._width))
        # Of other recipes, one can be made of the other.
        self.along_columns: Tensor | None = self.along_rows
        if linear.recipe == "mxfp8":
            self.along_columns = rounded(weight, (self._width, height)) if backward else None

    def operand(self, numbers: Tensor, dim: int) -> Tensor:
        if dim == 0:
            return rounded(numbers, (self._width, 1)) if self._rounds_gradient else numbers
        return rounded(numbers.flatten(0, -2), (1, self._width)).view_as(numbers)


class Quantized(Engine):
    """Replaces a layer of :mod:`.te_linear_standin`; computes as that outside of FP8.

    Attributes:
        recipe: Of Megatron's names.
        rounds_gradient: Whether the operands of the weight's gradient are rounded.
        calls: Of each call, whether it was in FP8.
        quantized: How often a weight was.
    """

    def set_up(self, recipe: str, *, rounds_gradient: bool) -> None:
        self.recipe, self.rounds_gradient = recipe, rounds_gradient
        self._fp8_workspaces: dict[str, Kept] = {}
        self.calls: list[bool] = []
        self.quantized = 0

    def numbers_of(self, name: str) -> Numbers:
        self.calls.append(FP8GlobalStateManager.is_fp8_enabled())
        if not self.calls[-1]:
            return super().numbers_of(name)
        kept, backward = self._fp8_workspaces.get(name), torch.is_grad_enabled()
        lacks = kept is not None and backward and kept.along_columns is None
        if kept is None or lacks or self.is_first_microbatch:
            self._fp8_workspaces[name] = kept = self.quantize(name, backward=backward)
            self.quantized += 1
        elif not is_captured():
            now = self.quantize(name, backward=False)
            assert torch.equal(kept.along_rows, now.along_rows), "the kept weight is an old one"
        return kept

    def quantize(self, name: str, *, backward: bool) -> Kept:
        with torch.no_grad():
            return Kept(self, getattr(self, name), backward=backward)


class QuantizedLinear(Quantized, Linear):
    """Of one weight."""


class QuantizedGroupedLinear(Quantized, GroupedLinear):
    """Of experts. As there, numbers of rows must be multiples: of more in a tensor than in a list."""

    def forward(self, rows: Tensor, counts: list[int] | Tensor) -> tuple[Tensor, Any]:
        # In a graph, nobody reads the numbers.
        if FP8GlobalStateManager.is_fp8_enabled() and not is_captured():
            on_device = isinstance(counts, Tensor)
            tile = 128 if on_device else PADDED
            numbers = [*(counts.tolist() if on_device else counts), len(rows)]
            assert not any(number % tile for number in numbers), f"{numbers} are no multiples of {tile}"
        return super().forward(rows, counts)


PADDED = 32
"""What Megatron's padding makes numbers of rows a multiple of; 16 would do for some recipes."""


class Padding(torch.nn.Module):
    """``Fp8Padding``: zeros after the rows of each expert, up to a multiple of :data:`PADDED`."""

    def __init__(self, num_experts: int, align_size: int | None = None) -> None:
        super().__init__()

    def forward(self, rows: Tensor, counts: list[int]) -> tuple[Tensor, list[int]]:
        padded = [number + -number % PADDED for number in counts]
        parts = zip(rows.split(counts), padded, strict=True)
        filled = [torch.nn.functional.pad(part, (0, 0, 0, number - len(part))) for part, number in parts]
        return torch.cat(filled), padded


class Unpadding(Padding):
    """``Fp8Unpadding``: the rows without them."""

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:  # type: ignore[override]
        parts = rows.split([number + -number % PADDED for number in counts])
        return torch.cat([part[:number] for part, number in zip(parts, counts, strict=True)])


def quantize_linears(layer: torch.nn.Module, recipe: str, *, experts_round_gradients: bool) -> None:
    """Replace all linear layers in ``layer``, of Megatron or grouped ones; parameters stay the same."""
    for path, parent in list(layer.named_modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                new: Quantized = QuantizedLinear(module)
            elif isinstance(module, GroupedLinear):
                new = QuantizedGroupedLinear(module.linears)
                new.save_original_input = module.save_original_input
            else:
                continue
            rounds = experts_round_gradients or "experts" not in path.replace("shared_experts", "")
            new.set_up(recipe, rounds_gradient=rounds)
            setattr(parent, name, new)
