"""FP8: in which precision a layer's stages run, and when quantized weights are dropped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, cast

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.nn import Module

from megatron_ampipe import compat
from megatron_ampipe.errors import BadInput
from megatron_ampipe.runtime.block_functions import Function
from megatron_ampipe.schedule.features import OTHER_FP8_RECIPE, fp8_recipe, has_other_fp8_recipe


class TransformerEngineLinear(Protocol):
    """What is set of Megatron's wrapper of a linear layer of Transformer Engine."""

    is_first_microbatch: bool


def check_recipe(config: TransformerConfig) -> None:
    """Raise :class:`BadInput` for an FP8 recipe that does not support chunks."""
    if has_other_fp8_recipe(config):
        rule, remedy = OTHER_FP8_RECIPE
        raise BadInput("--fp8-recipe", fp8_recipe(config), rule=rule, remedy=remedy)


def in_precision(function: Function, layer: TransformerLayer) -> Function:
    """Wrap a function of a layer so that every call of it runs in the precision of that layer."""
    number = -1 if layer.is_mtp_layer else layer.layer_number - 1
    config = layer.config

    def run(*args: object, **kwargs: object) -> object:
        with compat.precision_of(config, number):
            return function(*args, **kwargs)

    return run


def linear_layers_of_te(parts: Iterable[Module]) -> Sequence[TransformerEngineLinear]:
    """The linear layers of Transformer Engine within these modules, each once."""
    linears: dict[Module, None] = {}
    for part in parts:
        for module in part.modules():
            if hasattr(module, "is_first_microbatch"):
                linears[module] = None
    return cast(Sequence[TransformerEngineLinear], tuple(linears))


def forget_quantized_weights(linears: Iterable[TransformerEngineLinear]) -> None:
    """Have the next call of each of these layers quantize its weight again."""
    for linear in linears:
        compat.forget_quantized_weights(linear)


def begin_micro_batch(linears: Sequence[TransformerEngineLinear], *, fp8: bool) -> None:
    """Make every linear layer of Transformer Engine add its weight's gradient to ``main_grad``.

    After a forward with ``is_first_microbatch``, Megatron's wrappers overwrite ``main_grad`` in its
    backward. That would be chunk 0, which is differentiated last. Adding is correct, as Megatron zeroes
    ``main_grad`` before every iteration. The mark also requests quantized weights, which is done here.
    """
    for linear in linears:
        if linear.is_first_microbatch:
            linear.is_first_microbatch = False
            if fp8:
                compat.forget_quantized_weights(linear)
