"""What stages save: the one decision, and the one place that executes it."""

import ast
import contextlib
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_ampipe
from megatron_ampipe.runtime.saved_tensors import RecomputedTensors
from megatron_ampipe.schedule import STRATEGIES, ExpertsSaved, RecomputeRequest, Saved, SavedPolicy, decide

RECOMPUTE = Saved.RECOMPUTE


@pytest.mark.parametrize(
    ("request_fields", "options", "changed"),
    [
        ({}, {}, {}),
        ({"full": True}, {}, {"block": RECOMPUTE}),
        # A recomputed block saves its input alone, so a strategy has nothing to leave out.
        ({"full": True}, {"memory": "redispatch"}, {"block": RECOMPUTE}),
        ({"input_norm": True}, {}, {"input_norm": RECOMPUTE}),
        ({"pre_mlp_norm": True}, {}, {"normed": RECOMPUTE}),
        ({"modules": {"core_attn"}}, {}, {"core_attention": RECOMPUTE}),
        # The steps of ring attention recompute anyway.
        ({"modules": {"core_attn"}}, {"uses_ring": True}, {}),
        ({"modules": {"moe_act"}}, {}, {"activation": RECOMPUTE}),
        ({"modules": {"moe_act", "moe"}}, {}, {"stages": {"expert", "shared"}}),
        ({"modules": {"shared_experts"}}, {}, {"stages": {"shared"}}),
        ({"modules": {"mlp"}}, {}, {"stages": {"mlp"}}),
        # Of a stage that runs again as a whole, nothing else is dropped.
        ({"modules": {"mla_up_proj"}, "input_norm": True}, {}, {"stages": {"qkv"}}),
        ({}, {"memory": "keep/keep"}, {}),
        ({}, {"memory": "keep/S1"}, {"experts": (STRATEGIES["keep"], STRATEGIES["offload"])}),
        ({}, {"memory": "S2"}, {"experts": (ExpertsSaved(Saved.RESEND, Saved.HOST),)}),
    ],
)
def test_flags_decide_the_policy(
    request_fields: dict[str, Any], options: dict[str, Any], changed: dict[str, Any]
) -> None:
    assert decide(RecomputeRequest(**request_fields), **options) == SavedPolicy()._replace(**changed)


def test_every_way_is_used_and_no_strategy_is_twice_there() -> None:
    assert len({*STRATEGIES.values()}) == len(STRATEGIES)
    assert {way for saved in STRATEGIES.values() for way in saved} == {*Saved}


OF_LAYERS = {"DroppedOutput", "ExpertTensors", "InnerTensors", "RecomputedTensors"}
"""What stage functions may be given."""
TYPES = {"LinearOutput"}
"""What they may name in annotations."""


def drops_by_itself(code: str) -> Iterator[str]:
    """What in the code of a layer drops an activation, other than through an object that it is given."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module == "megatron_ampipe.runtime.saved_tensors":
            yield from (alias.name for alias in node.names if alias.name not in OF_LAYERS | TYPES)
        elif isinstance(node, ast.ImportFrom) and node.module == "torch.utils.checkpoint":
            yield node.module
        elif isinstance(node, ast.Attribute) and node.attr == "saved_tensors_hooks":
            yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in OF_LAYERS:
            yield f"{node.func.id}()"


@pytest.mark.parametrize("package", ["layers", "exchange", "attention"])
def test_what_is_not_saved_is_executed_in_one_place(package: str) -> None:
    files = sorted((Path(megatron_ampipe.__file__).parent / package).glob("*.py"))
    assert files
    assert {file.name: found for file in files if (found := [*drops_by_itself(file.read_text())])} == {}


def test_a_layer_that_drops_by_itself_is_found() -> None:
    code = """
from torch.utils.checkpoint import checkpoint
from megatron_ampipe.runtime.saved_tensors import DroppedOutput, not_saving
with torch.autograd.graph.saved_tensors_hooks(drop, unpack):
    output = DroppedOutput().compute(norm, rows)
"""
    assert sorted(drops_by_itself(code)) == [
        "DroppedOutput()", "not_saving", "saved_tensors_hooks", "torch.utils.checkpoint",
    ]  # fmt: skip


def attend(rows: Tensor, weight: Tensor) -> Tensor:
    """Saves its inputs, views of them, and a mask that it draws."""
    scores = (rows @ weight.t()).tanh().exp()
    mask = torch.rand_like(scores) > 0.3
    return (scores * mask) @ weight


def test_what_a_function_saves_is_dropped_and_computed_again_once() -> None:
    rows, weight = (torch.randn(shape, requires_grad=True) for shape in ((6, 4), (5, 4)))
    before = torch.get_rng_state()
    output = attend(rows, weight)
    expected = torch.autograd.grad(output.square().sum(), [rows, weight])
    torch.set_rng_state(before)
    runs: list[weakref.ref[Any]] = []

    def watched(*inputs: Tensor) -> Tensor:
        inside = inputs[0] @ inputs[1].t()
        runs.append(weakref.ref(inside.untyped_storage()))
        return attend(*inputs)

    @contextlib.contextmanager
    def same_random_states() -> Iterator[None]:
        now = torch.get_rng_state()
        torch.set_rng_state(before)
        yield
        torch.set_rng_state(now)

    saved = RecomputedTensors()
    found_output = saved.run(watched, rows, weight, within=same_random_states)
    assert torch.equal(found_output, output)
    drawn = torch.get_rng_state()
    found = torch.autograd.grad(found_output.square().sum(), [rows, weight])
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert len(runs) == 2 and torch.equal(torch.get_rng_state(), drawn)


def test_what_is_dropped_is_freed() -> None:
    alive: list[weakref.ref[Any]] = []

    def double(rows: Tensor) -> Tensor:
        wide = rows.repeat(1, 8).exp()
        alive.append(weakref.ref(wide.untyped_storage()))
        return wide.sum(dim=1).sin()

    rows = torch.randn(6, 4, requires_grad=True)
    output = RecomputedTensors().run(double, rows)
    gc.collect()
    assert alive[0]() is None, "the graph keeps what it must not save"
    output.sum().backward()
    gc.collect()
    assert [one() for one in alive] == [None, None]


def test_a_second_run_that_differs_is_an_error() -> None:
    turns = iter((1, 2))

    def changing(rows: Tensor) -> Tensor:
        return rows.exp() if next(turns) == 1 else rows[:2].exp()

    output = RecomputedTensors().run(changing, torch.randn(3, requires_grad=True))
    with pytest.raises(AssertionError, match="a second run saved"):
        output.sum().backward()
