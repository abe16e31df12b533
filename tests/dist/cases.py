"""The block configurations that are held against the stock Megatron layer, as data.

Read by the tests (one test per case) and by the worker processes (all cases of a launch).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """One comparison of a stock layer with an AMPipe layer built beside it from the same weights.

    ``model`` overrides fields of Megatron's ``TransformerConfig``.
    """

    name: str
    world_size: int = 2
    degree: int = 4
    schedule: str = "ampipe"
    executor: str = "thread"
    kernel: str = "exact"
    sequence_length: int = 32
    batch: int = 1
    rope: bool = False
    only_losses: bool = False
    """Give the output a gradient of zero, so that nothing but the router's losses flows back."""
    training: bool = True
    model: dict[str, Any] = field(default_factory=dict)


AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
SEQ_AUX = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1}
GLOBAL_AUX = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1}
SEVERAL_AUX = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.1, 0.2, 0.3],
}
Z = {"moe_z_loss_coeff": 0.1}
TIGHT = {"moe_expert_capacity_factor": 0.6, "moe_token_drop_policy": "position"}
LOOSE = {"moe_expert_capacity_factor": 1.25, "moe_token_drop_policy": "position"}

PARITY = [
    *(
        Case(f"degree{degree}-{schedule}-{executor}", degree=degree, schedule=schedule, executor=executor)
        for degree in (1, 2, 3, 4, 8)
        for schedule in ("ampipe", "moe-only", "sequential")
        for executor in ("sequential", "thread")
    ),
    *(Case(f"kernel-{kernel}", kernel=kernel) for kernel in ("sdpa", "cpu-flash")),
    *(
        Case(f"kernel-{kernel}-gqa", kernel=kernel, batch=3, model={"num_query_groups": 2})
        for kernel in ("exact", "sdpa", "cpu-flash")
    ),
    *(
        Case(f"top{topk}-{name}", model={"moe_router_topk": topk, **losses})
        for topk in (1, 2)
        for name, losses in {
            "aux": AUX,
            "seq-aux": SEQ_AUX,
            "global-aux": GLOBAL_AUX,
            "z": Z,
            "aux-z": AUX | Z,
            "several": SEVERAL_AUX | Z,
        }.items()
    ),
    *(
        Case(
            f"only-{name}-batch{batch}", only_losses=True, batch=batch, model={"moe_router_topk": 2, **losses}
        )
        for batch in (1, 3)
        for name, losses in {
            "aux": AUX,
            "seq-aux": SEQ_AUX,
            "global-aux": GLOBAL_AUX,
            "z": Z,
            "several": SEVERAL_AUX | Z,
        }.items()
    ),
    Case("only-aux-degree8", degree=8, only_losses=True, model=AUX | Z),
    *(
        Case(
            f"capacity-{name}-top{topk}-batch{batch}",
            batch=batch,
            model={"moe_router_topk": topk, **capacity},
        )
        for name, capacity in {"tight": TIGHT, "loose": LOOSE}.items()
        for topk in (1, 2)
        for batch in (1, 3)
    ),
    Case("capacity-aux-z", model=TIGHT | AUX | Z | {"moe_router_topk": 2}),
    Case("capacity-degree8-moe-only", degree=8, schedule="moe-only", model=TIGHT),
    *(
        Case(
            f"length{length}-degree{degree}-batch{batch}", sequence_length=length, degree=degree, batch=batch
        )
        for length, degree, batch in ((33, 4, 1), (31, 3, 3), (9, 8, 1), (8, 8, 3), (5, 4, 1))
    ),
    Case("rope", rope=True, kernel="cpu-flash"),
    Case(
        "rope-gqa-swiglu-rms",
        rope=True,
        kernel="cpu-flash",
        batch=3,
        model={
            "num_query_groups": 2,
            "gated_linear_unit": True,
            "activation_func": "silu",
            "normalization": "RMSNorm",
            "moe_router_topk": 2,
            **AUX,
        },
    ),
    Case("layernorm-bias", model={"normalization": "LayerNorm", "add_bias_linear": True}),
    Case("qk-layernorm", model={"qk_layernorm": True}),
    Case("shared", model={"moe_shared_expert_intermediate_size": 48, "moe_router_topk": 2}),
    Case(
        "shared-gate-moe-only",
        schedule="moe-only",
        model={
            "moe_shared_expert_intermediate_size": 48,
            "moe_shared_expert_gate": True,
        },
    ),
    Case(
        "sigmoid-expert-bias",
        model={
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk": 2,
        },
    ),
    Case("pre-softmax-top2", model={"moe_router_pre_softmax": True, "moe_router_topk": 2}),
    Case(
        "group-limited",
        model={
            "moe_router_num_groups": 2,
            "moe_router_group_topk": 1,
            "moe_router_topk": 2,
            "num_moe_experts": 8,
        },
    ),
    Case("one-expert-each", model={"num_moe_experts": 2}),
    Case("evaluation", training=False, model=AUX),
    Case("ep1", world_size=1, model=AUX | Z | {"moe_router_topk": 2}),
    Case("ep1-capacity", world_size=1, model=TIGHT),
    Case("ep1-sequential", world_size=1, schedule="sequential", executor="sequential", batch=3),
    Case("ep4", world_size=4, model=AUX | Z | {"moe_router_topk": 2}),
    Case("ep4-capacity-moe-only", world_size=4, schedule="moe-only", batch=3, model=TIGHT),
    Case("ep4-odd", world_size=4, degree=3, sequence_length=19),
]

BY_NAME = {case.name: case for case in PARITY}
assert len(BY_NAME) == len(PARITY), "two cases have one name"
