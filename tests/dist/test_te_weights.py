"""Gradients of weights apart over stand-ins of Transformer Engine's layers, which delay them.

Compared with Megatron's layers over the same stand-ins, which do not (fp32): all gradients, also those that
are added to ``main_grad``.
"""

import itertools
from dataclasses import replace
from unittest import mock

import pytest

from megatron_ampipe.schedule import LISTED, Partner
from tests.dist.cases import ATTENTION_AGAIN, LARGE, LATENT, MOE_AGAIN, RECOMPUTED, SHARED, TP, Case, again
from tests.dist.worker import empty_is_nan

TOLERANCE = 1e-5
"""Relative difference; measured: 2e-6."""
BIAS = {"add_bias_linear": True, "normalization": "LayerNorm"}
CASES = {
    "lancet": {"schedule": "lancet", "degree": 1, "model": LARGE | SHARED},
    "lancet-bias": {"schedule": "lancet", "degree": 2, "model": LARGE | BIAS},
    "joined": {"schedule": "joined", "model": LARGE | SHARED, "executor": "cuda"},
    "joined-bias-two-degrees": {"schedule": "joined", "backward_degree": 2, "model": LARGE | BIAS},
    "stack": {"schedule": "lancet", "degree": 2, "layers": "mdm", "stack": 0, "model": LARGE | SHARED},
    "stack-joined-bias": {"schedule": "joined", "layers": "mdm", "stack": 0, "model": LARGE | BIAS},
    "stack-tp": {"schedule": "lancet", "layers": "mdm", "stack": 0, "parallel": TP, "model": LARGE | SHARED},
    "stack-recompute": RECOMPUTED | {"schedule": "lancet", "degree": 2, "model": LARGE | SHARED},
    "latent-recompute-moe": {"schedule": "lancet", "degree": 2, "model": LATENT | MOE_AGAIN},
    "recompute-attention": {"schedule": "joined", "degree": 2, "model": LARGE | ATTENTION_AGAIN},
    "recompute-moe-act": {
        "schedule": "lancet", "degree": 2,
        "model": LARGE | again("moe_act", bias_activation_fusion=True),
    },
    "recompute-layernorm": {"schedule": "joined", "degree": 2, "model": LARGE | again("layernorm")},
    "rebuild": {"schedule": "lancet", "degree": 2, "memory": "rebuild", "model": LARGE | BIAS},
    "partners": {
        "schedule": "lancet", "degree": 1, "layers": "mm", "stack": 0, "model": LARGE | SHARED,
        "partner": Partner(order=LISTED),
    },
    "partners-joined": {"schedule": "joined", "degree": 2, "model": LARGE, "partner": Partner()},
}  # fmt: skip


def case_of(name: str, engine: str, *, fused: bool) -> Case:
    case = Case(name, engine=engine, **{"batch": 3} | CASES[name])
    return replace(case, model=case.model | {"gradient_accumulation_fusion": fused})


@pytest.mark.parametrize(
    ("name", "engine", "fused"),
    [
        (name, engine, fused)
        for name in CASES
        for engine, fused in itertools.product(("linear", "grouped"), (False, True))
        if (engine == "linear") == fused or name in ("lancet", "partners")
    ],
)
@pytest.mark.ranks(2)
def test_equals_stock(name: str, engine: str, fused: bool) -> None:
    from megatron_ampipe.layers.block_modules import BlockModules
    from tests.dist.blocks import build_layers, wrong
    from tests.dist.micro_batches import NUM_MICROBATCHES, step
    from tests.te_linear_standin import delayed_products

    case = case_of(name, engine, fused=fused)
    # These layers exchange the rows inside.
    with mock.patch.object(BlockModules, "scatters_rows", False), empty_is_nan():
        stock, ours = build_layers(case)
        expected, found = step(stock, case), step(ours, case, partner=case.partner)
    assert wrong(expected, found, TOLERANCE) == {}
    assert not any(delayed_products(stock).values())
    delayed = delayed_products(ours)
    # The named orders have no stage for the weights of a dense layer.
    dense = [name for name in delayed if case.layers == "mdm" and "layers.1.mlp" in name]
    assert not any(delayed.pop(name) for name in dense)
    assert min(delayed.values()) >= NUM_MICROBATCHES


@pytest.mark.ranks(2)
def test_layers_that_cannot_delay_are_refused() -> None:
    from megatron_ampipe.errors import BadInput
    from tests.dist.blocks import build_layers, run
    from tests.te_linear_standin import Engine

    case = case_of("lancet", "grouped", fused=False)
    _, ours = build_layers(case)
    for module in ours.modules():
        if isinstance(module, Engine):
            del module.wgrad_store
    with pytest.raises(BadInput, match="--ampipe-schedule lancet: only the linear layers of"):
        run(ours, case)
