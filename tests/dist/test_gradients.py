"""One gradient per parameter and micro-batch, and one order of reductions on all ranks.

Other cases also equal the stock layer (fp32, two expert-parallel ranks, degree 4).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.gradients_worker import CASES, FROZEN
from tests.dist.launch import run_workers

TOLERANCE = 1e-5
"""Relative difference; measured: 5e-7."""
MICRO_BATCHES = 6
"""Micro-batches: two iterations of three."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("gradients")
    return run_workers("tests.dist.gradients_worker", list(CASES), world_size=2, folder=folder, timeout_s=280)


PLACED = ["placed", "placed-sharded-lancet", "placed-sharded-fp32"]
HANDED_OVER = [name for name in CASES if name.startswith("handed-over")]
HOOKED = ["parameter-hooks-thread", "parameter-hooks-sequential"]
OTHERWISE = {"twice", "layer-hooks", "same-products", "same-products-fused", *PLACED, *HANDED_OVER, *HOOKED}
"""Cases that compare something else, or bit by bit."""


@pytest.mark.parametrize("name", [name for name in CASES if name not in OTHERWISE])
def test_equals_stock(name: str, reports: list[dict[str, Any]]) -> None:
    for rank, results in enumerate(reports):
        result = results[name]
        assert "error" not in result, f"rank {rank}:\n{result['error']}"
        assert result["differences"]
        wrong = {key: value for key, value in result["differences"].items() if not value <= TOLERANCE}
        assert not wrong, f"rank {rank} differs from stock: {wrong}"


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("ddp")])
def test_ddp_sees_every_parameter_once_per_micro_batch(name: str, reports: list[dict[str, Any]]) -> None:
    for results in reports:
        result = results[name]
        assert len(result["fired"]) >= 8
        assert result["fired"] == {parameter: [1] * MICRO_BATCHES for parameter in result["fired"]}
        assert result["fired"] == result["stock fired"]
        # Query-key-value, projection, and two layers of two experts; of a dense layer its two layers.
        in_layers = 6 + 4 + 6 if "stack" in name else 6
        assert result["written by fused layers"] == (in_layers if "fused" in name else 0)


@pytest.mark.parametrize("name", ["same-products", "same-products-fused"])
def test_weight_gradients_apart_are_bitwise_the_same(name: str, reports: list[dict[str, Any]]) -> None:
    for results in reports:
        assert results[name]["unequal"] == []


@pytest.mark.parametrize("name", HANDED_OVER)
def test_a_gradient_is_handed_over_without_a_copy(name: str, reports: list[dict[str, Any]]) -> None:
    """Those of the experts, of the layers above the first, and what the node itself returns."""
    for results in reports:
        computed, found = results[name]["computed"], results[name]["found"]
        assert computed.keys() == found.keys()
        copied = [parameter for parameter, place in computed.items() if found[parameter] != place]
        assert copied == []


@pytest.mark.parametrize("name", PLACED)
def test_placed_reductions_give_the_same_gradients(name: str, reports: list[dict[str, Any]]) -> None:
    """Bit by bit; what is complete in time starts in a stage of the schedule, in one order on all ranks."""
    first, second = (results[name] for results in reports)
    assert first["begun"] == second["begun"]
    for result in (first, second):
        assert result["unequal"] == []
        assert result["fired"] == {parameter: [1] * MICRO_BATCHES for parameter in result["fired"]}
        # In the last micro-batch of the second and third iteration: in the first, Megatron counts hooks.
        in_turn = ["reduce-experts@2", "reduce@1", "reduce", "reduce-experts"]
        assert [where for where, _ in result["begun"]] == in_turn * 2
        assert sum(number for _, number in result["begun"]) >= 4


def test_a_second_backward_is_refused(reports: list[dict[str, Any]]) -> None:
    for results in reports:
        assert "differentiated twice" in results["twice"]["message"]


@pytest.mark.parametrize("which", FROZEN)
def test_frozen_parameters_get_no_gradient(which: str, reports: list[dict[str, Any]]) -> None:
    for results in reports:
        with_input, without = results[f"frozen-{which}"], results[f"frozen-{which}-constant-input"]
        assert with_input["requires"] == [True, True]
        assert without["requires"] == [not which.startswith("everything")] * 2
        # The output is always reported, the gradient of the input only if it is required.
        assert with_input["with gradient"] == without["with gradient"] + 1
        assert without["with gradient"] >= (1 if which.startswith("everything") else 2)


@pytest.mark.parametrize("executor", ["thread", "sequential"])
def test_gradients_of_a_layer_arrive_before_the_backward_of_the_layer_below_ends(
    executor: str, reports: list[dict[str, Any]]
) -> None:
    """So that Megatron reduces them while the layers below still compute. Each hook fires once.

    Those of experts, and of a dense MLP, arrive before the attention of the same layer is differentiated.
    """
    for results in reports:
        events = results[f"parameter-hooks-{executor}"]["events"]
        fired = [name for _, name, _ in events if name is not None]
        assert sorted(fired) == sorted(results[f"parameter-hooks-{executor}"]["parameters"])
        last_stage = {layer: place for place, (layer, name, _) in enumerate(events) if name is None}
        hooks: dict[tuple[int, bool], list[int]] = {}
        for place, (layer, name, _) in enumerate(events):
            if name is not None:
                is_early = "mlp." in name and "router" not in name and "norm" not in name
                hooks.setdefault((layer, is_early), []).append(place)
        for layer in (2, 1):
            assert last_stage[layer] < min(hooks[layer, False]), "a gradient that is not complete"
            assert max(hooks[layer, False]) < last_stage[layer - 1]
        for layer in (2, 1, 0):
            feed_forward, attention = (
                [place for place, (of, _, one) in enumerate(events) if of == layer and one in kinds]
                for kinds in (("expert", "mlp"), ("attention",))
            )
            assert max(feed_forward) < min(hooks[layer, True]), "a gradient that is not complete"
            assert max(hooks[layer, True]) < max(attention)


def test_hooks_on_layers_that_share_a_schedule_are_refused(reports: list[dict[str, Any]]) -> None:
    for results in reports:
        found = results["layer-hooks"]
        for message in found["refused"]:
            assert message.startswith("hook of layer 2 __main__."), message
            assert "layers that share a schedule run as one" in message and "--ampipe-stack 1" in message
        assert found["inside"] is None and found["allowed"] == [None] * 4


@pytest.mark.parametrize("name", ["no-grad", "no-grad-stack"])
def test_without_gradients_nothing_is_kept(name: str, reports: list[dict[str, Any]]) -> None:
    for results in reports:
        result = results[name]
        assert result["without"] == {"saved": 0, "alive": 0, "requires grad": False}
        assert min(result["with"].values()) > 0, "otherwise the check would find nothing in any case"
        assert result["left when the output is gone"] == 0, "a reference cycle holds the activations"


def test_the_routings_leave_experts_idle(reports: list[dict[str, Any]]) -> None:
    """Otherwise they would be compared on easy data only."""
    assert reports[1]["routed-rank-1-receives-nothing"]["idle experts"] == [0, 1]
    assert reports[0]["routed-one-expert-for-all"]["idle experts"] == [0, 1]
    assert reports[1]["routed-one-expert-for-all"]["idle experts"] == [1]
    assert reports[0]["routed-ranks-exchange-all"]["idle experts"] == []
