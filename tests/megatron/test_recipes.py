"""AMPipe switched on from Python: models equal stock ones, and wrong recipes are refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.recipes import switch_on
from tests.dist.launch import run_workers


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder: Path = tmp_path_factory.mktemp("recipes")
    return run_workers("tests.megatron.recipes_worker", [], world_size=2, folder=folder)


@pytest.mark.parametrize("name", ["gpt", "gpt-function", "hybrid", "hybrid-spec"])
def test_models_of_configurations_equal_stock(name: str, reports: list[Any]) -> None:
    for results in reports:
        result = results[name]
        assert result["switched off"]
        assert {"AMPipeTransformerLayer", "HybridAttentionLayer"} & set(result["layers"])
        assert any("router" in name for name in result["differences"])
        wrong = {name: value for name, value in result["differences"].items() if not value <= 1e-5}
        assert not wrong


def stock_layers(config: Any, vp_stage: int | None = None) -> str:
    return f"stage {vp_stage}"


def _model(**settings: Any) -> SimpleNamespace:
    known = {"transformer_layer_spec": stock_layers, "num_moe_experts": 4, "seq_length": 64}
    return SimpleNamespace(**known | settings)


def test_degree_1_changes_nothing() -> None:
    model = _model()
    switch_on(model, degree=1)
    assert model.transformer_layer_spec is stock_layers


def test_it_is_a_function_of_the_configuration_and_of_the_stage() -> None:
    """Megatron-Bridge's providers look at the signature to decide whether to pass the stage."""
    import inspect

    model = _model()
    switch_on(SimpleNamespace(model=model), degree=4)
    made = model.transformer_layer_spec
    assert list(inspect.signature(made).parameters)[:2] == ["model", "vp_stage"]
    assert made.keywords["given"] is stock_layers
    assert made.keywords["settings"]["degree"] == 4


@pytest.mark.parametrize(
    ("recipe", "settings", "expected"),
    [
        (_model(), {"degree": 65}, "--ampipe-degree 65: must be between 1 and"),
        (_model(num_moe_experts=None), {"degree": 4}, "--num-experts (not set)"),
        (_model(fp8="hybrid"), {"degree": 4}, "--fp8-format hybrid"),
        (
            SimpleNamespace(model=_model(), ddp=SimpleNamespace(use_megatron_fsdp=True)),
            {"degree": 4},
            "--use-megatron-fsdp",
        ),
        (SimpleNamespace(model=SimpleNamespace()), {"degree": 4}, "has neither transformer_layer_spec nor"),
    ],
)
def test_what_is_refused(recipe: Any, settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(BadInput) as refused:
        switch_on(recipe, **settings)
    assert expected in str(refused.value)


def test_twice_is_refused() -> None:
    model = _model()
    switch_on(model, degree=4)
    with pytest.raises(BadInput, match="switched on in it already"):
        switch_on(model, degree=2)
