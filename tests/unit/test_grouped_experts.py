"""Megatron's module for Transformer Engine's grouped experts, over a stand-in of its linear layers.

With ``--recompute-modules moe_act`` in a stage of AMPipe, compared with the module on its own, bit by bit.
"""

import gc
import types
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, Parameter

pytest.importorskip("megatron.core")

from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ampipe.layers.linear_layers import expert_products
from megatron_ampipe.layers.moe_stages import expert
from megatron_ampipe.runtime.segment import BlockParameters, GradientSums, Segment
from megatron_ampipe.schedule import kinds

COUNTS = torch.tensor([5, 0, 7])
HIDDEN, WIDTH = 8, 16


class GroupedLinear(Module):
    """What ``te.pytorch.GroupedLinear`` computes: of each group of rows the product with its own weight."""

    def __init__(self, groups: int, inputs: int, outputs: int, **_options: Any) -> None:
        super().__init__()
        self.weight = Parameter(torch.randn(groups, outputs, inputs))
        self.outputs: list[weakref.ref[Any]] = []
        """The memory of every result."""
        self.inputs: list[weakref.ref[Any]] = []

    def forward(self, rows: Tensor, counts: list[int]) -> tuple[Tensor, None]:
        groups = zip(rows.split(counts), self.weight, strict=True)
        result = torch.cat([F.linear(part, weight) for part, weight in groups])
        self.inputs.append(weakref.ref(rows.untyped_storage()))
        self.outputs.append(weakref.ref(result.untyped_storage()))
        return result, None


def grouped_experts(*, fused: bool, **settings: Any) -> TEGroupedMLP:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        moe_ffn_hidden_size=WIDTH,
        num_moe_experts=len(COUNTS),
        moe_grouped_gemm=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=fused,
        **settings,
    )
    torch.manual_seed(3)
    groups = types.SimpleNamespace(ep=None, expt_tp=None)
    return TEGroupedMLP(len(COUNTS), config, GroupedMLPSubmodules(GroupedLinear, GroupedLinear), groups)


@torch.compiler.set_stance("force_eager")
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_moe_act_runs_in_a_stage(fused: bool) -> None:
    plain = grouped_experts(fused=fused)
    again = grouped_experts(fused=fused, recompute_granularity="selective", recompute_modules=["moe_act"])
    tokens, probs = torch.randn(int(COUNTS.sum()), HIDDEN), torch.rand(int(COUNTS.sum()))
    given = [tensor.clone().requires_grad_() for tensor in (tokens, probs)]
    output, _ = plain(given[0], COUNTS, given[1])
    gradient = torch.randn_like(output)
    expected = torch.autograd.grad(output, [*given, *plain.parameters()], gradient)

    parameters = tuple(again.parameters())
    block = types.SimpleNamespace(
        moe=types.SimpleNamespace(experts=again),
        drops_activations=True,
        expert_products=expert_products(again),
        stage_parameters={kinds.EXPERT: parameters},
    )
    dispatcher = types.SimpleNamespace(
        dispatch_postprocess=lambda tokens, probs: (tokens, COUNTS, probs),
        combine_preprocess=lambda rows: rows,
    )
    state: Any = types.SimpleNamespace(block=block, dispatchers=[dispatcher])
    segment = Segment(lambda *inputs: expert(state, 0, *inputs), [tokens, probs], releases=True)
    assert torch.equal(segment.values[0], output)
    segment.values = ()
    gc.collect()
    (activated,), (first,) = again.linear_fc2.inputs, again.linear_fc1.outputs
    assert activated() is None and first() is not None, "the wrong tensor is kept"

    sums = GradientSums(BlockParameters(parameters, []))
    found = segment.backward([gradient], parameters=range(len(parameters)), sums=sums)
    found = [*found, *(sums.take(number) for number in range(len(parameters)))]
    assert all(map(torch.equal, found, expected))
    assert again.activation_recompute and len(again.linear_fc1.outputs) == 1, "a product ran again"
