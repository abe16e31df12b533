"""The block configurations that are compared with the stock Megatron layer, as data.

Read by the tests (one test per case) and by the worker processes (all cases of a launch).
"""

import math
from dataclasses import dataclass, field
from typing import Any

from megatron_ampipe.schedule import KEEP, Exchange, Partner, Pipeline, from_text


@dataclass(frozen=True)
class Case:
    """One comparison of a stock layer with an AMPipe layer that has the same weights.

    ``model`` overrides fields of Megatron's ``TransformerConfig``.
    """

    name: str
    world_size: int = 2
    degree: int = 4
    backward_degree: int | None = None
    shares: tuple[float, ...] | None = None
    schedule: str = "ampipe"
    order: str = ""
    """An order of the stages in place of the named one."""
    executor: str = "thread"
    kernel: str | None = "exact"
    """The kernel of attention; None for the one that a user would get."""
    sequence_length: int = 32
    batch: int = 1
    rope: bool = False
    only_losses: bool = False
    """Use a zero gradient for the output, so that only the router's losses have gradients."""
    training: bool = True
    model: dict[str, Any] = field(default_factory=dict)
    stack: int = 1
    """How many layers share a schedule; 0 for all."""
    layers: str = "m"
    """The layers, one after the other: ``m`` with experts, ``d`` dense, ``g`` with experts after a gated
    delta net."""
    recompute: float = 0
    """How many layers are recomputed as a whole inside the schedule."""
    memory: str = KEEP
    """What the experts keep; other values than the default are also compared with it, bit by bit."""
    documents: tuple[tuple[int, ...], ...] = ()
    """For each sequence of the micro-batch the first row of each document; none for whole sequences."""
    transformer_engine: bool = False
    """The layers are Transformer Engine's."""
    engine: str = ""
    """Stand-ins of Transformer Engine's linear layers: ``linear``, ``grouped`` for the experts' too, or
    ``experts`` for theirs alone."""
    whole_down: bool = False
    """Latent attention projects down as with Transformer Engine: each tensor-parallel rank its rows, with all
    columns. With Megatron's local layers the key of the positions gets a wrong gradient there."""
    padded: bool = False
    """Some rows are padding (Megatron's ``padding_mask``)."""
    masked: bool = False
    """Separate the documents by a mask; otherwise they are packed."""
    exchange: Exchange = Exchange.ROWS
    partner: Partner | None = None
    ranks_per_node: int | None = None
    """Of all ranks, for an exchange in two hops."""
    router: str | None = None
    wire: str | None = None
    condense: float | None = None
    fixed_rows: bool = False
    """The state of ``--ampipe-rows fixed``; a test learns its budgets."""
    capacity_scope: str = "sequence"
    """As the flags of AMPipe with these names; the stock layer is made to compute the same."""
    replay: str | None = None
    """What Megatron's routing replay does: ``record``, ``replay_forward``, or ``replay_backward`` for passes
    that run again after ``replay_forward``. A forward hook of each router looks on."""
    stock: dict[str, Any] = field(default_factory=dict)
    """Overrides ``model`` in the stock layer."""
    parallel: dict[str, int] = field(default_factory=dict)
    """Sizes of Megatron's process groups; if empty, all ranks are expert-parallel."""

    @property
    def group_sizes(self) -> dict[str, int]:
        """Of Megatron's process groups."""
        return self.parallel or {"expert_model_parallel_size": self.world_size}

    @property
    def is_packed(self) -> bool:
        """Whether documents are packed: Megatron's own local attention does not take them."""
        return bool(self.documents) and not self.masked

    @property
    def pipeline(self) -> Pipeline:
        """What the AMPipe layer runs."""
        return Pipeline.of(
            self.degree,
            backward_degree=self.backward_degree,
            shares=self.shares,
            schedule=self.schedule,
            stack=self.stack,
            memory=self.memory,
            # A case that was sent to another process has it as text.
            exchange=Exchange(self.exchange),
            order=from_text(self.order) if self.order else None,
            partner=self.partner,
        )


def selective(*modules: str) -> dict[str, Any]:
    """Megatron's settings with which it recomputes these modules."""
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
SEQ_AUX = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1}
GLOBAL_AUX = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1}
SEVERAL_AUX = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.1, 0.2, 0.3],
}
Z = {"moe_z_loss_coeff": 0.1}
LOSSES = {"aux": AUX, "seq-aux": SEQ_AUX, "global-aux": GLOBAL_AUX, "z": Z, "several": SEVERAL_AUX | Z}
TOP2 = {"moe_router_topk": 2}
GQA = {"num_query_groups": 2}
SWIGLU = {"gated_linear_unit": True, "activation_func": "silu"}
MOE_AGAIN = selective("moe")
ATTENTION_AGAIN = selective("core_attn")
SHARED = {"moe_shared_expert_intermediate_size": 48}
BIASED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_topk": 2}
TIGHT = {"moe_expert_capacity_factor": 0.6, "moe_token_drop_policy": "position"}
LOOSE = {"moe_expert_capacity_factor": 1.25, "moe_token_drop_policy": "position"}
ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
LARGE = AUX | Z | TOP2 | SWIGLU
LATENT = {
    "multi_latent_attention": True, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4, "v_head_dim": 8, "rope_type": "rope", "qk_layernorm": True,
}  # fmt: skip
YARN = {**LATENT, "q_lora_rank": None, "qk_layernorm": False, "rope_type": "yarn"}

TP = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "expert_model_parallel_size": 2}
TP_EXPERTS = {
    "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2, "expert_model_parallel_size": 1,
}  # fmt: skip
TP_EXPERTS_EP = {**TP_EXPERTS, "expert_model_parallel_size": 2}
CP = {"context_parallel_size": 2, "expert_model_parallel_size": 2}
CP4 = {"context_parallel_size": 4, "expert_model_parallel_size": 4}
TP_CP = {**TP, "context_parallel_size": 2}
GRAPH_MODULES = ("attn", "moe_router", "moe_preprocess", "mlp")
"""What CUDA graphs may hold."""
UNEQUAL = (0.45, 0.3, 0.15, 0.1)
UNIFORM = math.inf
IN_MDM = {"layers": "mdm", "stack": 0}
RECOMPUTED = IN_MDM | {"recompute": UNIFORM}
TWO_DEGREES = {"degree": 2, "backward_degree": 4}
SEQUENTIAL = {"schedule": "sequential", "executor": "sequential"}


def cases(prefix: str, common: dict[str, Any], table: dict[str, dict[str, Any]]) -> list[Case]:
    """A case for each row of a table: the rest of its name, and what differs from ``common``."""
    return [Case(prefix + name, **common | settings) for name, settings in table.items()]


PARITY = [
    *(
        Case(f"degree{degree}-{schedule}-{executor}", degree=degree, schedule=schedule, executor=executor)
        for degree in (1, 2, 3, 4, 8)
        for schedule in ("ampipe", "moe-only", "sequential")
        for executor in ("sequential", "thread")
    ),
    *(
        Case(f"length{rows}-degree{degree}-batch{batch}", sequence_length=rows, degree=degree, batch=batch)
        for rows, degree, batch in ((33, 4, 1), (31, 3, 3), (9, 8, 1), (8, 8, 3), (5, 4, 1))
    ),
    *(Case(f"top2-{name}", model=TOP2 | losses) for name, losses in LOSSES.items()),
    *(
        Case(f"only-{name}-batch3", only_losses=True, batch=3, model=TOP2 | losses)
        for name, losses in LOSSES.items()
    ),
    # Reference kernels have the pieces that GPUs use: own and earlier keys separately, or together.
    *(
        Case(f"kernel-{kernel}-gqa", kernel=kernel, batch=3, rope="reference" in kernel, model=GQA)
        for kernel in ("exact", "sdpa", "cpu-flash", "reference-pieces", "reference-bottom-right")
    ),
    *cases("capacity-", {}, {
        "tight-top2-batch3": {"batch": 3, "model": TIGHT | TOP2},
        "aux-z": {"model": TIGHT | AUX | Z | TOP2},
        "padded": {"batch": 3, "model": TIGHT | LARGE | {"moe_pad_expert_input_to_capacity": True}},
    }),
    *cases("stack", {"layers": "mmm", "stack": 0}, {
        "2-degree4-ampipe-thread": {"stack": 2},
        "-ddmm": {"layers": "ddmm", "stack": 2},
        "-two-degrees": {"layers": "mdm", "degree": 2, "backward_degree": 4},
        "-shares": {"layers": "mm", "degree": 3, "shares": (0.5, 0.3, 0.2)},
        "-mla-yarn": {"layers": "mdm", "model": YARN | LARGE},
        "-mla-tp": {"layers": "mdm", "parallel": TP, "model": LATENT | LARGE},
        "-mla-tp-whole-down": {"layers": "mdm", "parallel": TP, "model": LATENT | LARGE, "whole_down": True},
        "-mla-cp": {"layers": "mdm", "parallel": CP, "model": LATENT | LARGE},
    }),
    Case(
        "stack-tp2-degree3-3", degree=3, layers="mdm", stack=0, batch=2, rope=True, sequence_length=36,
        parallel={"tensor_model_parallel_size": 2}, model=SEVERAL_AUX | Z,
    ),
    # Features of a model, each on its own.
    *cases("", {}, {
        "rope-gqa-swiglu-rms": {
            "rope": True, "kernel": "cpu-flash", "batch": 3,
            "model": GQA | LARGE | {"normalization": "RMSNorm"},
        },
        "rope-partial-interleaved": {"rope": True, "model": {"rotary_interleaved": True}},
        "layernorm-bias": {"model": {"normalization": "LayerNorm", "add_bias_linear": True}},
        "qk-layernorm": {"model": {"qk_layernorm": True}},
        "mqa": {"kernel": "cpu-flash", "rope": True, "model": {"num_query_groups": 1}},
        "window-tp": {"parallel": TP, "model": {"window_size": (9, 0)}},
        "fp32-residual": {"model": {"fp32_residual_connection": True}},
        "shared": {"model": SHARED | TOP2},
        "shared-gate-moe-only": {"schedule": "moe-only", "model": SHARED | {"moe_shared_expert_gate": True}},
        "scaling-factor": {
            "model": BIASED | SHARED
            | {
                "moe_router_topk": 4, "moe_router_topk_scaling_factor": 2.5, "num_moe_experts": 8,
                "moe_router_num_groups": 4, "moe_router_group_topk": 2,
            },
        },
        "router-fp64": {"model": TOP2 | AUX | Z | {"moe_router_dtype": "fp64"}},
        "per-token-loss": {"model": SEVERAL_AUX | Z | {"calculate_per_token_loss": True}},
        "one-expert-each": {"model": {"num_moe_experts": 2}},
        "evaluation": {"training": False, "model": AUX},
        "ep1": {"world_size": 1, "model": AUX | Z | TOP2},
        "ep4-capacity-moe-only": {"world_size": 4, "schedule": "moe-only", "batch": 3, "model": TIGHT},
        "ep4-odd": {"world_size": 4, "degree": 3, "sequence_length": 19},
        "allgather-ep-capacity": {"batch": 3, "model": LARGE | ALLGATHER | TIGHT},
        "allgather-tp-ep": {
            "world_size": 4, "parallel": TP_EXPERTS_EP, "batch": 3, "model": LARGE | ALLGATHER,
        },
    }),
    *cases("recompute-", {}, {
        "core-attn": {"kernel": "reference-pieces", "sequence_length": 31, "model": LARGE | ATTENTION_AGAIN},
        "moe": {"model": LARGE | SHARED | MOE_AGAIN},
        "moe-expert-bias": {"model": BIASED | MOE_AGAIN},
        "shared-experts": {"model": SHARED | selective("shared_experts")},
        "mla-up-proj": {"model": LATENT | selective("mla_up_proj", "core_attn")},
    }),
    # The executor for GPUs, on the host platform's streams: tests its issue order and its references.
    Case("cuda-executor-ampipe-degree8", executor="cuda", degree=8, model=LARGE),
    *cases("tp-", {"parallel": TP, "model": LARGE}, {
        "odd": {"degree": 3, "sequence_length": 26, "batch": 3},
        "capacity": {"batch": 3, "model": TIGHT | AUX},
        "shared-gqa": {"rope": True, "model": LARGE | SHARED | GQA},
        "losses-alone": {"only_losses": True, "model": SEVERAL_AUX | Z},
    }),
    *cases("cp-", {"parallel": CP, "model": LARGE}, {
        "reference-pieces": {"kernel": "reference-pieces", "rope": True, "batch": 3},
        "odd": {"degree": 3, "sequence_length": 28, "batch": 3},
        "gathered": {"rope": True, "batch": 3, "model": LARGE | {"cp_comm_type": "all_gather"}},
        "losses-alone": {"only_losses": True, "model": SEVERAL_AUX | Z},
    }),
    *cases("cp4-ring", {"world_size": 4, "parallel": CP4, "sequence_length": 48, "batch": 2, "rope": True}, {
        "": {"degree": 3, "kernel": "cpu-flash", "model": LARGE | GQA},
        "-gate-degree4-2": {
            "degree": 4, "backward_degree": 2, "kernel": "sdpa",
            "model": LARGE | GQA | {"attention_output_gate": True},
        },
    }),
    *cases("unequal-", {"shares": UNEQUAL, "model": LARGE}, {
        "odd-length": {"sequence_length": 31},
        "capacity": {"model": TIGHT | AUX, "batch": 3},
        "tp-cp": {"world_size": 4, "parallel": TP_CP, "rope": True},
    }),
    *cases("backward-degree", {"batch": 3, "model": LARGE | SHARED}, {
        f"{backward}-of-{degree}-ampipe": {"degree": degree, "backward_degree": backward}
        for degree, backward in ((4, 2), (2, 4), (4, 1), (1, 4), (3, 6))
    }),
    *cases("backward-degree4-of-2-", TWO_DEGREES | {"model": LARGE | SHARED}, {
        "moe-only": {"schedule": "moe-only", "batch": 3},
        "tp": {"parallel": TP, "rope": True},
        "cp": {"parallel": CP, "rope": True},
    }),
    *cases("custom-order-", {"schedule": "tests.schedules:interleaved", "model": LARGE | SHARED}, {
        "degree4-2-capacity": {"backward_degree": 2, "model": SEVERAL_AUX | TIGHT | SHARED},
        "stack-tp-cuda-executor": {"layers": "mdm", "stack": 0, "parallel": TP, "executor": "cuda"},
        "cp-unequal": {"parallel": CP, "rope": True, "shares": UNEQUAL},
    }),
    Case("backward-degree6-unequal", degree=3, backward_degree=6, shares=(0.5, 0.3, 0.2), model=LARGE),
    *cases("stack-recompute-", {"layers": "mmm", "stack": 0, "recompute": UNIFORM, "model": LARGE}, {
        "degree4-ampipe-thread": {},
        "degree2-sequential-sequential": SEQUENTIAL | {"degree": 2},
        "alone": {"layers": "m", "stack": 1},
        "dense-first": {"layers": "ddmm", "stack": 2},
        "block": {"layers": "mmmm", "recompute": 2},
        "losses-alone": {"only_losses": True, "model": SEVERAL_AUX | Z},
        "expert-bias": {"model": BIASED},
        "allgather": {"model": LARGE | TIGHT | ALLGATHER, "batch": 3},
        "tp-experts-ep": {"parallel": TP_EXPERTS_EP, "world_size": 4},
        "cp": {"parallel": CP, "rope": True},
        "cuda-executor": {"executor": "cuda", "layers": "mdm", "model": LARGE | TIGHT},
    }),
]  # fmt: skip

IN_STACK_ON_CUDA = {
    "layers": "mmm", "stack": 0, "degree": 6, "backward_degree": 3, "sequence_length": 37,
    "executor": "cuda", "model": LARGE | SEVERAL_AUX,
}  # fmt: skip
MEMORY = [
    Case(f"memory-{memory.replace('/', '-')}-{name}", memory=memory, **{"model": LARGE} | settings)
    for memory, name, settings in (
        ("rebuild", "thread", {}),
        ("rebuild/keep/redispatch", "sequential", SEQUENTIAL | {"degree": 3}),
        ("redispatch", "thread", {"model": LARGE | TIGHT | SHARED}),
        ("redispatch", "cuda-executor", {"schedule": "moe-only", "executor": "cuda", "batch": 3}),
        ("redispatch", "allgather", {"batch": 3, "model": LARGE | ALLGATHER}),
        ("redispatch", "tp-experts-ep", {"parallel": TP_EXPERTS_EP, "world_size": 4}),
        ("redispatch/keep/rebuild", "stack-cuda-executor", IN_STACK_ON_CUDA),
        ("offload", "thread", {"model": LARGE | TIGHT}),
        ("S2", "bias", {"model": LARGE | {"add_bias_linear": True}, "batch": 3}),
        ("offload/S2/S3/keep", "stack", IN_MDM | TWO_DEGREES),
    )
]

MANY = tuple(range(0, 29, 2)), (0, 1, 2, 3, 17, 31), (0, 5)
SINKS = {"softmax_type": "learnable"}
DOCUMENTS = cases("documents-", {"documents": MANY, "batch": 3, "rope": True, "kernel": "cpu-flash"}, {
    "three": {"documents": ((0, 9, 24),), "batch": 1, "model": LARGE},
    "many-batch3": {"degree": 3, "kernel": "reference-documents", "model": SEVERAL_AUX | TIGHT | GQA},
    "masked-batch3": {"masked": True, "kernel": "exact", "model": LARGE},
    "masked-not-in-windows": {
        "masked": True, "kernel": "sdpa", "rope": False, "layers": "mm", "stack": 0,
        "model": {"window_size": (5, 0), "window_attn_skip_freq": 2},
    },
    "tp-three-sequences": {"parallel": TP, "layers": "mm", "stack": 0, "model": SEVERAL_AUX},
    "tp-two-sequences-of-a-rank": {
        "documents": (*MANY, (0, 30)), "batch": 4, "parallel": TP, "model": SEVERAL_AUX | TIGHT,
    },
    "stack-recompute": RECOMPUTED | {"model": LARGE},
    "mla": {"rope": False, "kernel": "exact", "model": LATENT | LARGE},
    "window": {"rope": False, "kernel": "sdpa", "model": {"window_size": (5, 0)} | SINKS},
})  # fmt: skip

# Four local experts on two ranks: most rows have several copies.
WIDE = LARGE | {"num_moe_experts": 8, "moe_router_topk": 4}
ONCE_PER_RANK = cases("ranks-", {"exchange": Exchange.RANKS, "model": WIDE}, {
    "degree1": {"degree": 1},
    "two-degrees-shared": TWO_DEGREES | {"model": WIDE | SEVERAL_AUX | SHARED},
    "capacity-padded": {"model": WIDE | TIGHT | {"moe_pad_expert_input_to_capacity": True}, "batch": 3},
    "tp-experts-ep": {"parallel": TP_EXPERTS_EP, "world_size": 4, "degree": 3, "sequence_length": 38},
    "ep4": {"world_size": 4, "model": WIDE | TIGHT, "batch": 3},
    "recompute-moe": {"model": WIDE | MOE_AGAIN, "executor": "cuda"},
    "stack-recompute": RECOMPUTED,
    "redispatch": {"memory": "redispatch"},
})  # fmt: skip
TWO_NODES = {"world_size": 4, "ranks_per_node": 2}
OVER_NODES = {
    "two-degrees-shared": TWO_DEGREES | {"model": WIDE | SEVERAL_AUX | SHARED},
    "capacity-padded": {"model": WIDE | TIGHT | {"moe_pad_expert_input_to_capacity": True}, "batch": 3},
    "tp": {
        "parallel": TP | {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1},
        "schedule": "moe-only", "rope": True, "batch": 3,
    },
    "stack-recompute": RECOMPUTED | {"executor": "cuda"},
    "redispatch": {"memory": "redispatch"},
}  # fmt: skip
OF_FOUR = {"num_moe_experts": 4}
ONCE_PER_NODE = cases("nodes-", TWO_NODES | {"exchange": Exchange.NODES, "model": WIDE}, {
    "degree1": {"degree": 1, "batch": 3, "model": WIDE | OF_FOUR | {"moe_router_topk": 2}},
    **OVER_NODES,
    "two-degrees-shared": OVER_NODES["two-degrees-shared"] | {"wire": "tests.wires:HalvesWire"},
})  # fmt: skip
# Also what two hops of rows that are sent once refuse: one expert per token and rank, condensed tokens.
COPIES_OVER_NODES = cases("2dh-", TWO_NODES | {"exchange": Exchange.TWO_DIMENSIONAL, "model": WIDE}, {
    "degree1-one-expert": {"degree": 1, "batch": 3, "model": LARGE | OF_FOUR},
    "condense-fp8": {"condense": 0.3, "wire": "fp8", "degree": 2, "batch": 3},
    **OVER_NODES,
})  # fmt: skip

# Ranks that share an expert gather on the lane of the other transfers, and on two nodes on their own.
SHARES = {"parallel": TP_EXPERTS, "world_size": 2}
SHARES_ON_NODES = {"parallel": TP_EXPERTS_EP, **TWO_NODES}
OF_EIGHT = {
    "parallel": TP_EXPERTS | {"expert_model_parallel_size": 4}, "world_size": 8, "ranks_per_node": 4,
    "degree": 2, "model": WIDE,
}  # fmt: skip
GATHERED = cases("gathers-", {"model": LARGE}, {
    "two-degrees": SHARES | TWO_DEGREES | {"batch": 3, "model": LARGE | TIGHT},
    "rebuild-stack": SHARES | {"memory": "rebuild/S3/S2/offload", "layers": "mdm", "stack": 0},
    "lancet": SHARES | {"schedule": "lancet", "degree": 2, "exchange": Exchange.RANKS, "model": WIDE},
    "nodes-degree2": SHARES_ON_NODES | {"degree": 2, "schedule": "moe-only", "wire": "bf16"},
    "nodes-memory": SHARES_ON_NODES | {"memory": "redispatch/S3/S2/keep", "executor": "cuda"},
    "nodes-lancet": SHARES_ON_NODES | {"schedule": "lancet", "degree": 2, "memory": "rebuild"},
    "nodes-stack-recompute": SHARES_ON_NODES | RECOMPUTED,
    "and-handed-on": OF_EIGHT | {"exchange": Exchange.NODES, "memory": "redispatch"},
    "every-copy-handed-on": OF_EIGHT | {"exchange": Exchange.TWO_DIMENSIONAL, "memory": "rebuild"},
})  # fmt: skip

# Rows of tensor-parallel attention on their lane: with a bias, which is added once, and orders of all kinds.
BIAS = AUX | Z | {"moe_router_topk": 2, "normalization": "LayerNorm", "add_bias_linear": True}
OLD_ORDER = """\
schedule before degree 2
forward compute: qkv attention.0 attention.1 route.1 route.0 losses expert.0 expert.1 merge.0 merge.1
forward comm: counts.1 dispatch.1 counts.0 dispatch.0 combine.0 combine.1
backward compute: merge.1 merge.0 losses expert.1 expert.0 route.1 attention.1 route.0 attention.0 qkv
backward comm: combine.1 combine.0 dispatch.1 dispatch.0
"""
SCATTERED = cases("rows-", {"parallel": TP, "model": BIAS}, {
    "degree1-lancet": {"schedule": "lancet", "degree": 1},
    "degree8-two-degrees": {"degree": 8, "backward_degree": 2},
    "sequential": {"schedule": "sequential", "executor": "sequential", "shares": UNEQUAL},
    "order-from-before": {"degree": 2, "order": OLD_ORDER},
    "stack-lancet": {"schedule": "lancet", "layers": "mdm", "stack": 0, "rope": True, "degree": 3},
    "stack-memory": {"memory": "rebuild/S3/redispatch/keep", "layers": "mmm", "stack": 0},
    "stack-recompute": RECOMPUTED | {"backward_degree": 2},
    "gate": {"model": BIAS | {"attention_output_gate": True, "num_query_groups": 2}, "kernel": "sdpa"},
    "latent-lancet": {"schedule": "lancet", "model": LATENT | {"add_bias_linear": True}},
    "ring": {"parallel": TP_CP, "world_size": 4, "rope": True},
    "nodes": SHARES_ON_NODES | {"exchange": Exchange.RANKS, "degree": 3, "model": LARGE},
    "nodes-stack-cuda": SHARES_ON_NODES | {"layers": "mm", "stack": 0, "executor": "cuda", "model": LARGE},
    "nodes-of-whole-experts": {
        "parallel": TP | {"expert_model_parallel_size": 4}, **TWO_NODES, "exchange": Exchange.NODES,
    },
})  # fmt: skip

DROPS = {"moe_expert_capacity_factor": 0.6, "moe_token_drop_policy": "probs"}
# Stock Megatron takes a number of experts that varies with a capacity only; this one drops nothing.
ALL_KEPT = TIGHT | {"moe_expert_capacity_factor": 4.0}
GATES = [
    Case("gate-noisy", router="noisy-topk", batch=3, model=TOP2 | SEVERAL_AUX | Z),
    Case("gate-cosine-capacity", router="cosine", batch=3, model=TOP2 | TIGHT | SEVERAL_AUX | Z),
    Case("gate-cosine-tp-stack", router="cosine", parallel=TP, layers="mm", stack=0, model=TOP2 | AUX | Z),
    Case("gate-sigmoid", router="sigmoid", batch=3, model=TOP2 | SEVERAL_AUX | Z),
    Case("gate-forward-and-routing", router="tests.gates:ForwardRouter", model=TOP2 | SEVERAL_AUX | Z),
    Case("gate-varying-choice-dropless", router="tests.gates:ThresholdRouter", batch=3, stock=ALL_KEPT),
    Case("gate-expert-choice", router="tests.gates:ExpertChoiceOfEight", batch=3, stock=ALL_KEPT),
    Case("gate-degree1", router="cosine", degree=1, model=TOP2 | AUX),
    Case("gate-hash", router="hash", degree=2, backward_degree=4, batch=3, model=TOP2),
    Case("gate-hash-tp-stack", router="hash", parallel=TP, layers="mdm", stack=0, batch=3, recompute=UNIFORM),
    Case("gate-hash-tp-cp", router="hash", parallel=TP | CP, world_size=4, batch=2, rope=True, model=TOP2),
    Case("gate-hash-documents", router="hash", documents=MANY, batch=3, model=TOP2),
    Case("gate-ids-probs", router="tests.gates:BiasedByIdRouter", batch=3, model=TOP2 | DROPS | SEVERAL_AUX),
    Case("gate-ids-tp", router="tests.gates:BiasedByIdRouter", parallel=TP, batch=3, model=TOP2 | AUX | Z),
]

DELTA = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
DELTA_NETS = cases("delta-", {"layers": "gmg", "stack": 0, "model": LARGE | SHARED | DELTA}, {
    "two-degrees": TWO_DEGREES | {"batch": 3},
    "moe-only-capacity": {"schedule": "moe-only", "model": LARGE | TIGHT | DELTA},
    "probs": {"model": TOP2 | SWIGLU | DROPS | AUX | DELTA, "executor": "sequential"},
    "joined-one-layer": {"layers": "g", "stack": 1, "schedule": "joined"},
    "tp": {"parallel": TP, "schedule": "lancet"},
    "cp": {"parallel": CP},
    "memory": {"memory": "rebuild/S3/redispatch/keep", "executor": "cuda"},
    "recompute": {"recompute": UNIFORM},
    "recompute-modules": {"model": LARGE | DELTA | selective("layernorm", "moe")},
    "documents": {"documents": MANY, "batch": 3, "model": LARGE | SEQ_AUX | DELTA},
})  # fmt: skip

LANCET = cases("lancet-", {"schedule": "lancet", "degree": 1}, {
    "shared": {"batch": 3, "model": LARGE | SHARED | {"qk_layernorm": True}},
    "latent-recompute": {"model": LATENT | MOE_AGAIN},
    "stack-recompute": {"layers": "mmm", "stack": 0, "recompute": UNIFORM, "model": LARGE},
    "cp": {"parallel": CP, "rope": True, "degree": 2, "model": LARGE},
    "rebuild": {"memory": "rebuild", "degree": 2, "model": LARGE | {"add_bias_linear": True}},
}) + cases("lancet-joined", {"schedule": "joined"}, {
    "-shared": {"degree": 4, "backward_degree": 2, "batch": 3, "model": LARGE | SHARED},
    "-stack-tp2": {
        "degree": 2, "layers": "mm", "stack": 0, "rope": True, "parallel": TP, "recompute": UNIFORM,
        "model": LARGE,
    },
})  # fmt: skip

FLEX = {"moe_token_dispatcher_type": "flex"}
HYBRID = FLEX | {"moe_flex_dispatcher_backend": "hybridep"}
ALL_TO_ALL = {"moe_token_dispatcher_type": "alltoall"}
FLEXES = cases("flex-", {"stock": ALL_TO_ALL}, {
    "degree4-2-ampipe": {"backward_degree": 2, "batch": 3, "model": LARGE | FLEX | SHARED},
    "hybridep-degree8-None-ampipe": {"degree": 8, "batch": 3, "model": LARGE | HYBRID},
    "of-stock-flex": {"model": LARGE | FLEX, "stock": {}},
    "cuda-executor-recompute": {"executor": "cuda", "model": LARGE | FLEX | MOE_AGAIN},
    "hybridep-cuda-executor-recompute": {"executor": "cuda", "model": LARGE | HYBRID | MOE_AGAIN},
    "ep4": {"world_size": 4, "model": LARGE | FLEX},
    "capacity": {"model": TIGHT | AUX | FLEX | {"moe_router_topk": 2}},
    "tp-experts": {"parallel": TP_EXPERTS, "model": LARGE | FLEX},
    "stack-recompute": RECOMPUTED | {"model": LARGE | FLEX},
    "memory": {"memory": "rebuild/S3/offload/keep", "model": LARGE | FLEX | SHARED},
    "hybridep-memory": {
        "memory": "offload/keep/rebuild/S3", "degree": 2, "backward_degree": 4, "executor": "cuda",
        "model": LARGE | HYBRID,
    },
    "hybridep-of-stock": {"model": LARGE | HYBRID | {"moe_permute_fusion_into_hybridep": True}, "stock": {}},
    "hybridep-capacity-tp-experts": {
        "parallel": TP_EXPERTS,
        "model": TIGHT | AUX | HYBRID
        | {"moe_router_topk": 2, "moe_pad_expert_input_to_capacity": True},
    },
})  # fmt: skip

NCCL_EP = FLEX | {"moe_flex_dispatcher_backend": "ncclep", "moe_expert_rank_capacity_factor": 2.0}
NOT_NCCL_EP = ALL_TO_ALL | {"moe_flex_dispatcher_backend": "deepep", "moe_expert_rank_capacity_factor": None}
FLEXES += cases("flex-ncclep-", {"stock": NOT_NCCL_EP, "model": LARGE | NCCL_EP}, {
    "degree2": {"degree": 2},
    "degree4-2-shared": {"backward_degree": 2, "batch": 3, "model": LARGE | NCCL_EP | SHARED},
    "ep4": {"world_size": 4, "shares": (0.6, 0.4), "degree": 2},
    # Both use one context, so both have one factor.
    "of-stock": {"model": NCCL_EP | {"moe_expert_rank_capacity_factor": 4.0}, "stock": {}},
    "cuda-executor-recompute": {"executor": "cuda", "model": LARGE | NCCL_EP | MOE_AGAIN},
    "stack-recompute": RECOMPUTED | {"model": LARGE | NCCL_EP},
    "memory": {"memory": "rebuild/S3/offload/keep"},
    "tp-experts-lancet": {"parallel": TP_EXPERTS, "schedule": "lancet", "degree": 2},
})  # fmt: skip

# The fused kernels refuse to choose no row. Compared with a stock layer without them.
FUSED = {"moe_permute_fusion": True, "num_moe_experts": 8}
NOT_FUSED = {"moe_permute_fusion": False}
# Of an early chunk, the experts have no capacity left for the last; of a short one, some rank gets no row.
USED_UP = {"moe_expert_capacity_factor": 0.3, "moe_token_drop_policy": "position"}
PERMUTED = cases("fused-", {"degree": 8, "stock": NOT_FUSED}, {
    "permutation": {"sequence_length": 8, "model": FUSED | {"moe_router_topk": 2}},
    "capacity-recompute": {"layers": "mm", "stack": 0, "recompute": UNIFORM, "model": FUSED | USED_UP | AUX},
    "ranks-capacity": {"exchange": Exchange.RANKS, "model": FUSED | USED_UP | {"moe_router_topk": 4}},
    "allgather": {"sequence_length": 8, "model": FUSED | ALLGATHER},
    "flex": {"sequence_length": 8, "model": FUSED | FLEX, "stock": NOT_FUSED | ALL_TO_ALL},
})  # fmt: skip

FUSED_ROUTER = TOP2 | SEVERAL_AUX | Z | {"moe_router_fusion": True}
PERMUTED += [Case("fused-router-several", model=FUSED_ROUTER, stock={"moe_router_fusion": False})]

# Against a stock layer that is made to compute the same, in a simple way (changed_functions.py).
CHANGED = [
    Case("wire-halves-two-degrees", wire="tests.wires:HalvesWire", degree=2, backward_degree=4, layers="mm",
         stack=0, model=WIDE, recompute=UNIFORM),
    Case("wire-fp8", wire="fp8", model=WIDE | AUX | SHARED),
    Case("condense-batch3-fp8", condense=0.3, wire="fp8", degree=2, batch=3, model=TOP2 | SEVERAL_AUX),
    Case("condense-all-equal", condense=1.0, shares=(0.6, 0.4), degree=2, model=WIDE),
    *(
        Case(f"capacity-of-chunks-{policy}", capacity_scope="chunk", degree=2, batch=2, executor="sequential",
             model=TOP2 | {"moe_expert_capacity_factor": 0.7, "moe_token_drop_policy": policy})
        for policy in ("probs", "position")
    ),
    Case("condense-stack-recompute-wire", condense=0.25, wire="tests.wires:HalvesWire", degree=2,
         layers="mm", stack=0, recompute=UNIFORM, model=TOP2),
]  # fmt: skip

# What other launches have: GPT-OSS (sinks, windows), Qwen3-Next (gate), Nemotron 3 (latent experts).
LATENT_EXPERTS = {"moe_latent_size": 16, "moe_shared_expert_intermediate_size": 48, "moe_router_topk": 2}
SINKHORN = {"moe_router_load_balancing_type": "sinkhorn"}
QUANTILE = {"moe_router_load_balancing_type": "quantile_balancing"}
LAUNCHES = cases("", {"batch": 3}, {
    "gate-of-attention-sinks": {
        "kernel": "sdpa", "rope": True, "parallel": TP, "layers": "mm", "stack": 0,
        "model": SINKS | GQA | {"attention_output_gate": True},
    },
    "sinks-off-by-one-window-cp": {
        "parallel": CP, "batch": 1, "rope": True,
        "model": {"softmax_type": "off-by-one", "window_size": (5, 0)},
    },
    "latent-experts-tp": {"parallel": TP, "memory": "redispatch", "model": LATENT_EXPERTS | SEVERAL_AUX},
    "latent-experts-stack-recompute": RECOMPUTED | {
        "batch": 1,
        "model": LATENT_EXPERTS | {"moe_shared_expert_intermediate_size": None, "add_bias_linear": True},
    },
    "capacity-padded-expert-bias": {"model": LOOSE | BIASED | {"moe_pad_expert_input_to_capacity": True}},
    "choice-sinkhorn-two-degrees": TWO_DEGREES | {"model": SINKHORN | Z | SHARED},
    "choice-quantile-stack-recompute": RECOMPUTED | {"model": QUANTILE | TOP2},
    "choice-quantile-cp": {"parallel": CP, "rope": True, "schedule": "moe-only", "model": QUANTILE},
    "choice-probs-padded": {"model": BIASED | DROPS | {"moe_pad_expert_input_to_capacity": True}},
    "choice-probs-sequential-ranks": SEQUENTIAL
    | {"exchange": Exchange.RANKS, "model": WIDE | DROPS | SEVERAL_AUX},
    "losses-negative": {"model": TOP2 | {"moe_z_loss_coeff": -0.1}},
    "padding-losses": {"padded": True, "degree": 3, "model": TOP2 | SEVERAL_AUX | Z},
    "padding-losses-alone": {"padded": True, "only_losses": True, "model": TOP2 | SEVERAL_AUX | Z},
    "padding-expert-bias-stack-recompute": RECOMPUTED | {"padded": True, "model": BIASED | SEQ_AUX},
    "padding-expert-bias-capacity-ranks": {
        "padded": True, "exchange": Exchange.RANKS, "model": WIDE | BIASED | TIGHT | Z,
    },
    "padding-cp": {"padded": True, "parallel": CP, "rope": True, "model": LARGE},
    "padding-tp": {"padded": True, "parallel": TP, "model": LARGE},
    "padding-tp-stack": {
        "padded": True, "parallel": TP, "layers": "mm", "stack": 0, "model": TOP2 | SEVERAL_AUX,
    },
    "padding-sinkhorn": {"padded": True, "model": SINKHORN | Z},
    "replay-recorded": {"replay": "record", "layers": "mm", "stack": 0, "model": TOP2 | SEVERAL_AUX},
    "replay-prescribed": {
        "replay": "replay_forward", "parallel": TP, "layers": "mm", "stack": 0, "batch": 1, "model": TOP2,
    },
    "replay-recorded-stack-recompute": RECOMPUTED | {"replay": "record", "model": LARGE},
    "replay-prescribed-stack-recompute": RECOMPUTED | {"replay": "replay_forward", "model": LARGE},
})  # fmt: skip


def again(*modules: str, **model: Any) -> dict[str, Any]:
    """Those of :func:`selective`, and others that go with them."""
    # torch's RMSNorm is several operations, whose gradients are then added in another order.
    others = {"moe_grouped_gemm": "moe_act" in modules, "normalization": "LayerNorm"}
    return selective(*modules) | others | model


AGAIN = cases("again-", {"batch": 3, "rope": True}, {
    "moe-act": {"model": LARGE | again("moe_act")},
    "moe-act-bias-degree2": TWO_DEGREES | {"model": TIGHT | again("moe_act", add_bias_linear=True)},
    "moe-act-stack-joined": IN_MDM
    | {"schedule": "joined", "executor": "cuda", "model": LARGE | again("moe_act")},
    "moe-act-memory": {"memory": "keep/rebuild/keep/S3", "model": LARGE | again("moe_act")},
    "moe-act-core-attn-tp": {"parallel": TP, "model": LARGE | again("moe_act", "core_attn")},
    "moe-act-tp-experts-ep": {"world_size": 4, "parallel": TP_EXPERTS_EP, "model": LARGE | again("moe_act")},
    "moe-act-moe": {"model": LARGE | again("moe_act", "moe")},
    "layernorm": {"model": LARGE | SHARED | again("layernorm")},
    "layernorm-rms": {"model": LARGE | SHARED | again("layernorm", normalization="RMSNorm")},
    "layernorm-degree2-bias": TWO_DEGREES | {"model": TIGHT | again("layernorm", add_bias_linear=True)},
    "layernorm-moe-only-cuda": {
        "schedule": "moe-only", "executor": "cuda", "model": LARGE | SHARED | again("layernorm"),
    },
    "layernorm-joined-stack": IN_MDM
    | {"schedule": "joined", "backward_degree": 2, "model": LARGE | again("layernorm")},
    "layernorm-stack-tp": IN_MDM | {"parallel": TP, "model": LARGE | SHARED | again("layernorm")},
    "layernorm-redispatch": {
        "memory": "redispatch/keep/S2/rebuild", "model": LATENT_EXPERTS | TIGHT | again("layernorm"),
    },
    "layernorm-moe-stack": {
        "layers": "mm", "stack": 0, "executor": "cuda",
        "model": LARGE | SHARED | again("layernorm", "moe"),
    },
    "every-module-mla": {
        "layers": "dmm", "stack": 0, "rope": False,
        "model": LATENT | LARGE | SHARED
        | again("layernorm", "moe_act", "mla_up_proj", "shared_experts", "mlp", "core_attn"),
    },
})  # fmt: skip
"""Selective recompute of parts of stages. Also compared with the same layer without it, bit by bit."""

# Compared in test_fixed_rows.py, which learns the budgets first.
BIASED_EXPERTS = LARGE | {"normalization": "LayerNorm", "add_bias_linear": True}
FIXED_ROWS = cases("fixed-", {"fixed_rows": True, "model": LARGE}, {
    "degree2": {"degree": 2},
    "degree4-batch3": {"batch": 3},
    "moe-only-shared": {"schedule": "moe-only", "model": LARGE | SHARED},
    "two-degrees": TWO_DEGREES,
    "ep4-degree2": {"world_size": 4, "degree": 2},
    "ep4-degree4": {"world_size": 4, "batch": 3, "model": LARGE | {"num_moe_experts": 8}},
    "ep1": {"world_size": 1},
    "one-expert-each": {"model": {"num_moe_experts": 2}},
    "bias": {"model": BIASED_EXPERTS},
    "capacity": {"batch": 3, "model": TIGHT | LARGE},
    "probs-on-input": {"model": {"moe_apply_probs_on_input": True}},
    "odd-ffn": {"model": LARGE | {"moe_ffn_hidden_size": 13}},
    "stack2": {"layers": "mm", "stack": 0},
    "stack-dense": {"layers": "mdm", "stack": 0, "degree": 2},
    "stack-recompute": RECOMPUTED,
    "recompute-moe": {"model": LARGE | SHARED | MOE_AGAIN},
    "lancet": {"schedule": "lancet", "degree": 2},
    "lancet-uncut": {"schedule": "lancet", "degree": 1, "model": BIASED_EXPERTS},
    "joined-odd-ffn": {"schedule": "joined", "degree": 2, "model": LARGE | {"moe_ffn_hidden_size": 13}},
    "stack-lancet": {"schedule": "lancet", "layers": "mm", "stack": 0},
    "tp": {"parallel": TP},
    "cp": {"parallel": CP, "rope": True},
    "wire": {"wire": "tests.wires:HalvesWire", "degree": 2},
    "cuda-executor": {"executor": "cuda", "layers": "mm", "stack": 0},
    "memory": {"memory": "keep/rebuild/redispatch/S3", "model": LARGE | SHARED},
    "memory-stack-lancet-cuda": IN_MDM
    | {"schedule": "lancet", "memory": "offload/S2/rebuild/S3", "executor": "cuda"},
    "moe-act": {"batch": 3, "model": LARGE | again("moe_act")},
    "layernorm-moe": {"model": LARGE | SHARED | again("layernorm", "moe")},
    "latent": {"batch": 3, "model": LATENT_EXPERTS | AUX | Z},
    "tp-experts": {"parallel": TP_EXPERTS} | TWO_DEGREES,
    "tp-experts-ep-memory": {"world_size": 4, "parallel": TP_EXPERTS_EP, "memory": "redispatch/keep/S3/S2"},
    "tp-experts-ep-stack": RECOMPUTED | {"world_size": 4, "parallel": TP_EXPERTS_EP},
    "tp-experts-lancet": {"parallel": TP_EXPERTS, "schedule": "lancet", "degree": 2},
    "engine-degree2": {"engine": "grouped", "degree": 2, "model": LARGE | SHARED},
    "engine-ep1": {"engine": "grouped", "world_size": 1, "batch": 3},
    "engine-ep4-bias": {"engine": "grouped", "world_size": 4, "degree": 2, "model": BIASED_EXPERTS},
    "engine-stack-recompute": RECOMPUTED | {"engine": "grouped"},
    "engine-moe-act": {"engine": "grouped", "batch": 3, "model": LARGE | again("moe_act")},
    "engine-probs-on-input": {"engine": "grouped", "model": {"moe_apply_probs_on_input": True}},
    "engine-memory": {
        "engine": "grouped", "memory": "keep/rebuild/redispatch/S3", "model": LARGE | SHARED,
    },
    "engine-stack-lancet-memory": IN_MDM
    | {"engine": "grouped", "schedule": "lancet", "memory": "offload/S2/rebuild/S3", "executor": "cuda"},
    "engine-joined-bias": {
        "engine": "grouped", "schedule": "joined", "degree": 2, "model": BIASED_EXPERTS,
    },
    "engine-tp-experts-lancet": {
        "engine": "experts", "parallel": TP_EXPERTS, "schedule": "lancet", "degree": 2,
    },
})  # fmt: skip

FIXED_HYBRID = cases("fixed-hybridep-", {"fixed_rows": True, "stock": ALL_TO_ALL, "model": LARGE | HYBRID}, {
    "degree2": {"degree": 2},
    "two-degrees-shared": TWO_DEGREES | {"batch": 4, "model": LARGE | HYBRID | SHARED},
    "ep4": {"world_size": 4, "model": LARGE | HYBRID | {"num_moe_experts": 8}},
    "one-expert-each": {"model": HYBRID | {"num_moe_experts": 2}},
    "bias-capacity": {"model": TIGHT | BIASED_EXPERTS | HYBRID},
    "probs-on-input": {"model": HYBRID | {"moe_apply_probs_on_input": True}},
    "stack-recompute": RECOMPUTED | {"model": LARGE | HYBRID},
    "recompute-moe-lancet": {"schedule": "lancet", "degree": 2, "model": LARGE | HYBRID | MOE_AGAIN},
    "memory-cuda": {
        "memory": "offload/keep/rebuild/S3", "executor": "cuda", "layers": "mm", "stack": 0,
    },
    "latent": {"model": LATENT_EXPERTS | HYBRID | AUX | Z},
    "tp-experts": {"parallel": TP_EXPERTS, "schedule": "moe-only"},
    "engine-lancet": {"engine": "experts", "schedule": "lancet", "degree": 2},
})  # fmt: skip
FIXED_ROWS += FIXED_HYBRID

PARITY += CHANGED + MEMORY + DOCUMENTS + GATES + LANCET + FLEXES
PARITY += ONCE_PER_RANK + ONCE_PER_NODE + COPIES_OVER_NODES + GATHERED + SCATTERED + LAUNCHES
PARITY += PERMUTED + AGAIN + DELTA_NETS
assert len({case.name for case in PARITY}) == len(PARITY), "two cases have the same name"
