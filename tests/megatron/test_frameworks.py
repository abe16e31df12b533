"""AMPipe in programs that start Megatron from Python: with stand-ins, two steps train as without it.

A stand-in builds a model with the call that the released package makes (Megatron-Bridge 0.6.2, mbridge
0.15.1, mcore-bridge 1.6.5, slime 0.3.1), and runs code of the user where that package does. No such package
is installed here; docs/frameworks.md says which were tried by hand.
"""

import dataclasses
import inspect
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

from megatron_ampipe import compat
from megatron_ampipe.errors import BadInput, EnvironmentMissing
from megatron_ampipe.launch import recipes
from megatron_ampipe.launch.recipes import switch_on, switch_on_models
from tests.dist.worker import use_groups
from tests.megatron.test_recipes import LENGTH, SETTINGS, VOCABULARY, configuration, gradients

SIZES = {name: value for name, value in SETTINGS.items() if name != "moe_shared_expert_intermediate_size"}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "frameworks.md"

OF_ALL = {
    "pre_process": True, "post_process": True, "position_embedding_type": "rope", "rotary_base": 10000,
    "vp_stage": None,
}  # fmt: skip
"""Keywords of that constructor that all of them give."""
OF_SLIME = OF_ALL | {
    "vocab_size": VOCABULARY, "fp16_lm_cross_entropy": False, "parallel_output": True,
    "rotary_percent": 1.0, "rope_scaling": False, "mtp_block_spec": None,
}  # fmt: skip


def block_spec(config: Any) -> Any:
    """What most of them take as the specification, with Transformer Engine in place of local layers."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=None)


def transformer_config() -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(**SIZES)


def gpt_model(**keywords: Any) -> Any:
    """As verl and slime make it."""
    from megatron.core.models.gpt import GPTModel

    config = transformer_config()
    return GPTModel(config=config, transformer_layer_spec=block_spec(config), **keywords)


def bridge_recipe() -> Any:
    """A ``ConfigContainer`` with the provider of a Qwen3 or Mixtral: one specification for all layers."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

    def default_layer_spec(config: Any) -> Any:
        return get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization="RMSNorm")

    @dataclasses.dataclass
    class Provider(TransformerConfig):
        transformer_layer_spec: Any = default_layer_spec
        vocab_size: int = VOCABULARY
        seq_length: int = LENGTH
        yarn_rotary_scaling_factor: float | None = None

        def provide(self, pre_process: Any = None, post_process: Any = None, vp_stage: Any = None) -> Any:
            spec = self.transformer_layer_spec
            if not isinstance(spec, ModuleSpec):
                takes_stage = "vp_stage" in inspect.signature(spec).parameters
                spec = spec(self, vp_stage=vp_stage) if takes_stage else spec(self)
            values = OF_SLIME | {
                "transformer_layer_spec": spec, "vocab_size": self.vocab_size,
                "max_sequence_length": self.seq_length, "share_embeddings_and_output_weights": True,
                "rope_scaling_factor": 1.0, "seq_len_interpolation_factor": None,
                "scatter_embedding_sequence_parallel": True, "vp_stage": vp_stage,
                "pg_collection": ProcessGroupCollection.use_mpu_process_groups(),
            }  # fmt: skip
            return GPTModel(self, **values)

    return SimpleNamespace(model=Provider(**SIZES), ddp=SimpleNamespace(use_megatron_fsdp=False))


def bridge_by_models(*, on: bool) -> Any:
    """``pretrain(recipe, forward_step)``, whose provider makes the model; the recipe stays as it is."""
    if on:
        switch_on_models(degree=4)
    recipe = bridge_recipe()
    model = recipe.model.provide()
    assert "default_layer_spec" in str(recipe.model.transformer_layer_spec)
    return model


def nemo_run(*, on: bool) -> Any:
    """A task of ``run.Partial``: it makes Megatron-Bridge's recipe and trains, in its executor's process."""
    recipe = bridge_recipe()
    switch_on(recipe, degree=4 if on else 1)
    if on:
        parameters = inspect.signature(recipe.model.transformer_layer_spec).parameters
        assert [*parameters][:2] == ["model", "vp_stage"], "Megatron-Bridge looks for the stage"
    return recipe.model.provide()


def user_file() -> dict[str, Any]:
    """What the file of docs/frameworks.md defines, after it has run as in an import."""
    code = PAGE.read_text().partition("```python\n# ampipe_on.py\n")[2].partition("```")[0]
    assert "switch_on_models(degree=2)" in code
    defined: dict[str, Any] = {}
    exec(code, defined)
    return defined


def verl(*, on: bool) -> Any:
    """``actor_rollout_ref.model.external_lib=ampipe_on``, imported by a worker before it builds the model."""
    if on:
        user_file()
    sizes = {"vocab_size": VOCABULARY, "max_sequence_length": 40960}
    return gpt_model(share_embeddings_and_output_weights=False, **sizes, **OF_ALL)


def swift(*, on: bool, **settings: Any) -> Any:
    """``--external_plugins ampipe_on.py``, imported by its path when arguments are read."""
    from megatron.core.models.gpt import GPTModel

    if on:
        user_file()

    class OfMcoreBridge(GPTModel):
        def __init__(self, config: Any, transformer_layer_spec: Any, vp_stage: int | None = None) -> None:
            values = OF_ALL | {
                "share_embeddings_and_output_weights": False, "mtp_block_spec": None, "vp_stage": vp_stage,
            }  # fmt: skip
            super().__init__(config, transformer_layer_spec, VOCABULARY, 32768, **values)

    OfMcoreBridge.__module__ = "mcore_bridge.model.gpt_model"
    config = transformer_config()
    vars(config).update(settings)
    return OfMcoreBridge(config=config, transformer_layer_spec=of_mcore_bridge(block_spec(config)))


def of_mcore_bridge(spec: Any) -> Any:
    """The layers as mcore-bridge 1.6.5 changes them: subclasses of Megatron's layer and router."""
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_layer import TransformerLayer

    layer_class = type("TransformerLayer", (TransformerLayer,), {})
    router_class = type("TopKRouter", (TopKRouter,), {})
    for made in (layer_class, router_class):
        made.__module__ = "mcore_bridge.model.modules"
    layers = []
    for layer in spec.layer_specs:
        mlp = layer.submodules.mlp
        experts = dataclasses.replace(compat.moe_submodules(mlp), router=router_class)
        mlp = compat.with_moe_submodules(mlp, experts)
        submodules = dataclasses.replace(layer.submodules, mlp=mlp)
        layers.append(dataclasses.replace(layer, module=layer_class, submodules=submodules))
    return dataclasses.replace(spec, layer_specs=layers)


def slime(*, on: bool) -> Any:
    """``--custom-megatron-init-path ampipe_on.start``, called in each actor before it builds models."""
    if on:
        user_file()["start"](SimpleNamespace())
    return gpt_model(max_sequence_length=4096, share_embeddings_and_output_weights=False, **OF_SLIME)


FRAMEWORKS = (bridge_by_models, nemo_run, verl, swift, slime)


@pytest.fixture(autouse=True)
def without_yarn(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Megatron-Bridge replaces when it is imported: its providers have None where there is no YaRN."""
    from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as yarn
    from megatron.core.transformer import attention

    name = "_yarn_get_concentration_factor_from_config"
    of_megatron = getattr(yarn, name)

    def factor(config: Any) -> float:
        is_given = getattr(config, "yarn_rotary_scaling_factor", None) is not None
        return of_megatron(config) if is_given else 1.0

    for module in (yarn, attention):
        monkeypatch.setattr(module, name, factor)


@pytest.fixture(autouse=True)
def switched_off_at_the_end() -> Iterator[None]:
    """The constructors of Megatron's models as they were."""
    from megatron_ampipe.launch.script import models_of_megatron

    kept = [(model, model.__init__) for model in models_of_megatron()]
    yield
    for model, construct in kept:
        model.__init__ = construct
    # What all models of a process share.
    recipes._context_of.cache_clear()


def losses_of(model: Any, *, steps: int = 2) -> list[float]:
    """Of every step of SGD, for the same tokens, which differ by rank."""
    from tests.dist import logged_losses

    # Megatron keeps losses for as many layers as the first model has.
    logged_losses.clear()
    generator = torch.Generator().manual_seed(100 + torch.distributed.get_rank())
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(tokens, torch.arange(LENGTH).expand(2, -1), None, labels=tokens.roll(-1, 1)).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def layers_of(model: Any) -> set[str]:
    return {type(layer).__name__ for layer in model.decoder.layers}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("build", FRAMEWORKS, ids=lambda build: build.__name__)
def test_two_steps_equal_those_of_stock_layers(build: Callable[..., Any]) -> None:
    use_groups()
    torch.manual_seed(7)
    stock = build(on=False)
    assert layers_of(stock) <= {"TransformerLayer", "MoETransformerLayer"}
    weights = {name: value.clone() for name, value in stock.state_dict().items() if value is not None}
    expected = losses_of(stock)
    model = build(on=True)
    assert layers_of(model) == {"AMPipeTransformerLayer"}
    # All layers share a schedule.
    first, second = model.decoder.layers
    assert first._stack() is not None and second._stack() is None
    model.load_state_dict(weights, strict=False)
    found = losses_of(model)
    assert expected[0] - expected[1] > 1e-3, "a step that changes nothing compares nothing"
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["gpt", "hybrid", "hybrid-spec", "hybrid of a process"])
def test_models_of_configurations_equal_stock(name: str) -> None:
    from tests.dist import logged_losses
    from tests.dist.blocks import wrong

    use_groups()
    # Megatron keeps losses for as many layers as the first model has.
    logged_losses.clear()
    stock, chosen = configuration(name), configuration(name)
    stock.transformer.moe_shared_expert_overlap = False
    of_stock, expected = gradients(stock)
    if name == "hybrid of a process":
        switch_on_models(degree=4)
    else:
        # A recipe has the model among other parts.
        switch_on(SimpleNamespace(model=chosen), degree=4)
    if name == "gpt":
        pickle.loads(pickle.dumps(chosen.transformer_layer_spec))
    model, found = gradients(chosen, weights_of=of_stock)
    assert not chosen.transformer.moe_shared_expert_overlap
    ours = {"AMPipeTransformerLayer", "HybridAttentionLayer"}
    assert ours & layers_of(model) and not ours & layers_of(of_stock)
    assert any("router" in name for name in expected)
    assert wrong(expected, found, 1e-5) == {}


@pytest.mark.ranks(1)
def test_packed_sequences_of_ms_swift_need_its_fused_rotation() -> None:
    """Without it, mcore-bridge gives layers the rotation of every row, and not the table of positions."""
    use_groups()
    model = swift(on=True)
    reader = model.decoder.layers[0]._block.context.documents
    with pytest.raises(BadInput, match=r"apply_rope_fusion False: .* Use --apply_rope_fusion true"):
        reader.read(SimpleNamespace(qkv_format="thd"), None, num_rows=8)
    assert reader.read(None, None, num_rows=8) is None
    with pytest.raises(BadInput, match=r"mlp_padding_free True: .* Use --mlp_padding_free false"):
        swift(on=False, mlp_padding_free=True)
    with pytest.raises(BadInput, match=r"attention_scaling 0.5: .* Use --apply_rope_fusion true"):
        swift(on=False, attention_scaling=0.5)
    with pytest.raises(BadInput, match=r"moe_router_enable_vl_bias True: "):
        swift(on=False, moe_router_enable_vl_bias=True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["gpt", "hybrid"])
def test_padding_that_a_model_is_told_counts_in_no_loss_of_a_router(kind: str) -> None:
    """Megatron's scripts tell none."""
    from tests.dist import logged_losses
    from tests.dist.blocks import wrong

    use_groups()
    found = []
    of_stock, recipe = configuration(kind), configuration(kind)
    switch_on(recipe, degree=2)
    tokens = torch.arange(2 * LENGTH).view(2, -1) % VOCABULARY
    positions = torch.arange(LENGTH).expand(2, -1)
    weights = None
    for one in (of_stock, recipe):
        logged_losses.clear()
        model, _ = gradients(one, weights)
        weights = weights or model
        model.zero_grad()
        logged_losses.clear()
        model(tokens, positions, None, labels=tokens, padding_mask=positions >= LENGTH // 2).sum().backward()
        losses = {name: value.clone() for name, value in logged_losses.by_name().items()}
        found.append(losses | {name: value.grad for name, value in model.named_parameters()})
    assert any("router" in name for name in found[0]) and any("load_balancing" in name for name in found[0])
    assert wrong(*found, 1e-5) == {}


@pytest.mark.ranks(1)
def test_what_the_switch_of_a_process_does_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    use_groups()
    construct, signature = GPTModel.__init__, inspect.signature(GPTModel.__init__)
    switch_on_models(degree=1)
    assert GPTModel.__init__ is construct
    with pytest.raises(BadInput, match="--ampipe-degree 0: must be a whole number"):
        switch_on_models(degree=0)
    switch_on_models(degree=4)
    assert inspect.signature(GPTModel.__init__) == signature, "frameworks read it"
    with pytest.raises(BadInput, match="degree 2: AMPipe is switched on in this process already"):
        switch_on_models(degree=2)
    dense = transformer_config()
    dense.num_moe_experts = None
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    model = GPTModel(dense, spec, VOCABULARY, LENGTH, position_embedding_type="rope")
    assert layers_of(model) == {"TransformerLayer"}
    assert "AMPipe: a GPTModel has no MoE layers, and stays as it is" in capsys.readouterr().out
    verl(on=False)
    assert "AMPipe: the layers of a GPTModel are pipelined, degree 4" in capsys.readouterr().out
    config = transformer_config()
    with pytest.raises(BadInput, match="--position-embedding-type mrope"):
        GPTModel(config, block_spec(config), VOCABULARY, LENGTH, position_embedding_type="mrope")


@pytest.mark.ranks(1)
def test_modules_that_a_patch_adds_to_a_layer_are_refused() -> None:
    """slime patches Megatron: a norm after attention and after the experts, for GLM-4."""
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

    from megatron_ampipe.layers.layer import pipelined

    use_groups()

    @dataclasses.dataclass
    class Patched(TransformerLayerSubmodules):
        post_mlp_layernorm: Any = IdentityOp

    spec = block_spec(transformer_config())
    context = recipes._context(recipes._run(degree=2))
    for layer in spec.layer_specs:
        layer.submodules = Patched(**vars(layer.submodules))
    assert pipelined(spec, context) is not spec
    spec.layer_specs[1].submodules.post_mlp_layernorm = torch.nn.LayerNorm
    with pytest.raises(BadInput, match="layer post_mlp_layernorm: the layer specification has a module"):
        pipelined(spec, context)


def test_an_old_megatron_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl 0.7.0 is made for 0.13."""
    monkeypatch.setattr(compat, "found_version", lambda name: Version("0.13.1"))
    for switch in (switch_on_models, lambda degree: switch_on(bridge_recipe(), degree=degree)):
        with pytest.raises(EnvironmentMissing, match=r"0\.13\.1 is too old"):
            switch(degree=4)
