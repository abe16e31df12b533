"""Replaces the MoE layers of a Megatron layer specification by pipelined ones.

At degree 1 all layers keep their stock classes, and dense layers do unless they can share a schedule with an
MoE layer.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_ampipe import compat
from megatron_ampipe.errors import BadInput
from megatron_ampipe.layers.context import AMPipeContext
from megatron_ampipe.layers.layer import AMPipeTransformerLayer
from megatron_ampipe.layers.router import chunk_router_of
from megatron_ampipe.layers.stack import RunBuilder
from megatron_ampipe.schedule import stack_to_text

ATTENTION = (SelfAttention, MLASelfAttention)
"""The classes of attention that can be pipelined."""


def pipelined(
    spec: TransformerBlockSubmodules | ModuleSpec, context: AMPipeContext
) -> TransformerBlockSubmodules | ModuleSpec:
    """The specification with :class:`AMPipeTransformerLayer` for MoE layers; ``spec`` itself at degree 1.

    Raises:
        BadInput: an MoE layer has a class that AMPipe does not support, or layers shall share a schedule and
            the specification names one layer for all of them.
    """
    if not context.config.pipelined:
        return spec
    if isinstance(spec, ModuleSpec):
        if issubclass(spec.module, TransformerBlock):
            return dataclasses.replace(spec, submodules=pipelined(spec.submodules, context))
        if (stack := context.config.pipeline.stack) != 1:
            raise BadInput(
                "--ampipe-stack",
                stack_to_text(stack),
                rule="the layer specification names one layer for all of them, so which follow each other is "
                "not known",
                remedy="Use --ampipe-stack 1, or a specification that lists the layers "
                "(TransformerBlockSubmodules).",
            )
        return _pipelined_layer(spec, context)
    assert spec.layer_specs is not None
    layers: list[ModuleSpec] = []
    for can_share, specs in itertools.groupby(spec.layer_specs, key=lambda layer: _can_share(layer, context)):
        of_run = list(specs)
        builder = RunBuilder(context) if can_share and any(map(_is_moe, of_run)) else None
        layers += [
            _pipelined_layer(layer, context, builder, begins_run=place == 0)
            for place, layer in enumerate(of_run)
        ]
    return dataclasses.replace(spec, layer_specs=layers)


def _pipelined_layer(
    spec: ModuleSpec, context: AMPipeContext, builder: RunBuilder | None = None, *, begins_run: bool = False
) -> ModuleSpec:
    moe = compat.moe_class(spec.submodules.mlp)
    if moe is None and builder is None:
        return spec
    if moe is not None:
        require_class(moe, (MoELayer,), "MoE layer")
        require_class(spec.module, (TransformerLayer,), "MoE block")
        require_class(spec.submodules.self_attention.module, ATTENTION, "MoE attention")
    return ModuleSpec(
        module=AMPipeTransformerLayer,
        params={**spec.params, "ampipe": context, "run_builder": builder, "begins_run": begins_run},
        submodules=spec.submodules if moe is None else with_chunk_router(spec.submodules, context),
    )


def _is_moe(spec: ModuleSpec) -> bool:
    return compat.moe_class(spec.submodules.mlp) is not None


def _can_share(spec: ModuleSpec, context: AMPipeContext) -> bool:
    """Whether a layer can share a schedule with its neighbors."""
    if context.config.pipeline.stack == 1 and not context.config.automatic:
        return False
    if _is_moe(spec):
        return True
    return (
        spec.module is TransformerLayer
        and spec.submodules.self_attention.module in ATTENTION
        and compat.is_mlp(spec.submodules.mlp)
    )


def with_gate(spec: Any, gate: type[TopKRouter]) -> Any:
    """The specification of layers, or of a hybrid stack, with ``gate`` in every MoE layer, at any degree.

    Raises:
        BadInput: an MoE layer has another router than Megatron's.
    """
    if isinstance(spec, TransformerBlockSubmodules):
        assert spec.layer_specs is not None
        return dataclasses.replace(spec, layer_specs=[with_gate(layer, gate) for layer in spec.layer_specs])
    submodules = spec.submodules
    if issubclass(spec.module, TransformerBlock):
        submodules = with_gate(submodules, gate)
    elif hasattr(submodules, "moe_layer"):
        submodules = dataclasses.replace(submodules, moe_layer=with_gate(submodules.moe_layer, gate))
    elif _is_moe(spec):
        submodules = _with_router(submodules, (TopKRouter,), lambda _: gate)
    return dataclasses.replace(spec, submodules=submodules)


def with_chunk_router(
    submodules: TransformerLayerSubmodules, context: AMPipeContext
) -> TransformerLayerSubmodules:
    """The submodules of an MoE layer with its router, Megatron's or the user's, made to route chunks."""
    known = (TopKRouter,) if context.gate is None else (TopKRouter, context.gate)
    return _with_router(submodules, known, chunk_router_of)


def _with_router(
    submodules: TransformerLayerSubmodules,
    known: tuple[type, ...],
    change: Callable[[type[TopKRouter]], type[TopKRouter]],
) -> TransformerLayerSubmodules:
    moe = compat.moe_submodules(submodules.mlp)
    require_class(moe.router, known, "MoE router")
    moe = dataclasses.replace(moe, router=change(moe.router))
    return dataclasses.replace(submodules, mlp=compat.with_moe_submodules(submodules.mlp, moe))


def require_class(found: type, known: tuple[type, ...], role: str) -> None:
    """Check that a module with this role in a layer has a class whose work the stages know.

    Raises:
        BadInput: ``found`` is none of ``known``. It may be a subclass: the stages would not run what it adds.
    """
    if found not in known:
        raise BadInput(
            role,
            getattr(found, "__name__", found),
            rule=f"only Megatron's {' and '.join(cls.__name__ for cls in known)} can be pipelined",
            remedy="Use the default layer specification, or train with --ampipe-degree 1.",
        )
