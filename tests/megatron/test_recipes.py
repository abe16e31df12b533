"""Wrong recipes are refused; :mod:`.test_frameworks` trains models of right ones."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.recipes import switch_on

LENGTH, VOCABULARY = 32, 64
SETTINGS = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_moe_experts": 4, "moe_router_topk": 2,
    "moe_aux_loss_coeff": 1e-2, "moe_router_load_balancing_type": "aux_loss", "add_bias_linear": False,
    "moe_token_dispatcher_type": "alltoall", "attention_dropout": 0.0, "hidden_dropout": 0.0,
    "normalization": "RMSNorm", "transformer_impl": "local", "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False, "persist_layer_norm": False, "moe_shared_expert_overlap": True,
    "moe_shared_expert_intermediate_size": 16, "expert_model_parallel_size": 2,
}  # fmt: skip


def configuration(name: str) -> Any:
    """As a recipe makes it, or with the specification of a hybrid stack."""
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.training.models.gpt import GPTModelConfig
    from megatron.training.models.hybrid import HybridModelConfig

    sizes = {"vocab_size": VOCABULARY, "seq_length": LENGTH}
    if name.startswith("hybrid"):
        transformer = TransformerConfig(**SETTINGS | {"num_layers": 5}, is_hybrid_model=True)
        transformer.mamba_head_dim = transformer.mamba_state_dim = 16
        transformer.mamba_num_groups = 2
        given = {"hybrid_stack_spec": hybrid_stack_spec} if name == "hybrid-spec" else {}
        return HybridModelConfig(transformer=transformer, hybrid_layer_pattern="*EM*E", **sizes, **given)
    return GPTModelConfig(transformer=TransformerConfig(**SETTINGS), **sizes)


def gradients(
    config: Any, weights_of: torch.nn.Module | None = None
) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model of a configuration, with the weights of another one; the loss and all gradients."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.models.gpt import GPTModelBuilder
    from megatron.training.models.hybrid import HybridModelBuilder

    builder = HybridModelBuilder if hasattr(config, "hybrid_stack_spec") else GPTModelBuilder
    torch.manual_seed(7)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = builder(config).build_model(groups, pre_process=True, post_process=True)
    if weights_of is not None:
        model.load_state_dict(weights_of.state_dict(), strict=True)
    generator = torch.Generator().manual_seed(100 + torch.distributed.get_rank())
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=generator)
    loss = model(tokens, torch.arange(LENGTH).expand(2, -1), None, labels=tokens.roll(-1, 1))
    loss.mean().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return model, {"loss": loss.detach()} | {k: v for k, v in found.items() if v is not None}


def stock_layers(config: Any, vp_stage: int | None = None) -> str:
    return f"stage {vp_stage}"


def _model(**settings: Any) -> SimpleNamespace:
    known = {"transformer_layer_spec": stock_layers, "num_moe_experts": 4, "seq_length": 64}
    return SimpleNamespace(**known | settings)


def test_degree_1_changes_nothing() -> None:
    model = _model()
    switch_on(model, degree=1)
    assert model.transformer_layer_spec is stock_layers


@pytest.mark.parametrize(
    ("recipe", "settings", "expected"),
    [
        (_model(), {"degree": 65}, "--ampipe-degree 65: must be between 1 and"),
        (_model(num_moe_experts=None), {"degree": 4}, "--num-experts (not set)"),
        (_model(fp8="hybrid"), {"degree": 4}, "--fp8-format hybrid"),
        (
            SimpleNamespace(model=_model(), ddp=SimpleNamespace(use_torch_fsdp2=True)),
            {"degree": 4},
            "--use-torch-fsdp2",
        ),
        (
            SimpleNamespace(
                model=_model(fp8="e4m3", fp8_recipe="tensorwise", transformer_impl="transformer_engine"),
                comm_overlap=SimpleNamespace(tp_comm_overlap=True, tp_comm_overlap_cfg=range(8)),
            ),
            {"degree": 4},
            "--tp-comm-overlap-cfg range with --fp8-format e4m3",
        ),
        (
            _model(cuda_graph_impl="local", cuda_graph_modules=["attn"]),
            {"degree": 4},
            "cuda_graph_impl local: a graph of Megatron's would hold",
        ),
        (SimpleNamespace(model=SimpleNamespace()), {"degree": 4}, "has neither transformer_layer_spec nor"),
    ],
)
def test_what_is_refused(recipe: Any, settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(BadInput) as refused:
        switch_on(recipe, **settings)
    assert expected in str(refused.value)


def test_megatron_fsdp_has_layers_and_gradients_apart() -> None:
    model = _model(gradient_accumulation_fusion=True)
    switch_on(SimpleNamespace(model=model, ddp=SimpleNamespace(use_megatron_fsdp=True)), degree=4)
    assert model.transformer_layer_spec.keywords["settings"] == {"degree": 4, "stack": 1}
    assert model.gradient_accumulation_fusion is False


def test_overlaps_that_megatron_bridge_would_write_into_the_model_are_off() -> None:
    """From a copy that it makes when its ``CommOverlapConfig`` is created."""
    overlaps = {
        "tp_comm_overlap": True,
        "overlap_moe_expert_parallel_comm": True,
        "delay_wgrad_compute": True,
    }
    of_bridge = SimpleNamespace(user_comm_overlap_cfg=SimpleNamespace(**overlaps), **overlaps)
    recipe = SimpleNamespace(model=_model(tp_comm_overlap=True), comm_overlap=of_bridge)
    switch_on(recipe, degree=4)
    for part in (recipe.model, of_bridge, of_bridge.user_comm_overlap_cfg):
        assert not any(getattr(part, name, False) for name in overlaps)


def test_twice_is_refused() -> None:
    model = _model()
    switch_on(model, degree=4)
    with pytest.raises(BadInput, match="switched on in it already"):
        switch_on(model, degree=2)
