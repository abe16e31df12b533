"""Models that are built from configurations, as recipes build them, stock and with AMPipe switched on."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import torch

from tests.dist import logged_losses
from tests.dist.worker import report, start, use_groups

LENGTH, VOCABULARY = 32, 64
SETTINGS = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_moe_experts": 4, "moe_router_topk": 2,
    "moe_aux_loss_coeff": 1e-2, "moe_router_load_balancing_type": "aux_loss", "add_bias_linear": False,
    "moe_token_dispatcher_type": "alltoall", "attention_dropout": 0.0, "hidden_dropout": 0.0,
    "normalization": "RMSNorm", "transformer_impl": "local", "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False, "persist_layer_norm": False, "moe_shared_expert_overlap": True,
    "moe_shared_expert_intermediate_size": 16,
}  # fmt: skip


def main() -> None:
    rank, world_size = start()
    use_groups()
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig
    from megatron.training.models.hybrid import HybridModelBuilder, HybridModelConfig

    from megatron_ampipe.launch.recipes import switch_on

    def megatron_gpt(**settings: Any) -> Any:
        return GPTModelConfig(
            transformer=TransformerConfig(**SETTINGS, expert_model_parallel_size=world_size),
            vocab_size=VOCABULARY,
            seq_length=LENGTH,
            **settings,
        )

    def of_the_user(config: Any) -> Any:
        """A function that takes the configuration alone, as those of Megatron-Bridge may."""
        return get_gpt_decoder_block_spec(config.transformer, use_transformer_engine=False)

    def megatron_hybrid(**settings: Any) -> Any:
        transformer = TransformerConfig(
            **SETTINGS | {"num_layers": 5}, is_hybrid_model=True, expert_model_parallel_size=world_size
        )
        return HybridModelConfig(
            transformer=transformer,
            vocab_size=VOCABULARY,
            seq_length=LENGTH,
            hybrid_layer_pattern="*EM*E",
            **settings,
        )

    def built(model: Any) -> torch.nn.Module:
        builder = HybridModelBuilder if isinstance(model, HybridModelConfig) else GPTModelBuilder
        torch.manual_seed(7)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        return builder(model).build_model(groups, pre_process=True, post_process=True)

    results = {}
    for name, make in {
        "gpt": megatron_gpt,
        "gpt-function": lambda: megatron_gpt(transformer_layer_spec=of_the_user),
        "hybrid": megatron_hybrid,
        "hybrid-spec": lambda: megatron_hybrid(hybrid_stack_spec=hybrid_stack_spec),
    }.items():
        # Megatron keeps losses for as many layers as the first model has.
        logged_losses.clear()
        stock, chosen = make(), make()
        for model in (stock, chosen):
            model.transformer.mamba_head_dim, model.transformer.mamba_num_groups = 16, 2
            model.transformer.mamba_state_dim = 16
        # A recipe has the model among other parts.
        switch_on(SimpleNamespace(model=chosen), degree=4)
        if name == "gpt":
            pickle.loads(pickle.dumps(chosen.transformer_layer_spec))
        stock.transformer.moe_shared_expert_overlap = False
        models = built(stock), built(chosen)
        models[1].load_state_dict(models[0].state_dict(), strict=True)
        results[name] = {
            "switched off": not chosen.transformer.moe_shared_expert_overlap,
            "layers": sorted({type(layer).__name__ for layer in models[1].decoder.layers}),
            "differences": _differences(*models, rank=rank),
        }
    report(results)


def _differences(stock: torch.nn.Module, ours: torch.nn.Module, *, rank: int) -> dict[str, float]:
    """Relative differences of the loss and of every parameter's gradient."""
    generator = torch.Generator().manual_seed(100 + rank)
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=generator)
    found = []
    for model in (stock, ours):
        positions = torch.arange(LENGTH).expand(2, -1)
        loss = model(tokens, positions, None, labels=tokens.roll(-1, 1))
        loss.mean().backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        found.append({"loss": loss.detach(), **gradients})
    expected, actual = found
    return {
        name: ((actual[name] - value).norm() / value.norm().clamp(min=1e-30)).item()
        for name, value in expected.items()
        if value is not None
    }


if __name__ == "__main__":
    main()
