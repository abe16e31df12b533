"""Features with random numbers are reproducible and have stock's distribution."""

import dataclasses
import math
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.cases import ATTENTION_AGAIN, AUX, Case
from tests.dist.worker import empty_is_nan

pytestmark = pytest.mark.ranks(2)

DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.1, "moe_router_topk": 2, **AUX}
JITTER = {"moe_input_jitter_eps": 0.1, "moe_router_topk": 2}
NUM_DRAWS = 150


def passes(layer: Any, case: Case, *, seed: int = 7) -> dict[str, Tensor]:
    """One forward and backward from a given random state."""
    from tests.dist.blocks import run

    return run(layer, case, rank=torch.distributed.get_rank(), seed=seed)


def checkpoint(layer: Any) -> None:
    """Let a layer run under Megatron's checkpoint."""
    from megatron.core import tensor_parallel

    forward = layer.forward

    def run(hidden: Tensor) -> Any:
        return forward(hidden_states=hidden, attention_mask=None)

    layer.forward = lambda hidden_states, **_: tensor_parallel.checkpoint(run, False, hidden_states)


@pytest.mark.parametrize("model", [DROPOUT, DROPOUT | ATTENTION_AGAIN, JITTER])
def test_the_same_seed_gives_the_same_random_numbers(model: dict[str, Any]) -> None:
    """Also under Megatron's recompute."""
    from tests.dist.blocks import build_layers, differences

    case = Case("random", kernel="sdpa", model=model)
    _, ours = build_layers(case)
    first = passes(ours, case)
    assert max(differences(first, passes(ours, case)).values()) == 0
    assert differences(first, passes(ours, case, seed=8))["output"] > 1e-3
    checkpoint(ours)
    assert max(differences(first, passes(ours, case)).values()) <= 1e-6


@pytest.mark.parametrize(
    "settings",
    [
        {"model": DROPOUT | {"moe_router_topk": 1, "moe_router_pre_softmax": True}},
        {"model": DROPOUT, "degree": 2, "backward_degree": 4},
        {"model": JITTER},
        {"model": AUX},
    ],
    ids=["dropout", "two degrees", "input jitter", "no random numbers"],
)
def test_layers_that_are_recomputed_in_their_schedule_give_the_same_bits(settings: dict[str, Any]) -> None:
    """Uninitialized memory is NaN: the combine does not run again, and nothing may need its values."""
    from tests.dist.blocks import build_layers, differences

    plain = Case("stack", kernel="sdpa", layers="mdm", stack=0, **settings)
    results = []
    for case in (plain, dataclasses.replace(plain, recompute=math.inf)):
        _, ours = build_layers(case)
        with empty_is_nan():
            results.append(passes(ours, case))
    assert set(differences(*results).values()) == {0.0}


def test_dropout_has_the_same_mean_as_stock() -> None:
    """Root mean square of the difference of two means, in units of its standard error: 1 if they agree.

    Wrong scaling or masking would change every element.
    """
    from tests.dist.blocks import build_layers

    model = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
    case = Case("mean", kernel="exact", sequence_length=16, model=model)
    stock, ours = (
        torch.stack([passes(layer, case, seed=100 + draw)["output"] for draw in range(NUM_DRAWS)])
        for layer in build_layers(case)
    )
    error = ((stock.var(0) + ours.var(0)) / NUM_DRAWS).clamp_min(1e-12).sqrt()
    assert statistics.fmean((((stock.mean(0) - ours.mean(0)) / error) ** 2).flatten().tolist()) ** 0.5 < 1.3
