"""The planner's memory of a rank compared with Megatron's estimate (``training.theoretical_memory_usage``).

Both count parameters. Megatron's formula of activations is that of a dense layer without a gated activation;
what it leaves out is added here, term by term.
"""

import dataclasses
from types import SimpleNamespace

import pytest

from megatron_ampipe.plan.block import Block
from megatron_ampipe.plan.model_block import block_of
from megatron_ampipe.plan.model_file import find_model, read_model
from megatron_ampipe.plan.model_flags import ModelFlags, TrainingFlags
from megatron_ampipe.plan.rank_memory import RankMemory, memory_by_stage
from megatron_ampipe.schedule import Pipeline
from tests.plan_cases import cluster

RANKS = 16


def first_stage(name: str, **settings: object) -> tuple[RankMemory, SimpleNamespace]:
    """The memory of a rank of the first pipeline stage, and Megatron's arguments of the same training."""
    overrides = {key.replace("_", "-"): value for key, value in settings.items()}
    model = read_model(find_model(name), overrides={"bf16": True, **overrides})
    block, _ = block_of(model, cluster("dgx-h100"), ranks=RANKS)
    memory = memory_by_stage(model, block, Pipeline.of(1))
    assert not isinstance(memory, str), memory
    args = SimpleNamespace(**model.read(ModelFlags).model_dump() | model.read(TrainingFlags).model_dump())
    tensor, stages = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    rows = args.make_vocab_size_divisible_by * tensor
    args.padded_vocab_size = -(-args.vocab_size // rows) * rows
    args.world_size, args.data_parallel_size = RANKS, RANKS // (tensor * stages)
    args.kv_channels = block.head_size
    args.expert_model_parallel_size = block.expert
    args.expert_tensor_parallel_size = block.expert_tensor
    args.moe_ffn_hidden_size = args.moe_ffn_hidden_size or args.ffn_hidden_size
    args.add_bias_linear = not args.disable_bias_linear
    args.q_lora_rank = args.q_lora_rank or None
    args.mtp_num_layers = args.mtp_num_layers or None
    args.moe_latent_size = args.moe_latent_size or None
    args.virtual_pipeline_model_parallel_size = None
    return memory[0], args


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mixtral-8x7b", {}),
        ("mixtral-8x7b", {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
        ("mixtral-8x7b", {"use_distributed_optimizer": True}),
        ("mixtral-8x7b", {"pipeline_model_parallel_size": 2}),
        ("qwen3-30b-a3b-like", {"expert_model_parallel_size": 8}),
        ("deepseek-v2-lite", {"expert_model_parallel_size": 8}),
    ],
)
def test_weights_gradients_and_optimizer_are_those_of_megatrons_estimate(
    name: str, settings: dict[str, object]
) -> None:
    """Megatron's estimate has no norms of queries and keys, and gives each stage a part of the final norm."""
    from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

    memory, args = first_stage(name, **settings)
    size = memory.weights + memory.gradients + memory.optimizer
    assert size == pytest.approx(compute_weight_and_optimizer_memory(args), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mixtral-8x7b", {}),
        ("mixtral-8x7b", {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
        ("mixtral-8x22b", {}),
        # Its queries are twice as wide as its hidden states, which Megatron's estimate does not know.
        ("qwen3-30b-a3b-like", {"expert_model_parallel_size": 8}),
    ],
)
def test_activations_are_within_10_percent_of_megatrons_estimate(
    name: str, settings: dict[str, object]
) -> None:
    from megatron.training.theoretical_memory_usage import compute_activation_memory

    memory, args = first_stage(name, **settings)
    tokens = args.seq_length * args.micro_batch_size * args.num_layers / args.tensor_model_parallel_size
    # An expert's width as often as a token has experts.
    args.ffn_hidden_size = args.moe_router_topk * args.moe_ffn_hidden_size
    estimate = compute_activation_memory(args, num_microbatches=8)
    # A gated activation: twice as many outputs of the first linear layer, in 16 bits.
    estimate += tokens * 2 * args.ffn_hidden_size
    # The rows that reach experts, and those that they return, in 16 bits.
    estimate += tokens * 2 * 2 * args.moe_router_topk * args.hidden_size
    # Masks of two dropouts, which these models do not have, in bytes.
    estimate -= tokens * 2 * args.hidden_size
    assert memory.activations == pytest.approx(estimate, rel=0.1)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b-like"])
def test_padding_of_fixed_rows_is_added_as_rows_of_megatrons_estimate(name: str) -> None:
    """Megatron counts rows that are routed: what reaches experts, and two more of a gated activation."""
    model = read_model(find_model(name), overrides={"bf16": True, "expert-model-parallel-size": 8})
    block, _ = block_of(model, cluster("dgx-h100"), ranks=RANKS)
    fixed = dataclasses.replace(block, rows_margin=1.25)
    pipeline = Pipeline.of(2)

    def activations(block: Block) -> float:
        stages = memory_by_stage(model, block, pipeline)
        assert not isinstance(stages, str), stages
        return stages[0].activations

    chunk = block.rows // 2
    padding = 2 * (fixed.arriving(chunk) - block.received(chunk))
    num_layers = model.read(ModelFlags).num_layers
    # In 16 bits. With padding there are also indices.
    added = num_layers * padding * 2 * (block.hidden + 3 * block.ffn)
    assert activations(fixed) - activations(block) == pytest.approx(added, rel=0.05)
    # What the graphs of a layer hold while it runs is there for no other layer.
    captured = dataclasses.replace(fixed, captures_passes=True)
    one_layer = activations(fixed) / num_layers
    assert activations(captured) > activations(fixed) + num_layers * one_layer / 4
