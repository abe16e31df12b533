"""Blocks that draw random numbers, or drop tokens with a separate capacity for each chunk."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

from tests.dist.cases import AUX, Case
from tests.dist.worker import empty_is_nan, report, start, use_groups

DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.1, "moe_router_topk": 2, **AUX}
NUM_DRAWS = 150


def passes(layer: Any, case: Case, rank: int, *, recompute: bool = False, seed: int = 7) -> dict[str, Any]:
    """One forward and backward from a given random state; with ``recompute``, under Megatron's checkpoint."""
    import torch
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from tests.dist.blocks import run

    torch.manual_seed(seed + rank)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    if not recompute:
        return run(layer, case, rank=rank, seed=None)

    def checkpointed(hidden_states: Any, **nothing: None) -> tuple[Any, None]:
        assert set(nothing.values()) == {None}

        def whole(hidden: Any) -> Any:
            return layer(hidden_states=hidden, attention_mask=None)[0]

        return tensor_parallel.checkpoint(whole, False, hidden_states), None

    checkpointed.parameters = layer.parameters
    checkpointed.named_parameters = layer.named_parameters
    checkpointed.named_buffers = layer.named_buffers
    return run(checkpointed, case, rank=rank, seed=None)


def dropout(rank: int) -> dict[str, Any]:
    """Equal results for equal seeds, also with recompute; different ones otherwise; the mean of stock."""
    from tests.dist.blocks import build_layers, differences

    found: dict[str, Any] = {}
    for name, model in {
        "dropout": DROPOUT,
        "recomputed core attention": {
            **DROPOUT, "recompute_granularity": "selective", "recompute_modules": ["core_attn"],
        },
        "input jitter": {"moe_input_jitter_eps": 0.1, "moe_router_topk": 2},
    }.items():  # fmt: skip
        case = Case(name, kernel="sdpa", model=model)
        _, ours = build_layers(case)
        first = passes(ours, case, rank)
        found[name] = {
            "again": differences(first, passes(ours, case, rank)),
            "recomputed": differences(first, passes(ours, case, rank, recompute=True)),
            "another seed": differences(first, passes(ours, case, rank, seed=8))["output"],
        }
    found["stack"] = recomputed_stacks(rank)
    case = Case(
        "mean", kernel="exact", sequence_length=16, model={"hidden_dropout": 0.2, "attention_dropout": 0.2}
    )
    stock, ours = build_layers(case)
    draws = {
        name: [passes(layer, case, rank, seed=100 + draw)["output"] for draw in range(NUM_DRAWS)]
        for name, layer in (("stock", stock), ("ours", ours))
    }
    found["z-score of the mean"] = z_score(draws["stock"], draws["ours"])
    return found


def recomputed_stacks(rank: int) -> dict[str, dict[str, float]]:
    """Stacks that are recomputed inside their schedule, compared with stacks that are not.

    Uninitialized memory is filled with NaN: the combine does not run again, and nothing may need its values.
    """
    from tests.dist.blocks import build_layers, differences

    found = {}
    for name, settings in {
        "dropout": {"model": DROPOUT | {"moe_router_topk": 1, "moe_router_pre_softmax": True}},
        "two degrees": {"model": DROPOUT, "degree": 2, "backward_degree": 4},
        "input jitter": {"model": {"moe_input_jitter_eps": 0.1, "moe_router_topk": 2}},
        "no random numbers": {"model": AUX},
    }.items():
        plain = Case(name, kernel="sdpa", layers="mdm", stack=0, **settings)
        results = []
        for case in (plain, dataclasses.replace(plain, recompute=math.inf)):
            _, ours = build_layers(case)
            with empty_is_nan():
                results.append(passes(ours, case, rank))
        found[name] = differences(*results)
    return found


def z_score(stock: list[Any], ours: list[Any]) -> float:
    """Root mean square of the difference of two means, in units of its standard error: 1 if they agree."""
    import torch

    first, second = torch.stack(stock), torch.stack(ours)
    error = ((first.var(0) + second.var(0)) / len(stock)).clamp_min(1e-12).sqrt()
    return statistics.fmean((((first.mean(0) - second.mean(0)) / error) ** 2).flatten().tolist()) ** 0.5


def chunk_capacity(rank: int) -> dict[str, float]:
    """Compare a capacity per chunk with the stock MoE layer called once per chunk."""
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module

    from megatron_ampipe.layers.context import AMPipeContext
    from megatron_ampipe.layers.layer import pipelined
    from megatron_ampipe.schedule import Pipeline
    from megatron_ampipe.schedule.pipeline import AMPipeConfig
    from tests.dist.blocks import HIDDEN, transformer_config

    found = {}
    for policy in ("probs", "position"):
        case = Case(policy, model={
            "moe_router_topk": 2, "moe_expert_capacity_factor": 0.7, "moe_token_drop_policy": policy,
        })  # fmt: skip
        config = transformer_config(case)
        spec = get_gpt_layer_local_spec(config.num_moe_experts, False, normalization="RMSNorm")
        context = AMPipeContext(AMPipeConfig(pipeline=Pipeline.of(2), capacity_scope="chunk"), kernel="exact")
        torch.manual_seed(1)
        stock = build_module(spec, config=config, layer_number=1)
        ours = build_module(pipelined(spec, context), config=config, layer_number=1)
        ours.load_state_dict(stock.state_dict())
        hidden = torch.randn(32, 2, HIDDEN, generator=torch.Generator().manual_seed(rank))
        with torch.no_grad():
            attended, _ = stock._forward_attention(hidden, attention_mask=None)
            expected = torch.cat([stock._forward_mlp(rows) for rows in attended.chunk(2)])
            whole = stock._forward_mlp(attended)
            output, _ = ours(hidden_states=hidden, attention_mask=None)
        found[policy] = ((output - expected).abs().max() / expected.abs().max()).item()
        found[f"{policy}, another function than the whole sequence"] = (whole - expected).abs().max().item()
    return found


def main() -> None:
    rank, _ = start()
    use_groups()
    report({"dropout": dropout(rank), "chunk capacity": chunk_capacity(rank)})


if __name__ == "__main__":
    main()
