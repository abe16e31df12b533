"""Megatron's own CUDA graphs of attention and router, ``--cuda-graph-impl local``, outside of its training.

Megatron captures these modules only of layers that have attention or experts alone, as those of its hybrid
models: of a layer with both it captures all or nothing, and all of it would contain the host's wait for split
sizes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

import torch
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from torch.nn import Module, Parameter


def fields(modules: Collection[str]) -> dict[str, Any]:
    """Of Megatron's configuration: ``--cuda-graph-impl local --cuda-graph-modules``.

    The scope follows from the others; a configuration that is copied would keep that of its original.
    """
    return {
        "cuda_graph_impl": "local",
        "cuda_graph_modules": sorted(modules),
        "inference_cuda_graph_scope": None,
    }


def divided(layer: ModuleSpec) -> list[ModuleSpec]:
    """The specifications of a layer's attention, and of its experts, as two layers."""
    # Megatron has it for its hybrid models.
    from megatron.core.transformer.transformer_layer import MoETransformerLayer

    without_experts = {"pre_mlp_layernorm": IdentityOp, "mlp": IdentityOp, "mlp_bda": IdentityFuncOp}
    without_attention = {
        "input_layernorm": IdentityOp,
        "self_attention": IdentityOp,
        "self_attn_bda": IdentityFuncOp,
    }
    attention = dataclasses.replace(layer.submodules, **without_experts)
    experts = dataclasses.replace(layer.submodules, **without_attention)
    return [
        dataclasses.replace(layer, submodules=attention),
        dataclasses.replace(layer, module=MoETransformerLayer, submodules=experts),
    ]


def divided_name(name: str) -> str:
    """The name of a tensor of a layer in the layers of :func:`divided`."""
    layers, number, module, rest = name.split(".", 3)
    is_of_experts = module in ("pre_mlp_layernorm", "mlp")
    return f"{layers}.{2 * int(number) + is_of_experts}.{module}.{rest}"


class LocalGraphs:
    """The graphs of layers that were built with :func:`fields`.

    They add gradients of weights to ``main_grad``, which only a data-parallel model has, unless linear layers
    do. So parameters have one while a step runs, and afterwards it is their ``grad``.

    Args:
        layers: Has the layers in its attribute ``layers``.
    """

    def __init__(self, layers: Module) -> None:
        each: Any = layers.layers
        # As Megatron's block of layers does.
        cuda_graphs.annotate_first_last_layer(each)
        self._is_captured = False
        self._sums: dict[Parameter, Tensor] = {}
        if not each[0].config.gradient_accumulation_fusion:
            self._sums = {parameter: torch.zeros_like(parameter) for parameter in layers.parameters()}

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A context of the passes of a step; after the first step, graphs are captured."""
        for parameter, total in self._sums.items():
            parameter.main_grad = total.zero_()  # type: ignore[attr-defined]
        if self._is_captured:
            yield
        else:
            with _apart():
                yield
                cuda_graphs.create_cudagraphs()
            self._is_captured = True
        for parameter, total in self._sums.items():
            del parameter.main_grad  # type: ignore[attr-defined]
            if parameter.grad is None:
                parameter.grad = total

    def free(self) -> None:
        """Forget the graphs of all layers, so that others can be captured."""
        cuda_graphs.delete_cuda_graphs()


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """On a stream that is not the default one, which no capture may depend on.

    Megatron changes to such a stream for good when it builds the first layer with local graphs, and back to
    the default one when it has captured them.
    """
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
        torch.cuda.synchronize()
