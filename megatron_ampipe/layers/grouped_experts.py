"""Transformer Engine's grouped experts over rows of fixed number: numbers of rows that stay on the device.

Its grouped linear layers take them from there, and read and write only the rows of experts; Megatron's module
around them works row by row, or makes a list of the numbers, for which it gets a tensor. So experts run as
with exact rows, with the same hooks, memory strategies and delayed gradients of weights.

In FP8, numbers of rows must be multiples of a tile. Megatron pads the rows of each expert with zeros, for
which it reads the numbers. Here they come with these zeros already: zeros change no scale, and more of them
than Megatron adds change no sum.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module

from megatron_ampipe import compat
from megatron_ampipe.block.settings import SETTING
from megatron_ampipe.layers.fixed_experts import biases_of_rows, has_local_experts, local_products_problem
from megatron_ampipe.layers.linear_layers import expert_products, replaced
from megatron_ampipe.schedule.features import fp8_recipe

# L local experts, Q rows sorted by expert, N outputs of a linear layer.

FP8_TILE = 128
"""What numbers of rows must be a multiple of where Transformer Engine quantizes the rows of experts.

Its kernels work on blocks of so many rows, each of one expert.
"""


def require_fixed_experts(experts: Module) -> None:
    """Raise :class:`BadInput` if products of these experts would make the host wait for numbers of rows.

    Depends on the current GPU, if there is one.
    """
    is_grouped = type(experts) is TEGroupedMLP
    if not is_grouped and not has_local_experts(experts):
        rule = f"the products of {type(experts).__name__} take numbers of rows from the host"
        remedy = "Use --transformer-impl transformer_engine --moe-grouped-gemm, or --ampipe-rows exact."
        raise SETTING["rows"].refuse("fixed", rule, remedy)
    if not torch.cuda.is_available():
        return
    capability = torch.cuda.get_device_capability()
    if is_grouped:
        problem = compat.grouped_linear_problem(fp8_recipe(experts.config), capability)
    else:
        problem = local_products_problem(capability)
    if problem is not None:
        raise SETTING["rows"].refuse("fixed", problem, "Use --ampipe-rows exact.")


def tile_of(config: TransformerConfig) -> int:
    """What the number of rows of each expert must be a multiple of."""
    return FP8_TILE if config.fp8 else 1


class RowsOfExperts(Tensor):
    """``[L]`` int64 on the device: numbers of rows, of which Megatron's experts make a list."""

    def tolist(self) -> Tensor:  # type: ignore[override]  # what takes the list takes a tensor as well
        """The numbers, on the device."""
        return self.as_subclass(Tensor)


def rows_of_experts(ends: Tensor) -> RowsOfExperts:
    """From where the rows of each expert end, ``[L]`` int32."""
    with torch.no_grad():
        wide = ends.to(torch.int64)
        return wide.diff(prepend=torch.zeros_like(wide[:1])).as_subclass(RowsOfExperts)


@contextlib.contextmanager
def rows_on_device(experts: TEGroupedMLP) -> Iterator[None]:
    """A context in which these experts can be called with :class:`RowsOfExperts`."""
    values: list[tuple[Module, str, object]] = [(experts, "_apply_bias", _add_biases)]
    if hasattr(experts, "quantization_padding"):
        values.append((experts, "quantization_padding", _padded_already))
        values.append((experts, "quantization_unpadding", _kept_padded))
    first, second = expert_products(experts)
    for linear in first + second:
        # Releases after 2.18 have this in place of the variable.
        if hasattr(linear, "use_grouped_tensor"):
            values.append((linear, "use_grouped_tensor", True))
        # Set by Megatron for moe_act in FP8, to quantize the rows again. That reads the numbers on the host.
        if getattr(linear, "save_original_input", False):
            values.append((linear, "save_original_input", False))
    with replaced(*values), compat.rows_from_device():
        yield


def _padded_already(rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """In place of Megatron's padding for FP8 of the rows of each expert."""
    return rows, counts


def _kept_padded(rows: Tensor, counts: Tensor) -> Tensor:
    """In place of what takes that padding away."""
    return rows


def _add_biases(output: Tensor, biases: Sequence[Tensor] | None, counts: Tensor, probs: Tensor) -> Tensor:
    """As ``TEGroupedMLP._apply_bias``: add to rows ``[Q, N]`` their expert's bias, weighted by ``[Q, 1]``."""
    if biases is None:
        return output
    added = biases_of_rows(biases, counts.cumsum(dim=0), len(output))
    return (output + added * probs).to(output.dtype)
