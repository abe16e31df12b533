"""A hybrid stack of Megatron's local layers, stock and with its attention-MoE pairs pipelined."""

from __future__ import annotations

import dataclasses

import torch

from tests.dist.cases import AUX, Case, Z
from tests.dist.worker import report, start, use_groups

PATTERN = list("*E-*EE*")


def main() -> None:
    rank, _ = start()
    use_groups()
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module

    from megatron_ampipe.config import AMPipeConfig
    from megatron_ampipe.layers.context import AMPipeContext
    from megatron_ampipe.layers.hybrid import HybridAttentionLayer, pipelined_stack
    from megatron_ampipe.schedule import Pipeline
    from tests.dist.blocks import HIDDEN, differences, forward, inputs_of, run, transformer_config
    from tests.dist.parameter_reads import ParameterReads

    case = Case(
        "hybrid", sequence_length=32, model=AUX | Z | {"moe_router_topk": 2, "num_layers": len(PATTERN)}
    )
    config = transformer_config(case)
    dense, moe = (get_gpt_layer_local_spec(count, False, normalization="RMSNorm") for count in (None, 4))
    half_attention = {"pre_mlp_layernorm": IdentityOp, "mlp": IdentityOp, "mlp_bda": IdentityFuncOp}
    half_mlp = {"input_layernorm": IdentityOp, "self_attention": IdentityOp, "self_attn_bda": IdentityFuncOp}

    def half(spec: ModuleSpec, without: dict[str, object]) -> ModuleSpec:
        return dataclasses.replace(spec, submodules=dataclasses.replace(spec.submodules, **without))

    spec = ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            attention_layer=half(dense, half_attention),
            mlp_layer=half(dense, half_mlp),
            moe_layer=half(moe, half_mlp),
        ),
    )
    context = AMPipeContext(AMPipeConfig(pipeline=Pipeline.of(4)), kernel="exact")

    def build(chosen: ModuleSpec) -> torch.nn.Module:
        torch.manual_seed(3)
        return build_module(
            chosen,
            config=config,
            layer_type_list=PATTERN,
            post_layer_norm=False,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )

    class AsLayer(torch.nn.Module):
        """A stack that can be called like a layer in ``tests.dist.blocks.run``."""

        def __init__(self, stack: torch.nn.Module) -> None:
            super().__init__()
            self.stack = stack

        def forward(self, hidden_states: torch.Tensor, attention_mask: None, rotary_pos_emb: None):
            return self.stack(hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb), None

    stock, ours = AsLayer(build(spec)), AsLayer(build(pipelined_stack(spec, context)))
    ours.load_state_dict(stock.state_dict(), strict=True)
    assert run(stock, case, rank=rank)["output"].shape == (32, 1, HIDDEN)
    joined = [
        index
        for index, layer in enumerate(ours.stack.layers)
        if isinstance(layer, HybridAttentionLayer) and layer.block is not None
    ]
    found = differences(run(stock, case, rank=rank), run(ours, case, rank=rank))
    with ParameterReads(ours) as reads:
        forward(ours, inputs_of(case, rank=rank, dtype=torch.float32))
    report(
        {
            "joined": joined,
            "differences": found,
            "parameter reads": reads.report(),
            "off": pipelined_stack(spec, off()) is spec,
        }
    )


def off():
    """A context at degree 1."""
    from megatron_ampipe.config import AMPipeConfig
    from megatron_ampipe.layers.context import AMPipeContext

    return AMPipeContext(AMPipeConfig())


if __name__ == "__main__":
    main()
