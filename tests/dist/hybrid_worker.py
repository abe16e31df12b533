"""Hybrid stacks of Megatron's local layers, stock and with their attention-MoE pairs pipelined."""

from __future__ import annotations

from typing import Any

import torch

from tests.dist.cases import AUX, Case, Z
from tests.dist.worker import report, start, use_groups

STACKS = {
    # Pattern, degree, layers that may share a schedule (0: all).
    "pairs": ("*E-*EE*", 4, 1),
    "stack": ("*-*E*E-*E", 2, 0),
    "stacks-of-two": ("*E*E*E", 4, 2),
}


def main() -> None:
    rank, _ = start()
    use_groups()
    results = {}
    for name, (pattern, degree, stack) in STACKS.items():
        case = Case(
            "hybrid", sequence_length=32, model=AUX | Z | {"moe_router_topk": 2, "num_layers": len(pattern)}
        )
        results[name] = _compared(case, list(pattern), rank=rank, degree=degree, stack=stack)
    report(results)


def _compared(case: Case, pattern: list[str], *, rank: int, degree: int, stack: int) -> dict[str, Any]:
    """One stack of layers, stock and pipelined, with the same weights."""
    from megatron.core.models.hybrid.hybrid_block import HybridStack
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module

    from megatron_ampipe.errors import BadInput
    from megatron_ampipe.launch.host.hybrid_layers import local_submodules
    from megatron_ampipe.layers.context import AMPipeContext
    from megatron_ampipe.layers.hybrid import pipelined_stack
    from megatron_ampipe.schedule import Pipeline
    from megatron_ampipe.schedule.pipeline import AMPipeConfig
    from tests.dist.blocks import HIDDEN, differences, forward, inputs_of, run, transformer_config
    from tests.dist.parameter_reads import ParameterReads

    config = transformer_config(case)
    spec = ModuleSpec(module=HybridStack, submodules=local_submodules())

    def build(chosen: ModuleSpec) -> torch.nn.Module:
        torch.manual_seed(3)
        return AsLayer(
            build_module(
                chosen,
                config=config,
                layer_type_list=pattern,
                post_layer_norm=False,
                pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            )
        )

    context = AMPipeContext(AMPipeConfig(pipeline=Pipeline.of(degree, stack=stack)), kernel="exact")
    stock, ours = build(spec), build(pipelined_stack(spec, context))
    ours.load_state_dict(stock.state_dict(), strict=True)
    expected = run(stock, case, rank=rank)
    assert expected["output"].shape == (32, 1, HIDDEN)
    found = differences(expected, run(ours, case, rank=rank))
    with ParameterReads(ours) as reads:
        forward(ours, inputs_of(case, rank=rank, dtype=torch.float32))
    handle = ours.stack.layers[pattern.index("E")].register_forward_hook(lambda *_: None)
    try:
        forward(ours, inputs_of(case, rank=rank, dtype=torch.float32))
        refused = ""
    except BadInput as error:
        refused = str(error)
    handle.remove()
    return {
        "begins": [
            index
            for index, layer in enumerate(ours.stack.layers)
            if pattern[index] == "*"
            and layer.block is not None
            and (begun := layer.stack()) is not None
            and not begun.is_dense
        ],
        "paired": [index for index, layer in enumerate(ours.stack.layers) if layer.block is not None],
        "differences": found,
        "parameter reads": reads.report(),
        "refused hook": refused,
        "off": pipelined_stack(spec, AMPipeContext(AMPipeConfig())) is spec,
    }


class AsLayer(torch.nn.Module):
    """A stack that can be called like a layer in ``tests.dist.blocks.run``."""

    def __init__(self, stack: torch.nn.Module) -> None:
        super().__init__()
        self.stack = stack

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: None, **arguments: Any
    ) -> tuple[torch.Tensor, None]:
        return self.stack(hidden_states, attention_mask, **arguments), None


if __name__ == "__main__":
    main()
