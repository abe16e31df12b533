"""What of pipelined blocks is captured as CUDA graphs, and why the rest runs without one.

Megatron's flags name modules. Without modules, Megatron captures whole layers: here whole passes, if their
sizes do not depend on the routing (``--ampipe-rows fixed``) and no flag forbids it, else what single stages
allow. That is judged stage by stage: a stage that needs something else in every pass than its input tensors,
or random numbers from a generator that no graph can hold, runs without a graph, and so do all stages where
nothing else is possible. Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megatron_ampipe.block.hybrid_pattern import stages_of
from megatron_ampipe.block.megatron_settings import Arguments
from megatron_ampipe.block.settings import AUTO
from megatron_ampipe.launch.environment import Parsed, packs_documents, reads_masks, waits_for_stage
from megatron_ampipe.schedule import KEEP, Exchange, Pipeline, StageKind, kinds
from megatron_ampipe.schedule.features import balances, fp8_recipe, has_capacity

MAMBA = "mamba"
"""The module whose graphs stay Megatron's."""
WHOLE_LAYERS = "full"
"""In place of modules: Megatron would capture layers as a whole."""
_WITH_EXPERTS = (WHOLE_LAYERS, "moe")
_MOE_MODULES = ("moe_router", "moe_preprocess")


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStages:
    """What the flags for CUDA graphs come to.

    Attributes:
        modules: The values of ``--cuda-graph-modules`` of which a stage is captured; ``full`` alone for whole
            passes.
        left_out: Kinds of stages of these modules that run without a graph.
        stages: The names of the stages that are captured, in the order of a block; empty for whole passes.
        keeps_mamba: Whether Megatron captures its Mamba layers.
        notes: What runs without a graph, or stays Megatron's, each with the reason.
        no_passes: Where graphs of whole passes are asked for and there are none: the flag, and why.
    """

    modules: frozenset[str] = frozenset()
    left_out: frozenset[StageKind] = frozenset()
    stages: str = ""
    keeps_mamba: bool = False
    notes: tuple[tuple[str, str], ...] = ()
    no_passes: str | None = None

    @property
    def of_passes(self) -> bool:
        """Whether a graph is a whole pass."""
        return self.modules == {WHOLE_LAYERS}

    @property
    def is_empty(self) -> bool:
        """Whether nothing is captured."""
        return not self.modules and not self.keeps_mamba


@dataclass(frozen=True, slots=True)
class _Rule:
    """Stages that run without a graph under a condition."""

    kinds: frozenset[StageKind]
    reason: str
    """With the flag."""
    applies: Callable[[Arguments], object]


@dataclass(frozen=True, slots=True)
class _PassRule:
    """A condition under which no graph is a whole pass."""

    reason: str
    """With the flag, at its beginning."""
    applies: Callable[[Arguments], object]


_ALL = frozenset().union(*kinds.GRAPH_MODULES.values())
_ATTENTION = frozenset({kinds.QKV, kinds.ATTENTION})
_ROUTED = frozenset({kinds.ROUTE, kinds.MERGE})
"""``merge`` reads what ``route`` leaves on the device."""
_LINEAR = frozenset({kinds.QKV, kinds.ATTENTION, kinds.SHARED, kinds.MLP})
"""With linear layers."""


def _recomputes(*modules: str) -> Callable[[Arguments], bool]:
    """A check whether any of these is recomputed."""

    def is_recomputed(args: Arguments) -> bool:
        is_selective = args.recompute_granularity == "selective"
        return is_selective and not {*modules}.isdisjoint(args.recompute_modules or ())

    return is_recomputed


def _is_set(name: str) -> Callable[[Arguments], bool]:
    """A check whether an argument is neither absent nor 0."""
    return lambda args: bool(getattr(args, name))


def _is_in_fp8(args: Arguments) -> bool:
    return fp8_recipe(args) is not None


def _is_latent_in_fp8(args: Arguments) -> bool:
    return bool(args.moe_latent_size) and _is_in_fp8(args)


def _splits_weights(args: Arguments) -> bool:
    name = args.ampipe_schedule
    return bool(name) and Pipeline.of(1, schedule=name).splits_weights


def _drops_by_probability(args: Arguments) -> bool:
    return has_capacity(args) and args.moe_token_drop_policy != "position"


def _has_custom_wire(args: Arguments) -> bool:
    return args.ampipe_wire not in (None, "bf16", "fp8")


def _has_memory_strategy(args: Arguments) -> bool:
    return args.ampipe_memory not in (None, KEEP, AUTO)


def _shares_ranks(args: Arguments) -> bool:
    return (args.tensor_model_parallel_size or 1) > 1


_FIXED = "fixed"
_ATTENTION_DROPOUT = "--attention-dropout draws random numbers"
_HIDDEN_DROPOUT = "--hidden-dropout draws random numbers"
_JITTER = "--moe-input-jitter-eps draws random numbers"
_SFT = "--sft: sequences have other documents in every pass"
_PACKED = "--dataloader-inter-document-masking: sequences have other documents in every pass"
_MASKED = "--reset-attention-mask: masks differ in every pass"
_ROUTER = "--ampipe-router: a custom class may do something else in every pass"
_RECORDED = "--ampipe-routing-dir: hooks record the routing, and a replay runs none"
_PASS_RULES = (
    _PassRule(_ATTENTION_DROPOUT, _is_set("attention_dropout")),
    _PassRule(_HIDDEN_DROPOUT, _is_set("hidden_dropout")),
    _PassRule(_JITTER, _is_set("moe_input_jitter_eps")),
    _PassRule(
        "--moe-router-force-load-balancing draws random numbers", _is_set("moe_router_force_load_balancing")
    ),
    _PassRule(_SFT, _is_set("sft")),
    _PassRule(_PACKED, packs_documents),
    _PassRule(_MASKED, reads_masks),
    _PassRule(_ROUTER, _is_set("ampipe_router")),
    _PassRule(_RECORDED, _is_set("ampipe_routing_dir")),
    _PassRule("--ampipe-wire: a custom class may do something else in every pass", _has_custom_wire),
    _PassRule("--moe-router-load-balancing-type: the host reads how balanced experts are", balances),
    _PassRule(
        "--moe-token-drop-policy probs: the tokens of all chunks are compared before any is dropped",
        _drops_by_probability,
    ),
    _PassRule("--ampipe-memory: whole passes are captured with all activations", _has_memory_strategy),
)
"""Settings without graphs of whole passes, but with graphs of the stages that :data:`_RULES` leave."""
_QUANTIZED = "--fp8-format: weights are quantized into other memory in every step"
_SENT_INSIDE = "--tensor-model-parallel-size: their linear layers exchange rows with other ranks"
_SCORES = ": attention collects its largest scores in every pass"
_RULES = (
    _Rule(
        _ALL,
        "--use-megatron-fsdp: parameters are in other memory in every pass",
        _is_set("use_megatron_fsdp"),
    ),
    _Rule(
        _ALL,
        "--recompute-granularity full: the backward pass runs them again",
        lambda args: args.recompute_granularity == "full",
    ),
    _Rule(_LINEAR, _QUANTIZED, _is_in_fp8),
    _Rule(_ROUTED, _QUANTIZED, _is_latent_in_fp8),
    _Rule(_ATTENTION, _SFT, _is_set("sft")),
    _Rule(_ATTENTION, _PACKED, packs_documents),
    _Rule(_ATTENTION, _MASKED, reads_masks),
    _Rule(frozenset({kinds.ATTENTION}), _ATTENTION_DROPOUT, _is_set("attention_dropout")),
    _Rule(frozenset({kinds.ATTENTION}), f"--qk-clip{_SCORES}", _is_set("qk_clip")),
    _Rule(
        frozenset({kinds.ATTENTION}),
        f"--log-max-attention-logit{_SCORES}",
        _is_set("log_max_attention_logit"),
    ),
    _Rule(
        frozenset({kinds.ATTENTION, kinds.ADD_NORM, kinds.MERGE, kinds.MLP}),
        _HIDDEN_DROPOUT,
        _is_set("hidden_dropout"),
    ),
    _Rule(
        _ATTENTION,
        "--context-parallel-size: keys and values of other ranks arrive in the same stages",
        lambda args: (args.context_parallel_size or 1) > 1,
    ),
    _Rule(
        _LINEAR,
        _SENT_INSIDE,
        lambda args: _shares_ranks(args) and args.transformer_impl not in (None, "local"),
    ),
    _Rule(_LINEAR - {kinds.ATTENTION}, _SENT_INSIDE, _shares_ranks),
    _Rule(
        _ROUTED,
        "--moe-expert-capacity-factor: a chunk has what earlier chunks leave of the capacity",
        has_capacity,
    ),
    _Rule(_ROUTED, "--moe-router-load-balancing-type: experts are chosen for all chunks at once", balances),
    _Rule(_ROUTED, _JITTER, _is_set("moe_input_jitter_eps")),
    _Rule(
        _ROUTED,
        "--moe-router-force-load-balancing: graphs can hold the generators of --te-rng-tracker alone",
        lambda args: args.moe_router_force_load_balancing and not args.te_rng_tracker,
    ),
    _Rule(
        _ROUTED,
        "--moe-enable-routing-replay reads or records choices in every pass",
        _is_set("moe_enable_routing_replay"),
    ),
    _Rule(_ROUTED, "--moe-routing-trace-path records every pass", _is_set("moe_routing_trace_path")),
    _Rule(
        _ROUTED,
        "--moe-expert-rank-capacity-factor: the dispatcher has one budget for all chunks",
        _is_set("moe_expert_rank_capacity_factor"),
    ),
    _Rule(_ROUTED, _RECORDED, _is_set("ampipe_routing_dir")),
    _Rule(_ROUTED, _ROUTER, _is_set("ampipe_router")),
    _Rule(_ROUTED, "--ampipe-condense: other tokens are sent in every pass", _is_set("ampipe_condense")),
    _Rule(
        _ROUTED,
        "--ampipe-exchange: rows are packed by rank or node",
        lambda args: args.ampipe_exchange not in (None, Exchange.ROWS),
    ),
    # A stage that runs again, or in two parts; ``runtime.graphs`` finds these in a tape too.
    _Rule(_LINEAR, "--ampipe-schedule: gradients of weights are separate stages", _splits_weights),
    _Rule(frozenset({kinds.QKV}), "--recompute-modules mla_up_proj", _recomputes("mla_up_proj")),
    _Rule(frozenset({kinds.ATTENTION}), "--recompute-modules core_attn", _recomputes("core_attn")),
    _Rule(frozenset({kinds.SHARED}), "--recompute-modules shared_experts", _recomputes("shared_experts")),
    _Rule(frozenset({kinds.SHARED}), "--recompute-modules moe", _recomputes("moe")),
    _Rule(frozenset({kinds.MLP}), "--recompute-modules mlp", _recomputes("mlp")),
    _Rule(
        frozenset({kinds.ATTENTION, kinds.ADD_NORM, kinds.ROUTE, kinds.SHARED, kinds.MERGE}),
        "--recompute-modules layernorm: the output of the norm is dropped and computed again",
        _recomputes("layernorm"),
    ),
)


def captured_modules(args: Parsed) -> tuple[str, ...]:
    """The modules that Megatron's flags ask to capture as CUDA graphs; empty without CUDA graphs."""
    if getattr(args, "cuda_graph_impl", None) not in ("local", "transformer_engine"):
        return ()
    # The name in this version of Megatron, and those in older ones.
    names = ("cuda_graph_modules", "cuda_graph_scope_deprecated", "cuda_graph_scope")
    given = [value for name in names if (value := getattr(args, name, None))]
    first: object = given[0] if given else WHOLE_LAYERS
    modules: list[object] = first if isinstance(first, list) else [first]
    return tuple(str(getattr(module, "name", module)) for module in modules)


def asks_for_passes(args: Parsed) -> bool:
    """Whether graphs of whole passes are asked for: Megatron's graphs of whole layers, with fixed rows."""
    return _has_fixed_rows(args) and captured_modules(args) == (WHOLE_LAYERS,)


def captures_passes(args: Parsed) -> bool:
    """Whether a CUDA graph is a whole pass."""
    return asks_for_passes(args) and _no_passes(Arguments(args)) is None


def captured_stages(arguments: Parsed) -> CapturedStages:
    """What is captured of pipelined blocks with these arguments, parsed and validated."""
    args, named = Arguments(arguments), captured_modules(arguments)
    if not named:
        return CapturedStages()
    if captures_passes(args):
        return CapturedStages(modules=frozenset({WHOLE_LAYERS}))
    has_fixed_rows = _has_fixed_rows(args)
    modules = {name for name in named if name in kinds.GRAPH_MODULES}
    if WHOLE_LAYERS in named:
        modules |= kinds.GRAPH_MODULES.keys()
    elif "moe" in named:
        modules |= {*_MOE_MODULES}
    wanted = frozenset().union(*(kinds.GRAPH_MODULES[name] for name in modules))
    reasons = {kind: reason for kind in wanted if (reason := _reason(args, kind)) is not None}
    present = wanted - _absent(args)
    captured = frozenset(name for name in modules if kinds.GRAPH_MODULES[name] & present - reasons.keys())
    notes = [
        (_names(kind for kind in present if reasons.get(kind) == reason), reason)
        for reason in dict.fromkeys(reasons[kind] for kind in kinds.MOE_BLOCK if kind in reasons)
    ]
    if not {*_WITH_EXPERTS}.isdisjoint(named):
        why = "their number of rows changes, and a graph has a fixed one"
        if has_fixed_rows:
            why = "only graphs of whole passes have them"
        notes.append(("experts, transfers", why))
    has_mamba = _has_mamba(args) and not {MAMBA, WHOLE_LAYERS}.isdisjoint(named)
    if has_mamba and has_fixed_rows:
        notes.append((MAMBA, "--ampipe-rows fixed: Megatron's graphs were not tried with steps that repeat"))
    return CapturedStages(
        modules=captured,
        left_out=frozenset(reasons),
        stages=_names(present - reasons.keys()),
        keeps_mamba=has_mamba and not has_fixed_rows,
        notes=tuple((names, reason) for names, reason in notes if names),
        no_passes=_no_passes(args) if named == (WHOLE_LAYERS,) else None,
    )


def _has_fixed_rows(args: Parsed) -> bool:
    return getattr(args, "ampipe_rows", None) == _FIXED


def _no_passes(args: Arguments) -> str | None:
    """Why no graph is a whole pass, where no modules are named; None if graphs can be."""
    if not _has_fixed_rows(args):
        return "--ampipe-rows exact: numbers of rows change, and a graph has fixed ones"
    return next((rule.reason for rule in _PASS_RULES if rule.applies(args)), None)


def no_partner(args: Parsed) -> str | None:
    """Why passes cannot run together with those of another micro-batch; None if they can."""
    if waits_for_stage(args):
        return "a pipeline stage without virtual stages waits for the next stage before every backward pass"
    if getattr(args, "use_megatron_fsdp", None):
        return "Megatron-FSDP gathers parameters for one pass at a time"
    if not captures_passes(args) and not captured_stages(args).is_empty:
        return "a CUDA graph is a part of one pass"
    return None


def _has_mamba(args: Arguments) -> bool:
    return "M" in "".join(stages_of(args) or ())


def _absent(args: Arguments) -> set[StageKind]:
    """The kinds that no block of the model has."""
    absent: set[StageKind] = set()
    if args.moe_shared_expert_intermediate_size is None:
        absent.add(kinds.SHARED)
    if not _shares_ranks(args):
        absent.add(kinds.INPUT_NORM)
    if args.hybrid_layer_pattern is None:
        if not _shares_ranks(args):
            absent.add(kinds.ADD_NORM)
        if args.moe_layer_freq in (None, 1):
            absent.add(kinds.MLP)
    return absent


def _reason(args: Arguments, kind: StageKind) -> str | None:
    """Why stages of a kind run without a graph; None if they do not."""
    stage_kinds = {kind, kinds.NEEDED_IN_GRAPHS.get(kind, kind)}
    return next((rule.reason for rule in _RULES if stage_kinds & rule.kinds and rule.applies(args)), None)


def _names(stage_kinds: Iterable[StageKind]) -> str:
    """The names of kinds, in the order of a block."""
    named = {*stage_kinds}
    return " ".join(kind.name for kind in kinds.MOE_BLOCK if kind in named)
