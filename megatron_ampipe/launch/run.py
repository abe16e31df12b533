"""What a training run does: one record, from the flags and the files that they name to the first batch.

It is made in two steps, as Megatron's arguments are: :func:`requested` after they are parsed, and
:func:`~megatron_ampipe.launch.resolve.resolve` after they are validated. Files are read once. The
start-up table gets the record, hooks and layers get parts of it, and nobody Megatron's arguments.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_ampipe.block.settings import AUTO, SETTING, Given, Settings, check_given, given_settings
from megatron_ampipe.launch import config_files, connections
from megatron_ampipe.launch.captured import CapturedStages
from megatron_ampipe.launch.environment import PARTNER_FLAG, Environment, ranks_per_node
from megatron_ampipe.launch.refusals import offloads_experts
from megatron_ampipe.launch.trials import Planner
from megatron_ampipe.plan.block import Block
from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.schedule import (
    ALL_LAYERS,
    KEEP,
    BlockFeatures,
    Exchange,
    Partner,
    Pipeline,
    check_memory,
    chunk_strategies,
    parse_shares,
    parse_stack,
    stack_to_text,
)
from megatron_ampipe.schedule.pipeline import builds_layers, check_condense

DEFAULT_CHUNKS = 2
"""The degree where the user asks for an overlap and for no number of chunks."""
_SAME_EXCHANGES = "AMPipe schedules the same all-to-alls inside each micro-batch"
_OFFLOADING_FLAG = "--fine-grained-activation-offloading"
_SAME_WEIGHTS = "it delays weight gradients for an overlap that AMPipe replaces"
_SAME_ROWS = "experts pad the rows of each chunk themselves, as without this flag"
SWITCHED_OFF: Mapping[str, str] = {
    "--moe-shared-expert-overlap": "AMPipe schedules the shared experts itself",
    PARTNER_FLAG: "--ampipe-partner does the same; where it cannot run, and with --ampipe-degree auto or a "
    "plan, which say how all micro-batches run, the same all-to-alls are scheduled inside each",
    "--ep-overlap-early-attn-memory-release": _SAME_EXCHANGES,
    "--overlap-dispatch-backward-with-experts-wgrad": _SAME_WEIGHTS,
    "--delay-wgrad-compute": _SAME_WEIGHTS,
    "--moe-router-padding-for-quantization": _SAME_ROWS,
    "--moe-router-padding-for-fp8": _SAME_ROWS,
    "--tp-comm-overlap": (
        "its buffers have the size of a whole sequence; the same transfers follow or precede the products"
    ),
    _OFFLOADING_FLAG: "--ampipe-memory offload puts away all that experts keep, these modules included",
    "--fused-residual-rmsnorm": (
        "stages call the norm and the residual addition one after the other, with the same result"
    ),
}
"""Flags of Megatron that are switched off if layers are pipelined, with what AMPipe does instead. The run
computes the same function without them."""
RELAXES_MAX_CONNECTIONS_CHECK = "overlap_moe_expert_parallel_comm"
"""This argument is set for every pipelined run while Megatron validates its arguments. Megatron requires
``CUDA_DEVICE_MAX_CONNECTIONS=1`` for tensor or context parallelism on Hopper and older GPUs. If this overlap
of the all-to-alls is on, it only prints a warning, which is right for AMPipe's overlap too. ``resolve``
switches the argument off afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a training run does.

    :func:`~megatron_ampipe.launch.resolve.resolve` sets the pipeline and the fields after ``disabled_flags``.

    Attributes:
        settings: The values of all ``--ampipe-*`` flags. A saved plan that is read again counts as
            ``--ampipe-plan``.
        given: Names of the settings that the user gives, or a flag of Megatron that AMPipe replaces.
        pipeline: How blocks run at first. With one chunk, Megatron's own layers are built, unless
            ``--ampipe-degree auto`` can choose another pipeline later, or the exchange is not Megatron's.
        implied: Those of them that only a flag of Megatron asks for.
        no_partner: Why an implied partner is not possible, so that chunks are all that overlaps; else None.
        plan: The plan file, as it was read; None without.
        disabled_flags: The flags of :data:`SWITCHED_OFF` that were given.
        gate: The router class of ``--ampipe-router``; None for Megatron's own.
        environment: What surrounds the blocks; None before ``resolve``.
        block: The sizes of a block, for a plan, a planner or a memory budget; else None.
        features: What decides the stages of a block that has its own schedule, and of one that shares it; for
            a plan that is read or saved and for a custom schedule, else None.
        custom_orders: What the function of a custom schedule returns, as text; empty for a named schedule.
        planner: Chooses the pipeline for an input shape; None without ``--ampipe-cluster``.
        choice: The plan for the rows of this run, and why; None without a plan file and a planner.
        memory_reason: Why the memory strategy was chosen; None if the flags say it.
        in_one_chunk: Name of a further schedule that ``--ampipe-degree auto`` tries at degree 1.
        recomputed_layers: See ``AMPipeContext``.
        graphs: Which stages are captured as CUDA graphs.
        attention: The kernel of attention and why it was chosen; None where layers are Megatron's.
        adjustments: The changed flags of Megatron, each with the reason.
    """

    settings: Settings = field(default_factory=Settings)
    pipeline: Pipeline = field(default_factory=lambda: Pipeline.of(1))
    given: frozenset[str] = frozenset()
    implied: frozenset[str] = frozenset()
    no_partner: str | None = None
    plan: Plan | None = None
    disabled_flags: tuple[str, ...] = ()
    gate: type | None = None
    environment: Environment | None = None
    block: Block | None = None
    features: tuple[BlockFeatures, BlockFeatures] | None = None
    custom_orders: tuple[str, ...] = ()
    planner: Planner | None = None
    choice: Plan | None = None
    memory_reason: str | None = None
    in_one_chunk: str | None = None
    recomputed_layers: float = 0
    graphs: CapturedStages = field(default_factory=CapturedStages)
    attention: tuple[str, str] | None = None
    adjustments: Mapping[str, str] = field(default_factory=dict)

    @property
    def pipelined(self) -> bool:
        """Whether AMPipe's MoE layers are built rather than Megatron's own."""
        return builds_layers(self.settings, self.pipeline)

    @property
    def first_pipeline(self) -> Pipeline:
        """How blocks run in the first iteration."""
        return self.pipeline if self.choice is None else self.choice.pipeline

    @property
    def resolved_environment(self) -> Environment:
        """The environment of a resolved run."""
        assert self.environment is not None, "only in a resolved run"
        return self.environment

    @property
    def resolved_block(self) -> Block:
        """The block of a resolved run that is planned or compared with a plan."""
        assert self.block is not None, "only in a resolved run with a plan, a cluster or a budget"
        return self.block

    def decided_by(self, name: str) -> str:
        """What decides a setting: a flag, a plan, the planner, the first iterations, or a default."""
        setting = SETTING[name]
        if setting.in_plan and self.plan is not None:
            return "the plan"
        if setting.in_plan and self.settings.automatic and self.settings.cluster is not None:
            return "the planner"
        if name == "degree" and "chunks" in self.given:
            return SETTING["chunks"].flag
        if name in self.given:
            chooses = getattr(self.settings, name) == AUTO
            return "the first iterations" if chooses else setting.flag
        return "default"


def requested(args: argparse.Namespace) -> Run:
    """The run that parsed flags and the plan file ask for. Changes nothing.

    Raises:
        BadInput: a value or a file is wrong, or a flag has no effect.
    """
    config_files.refuse_unread(args)
    given = given_settings(args)
    check_given(given)
    plan = _read_plan(given)
    run = _run_of(given, plan)
    if not run.pipelined:
        return run
    disabled = overlaps_given(args)
    replaced: Given = {}
    if _OFFLOADING_FLAG in disabled:
        replaced["memory"] = "offload"
    is_open = given.get("degree") != AUTO and not {"plan", "save_plan"} & given.keys()
    no_partner = None
    if PARTNER_FLAG in disabled and is_open:
        no_partner = None if "partner" in given else _function_of_chunks(given)
        if no_partner is None:
            replaced["partner"] = True
    implied = frozenset(replaced.keys() - given.keys())
    given = {**given, **replaced}
    check_given(given)
    run = _run_of(given, plan, disabled=disabled)
    return replace(run, implied=implied, no_partner=no_partner)


def _function_of_chunks(given: Given) -> str | None:
    """Why passes with other chunks would be another function; None if they would not."""
    for name, value in given.items():
        setting = SETTING[name]
        if setting.of_chunks in (..., value):
            return f"with {setting.flag}, passes with a partner would be another function"
    return None


def without_partner(run: Run, reason: str) -> Run:
    """The run with chunks in place of an implied partner, which is not possible for this reason.

    It has the default number of chunks if the user gives none.
    """
    pipeline = replace(run.pipeline, partner=None)
    if not pipeline.overlaps and not {"degree", "chunks"} & run.given:
        pipeline = replace(pipeline, degree=DEFAULT_CHUNKS, backward_degree=DEFAULT_CHUNKS)
    return replace(
        run,
        settings=replace(run.settings, partner=False),
        pipeline=pipeline,
        given=run.given - {"partner"},
        implied=run.implied - {"partner"},
        no_partner=reason,
    )


def why_switched_off(run: Run, flag: str) -> str:
    """What AMPipe does in place of a flag of :data:`SWITCHED_OFF`."""
    if flag != PARTNER_FLAG or run.no_partner is None:
        return SWITCHED_OFF[flag]
    if not run.pipeline.overlaps:
        return f"{run.no_partner}, and one chunk leaves nothing to overlap with"
    return f"{run.no_partner}; the same all-to-alls overlap with other chunks"


def prepare_arguments(args: argparse.Namespace, run: Run) -> None:
    """Change parsed arguments, and the environment, for what a pipelined run replaces.

    Call it before Megatron validates the arguments and before CUDA is initialised.
    """
    # Plain text: Megatron writes its arguments into checkpoints, which stock Megatron reads.
    args.ampipe_disabled_flags = run.disabled_flags
    if not run.pipelined:
        return
    switch_off_overlaps(args)
    if _OFFLOADING_FLAG in run.disabled_flags:
        args.ampipe_memory = run.settings.memory
    if PARTNER_FLAG in run.disabled_flags and run.settings.partner:
        args.ampipe_partner = True
    setattr(args, RELAXES_MAX_CONNECTIONS_CHECK, True)
    connections.set_default()


def overlaps_given(arguments: object) -> tuple[str, ...]:
    """The flags in :data:`SWITCHED_OFF` that are set."""
    given = []
    for flag in SWITCHED_OFF:
        # Offloading of other modules is refused later.
        replaced = flag != _OFFLOADING_FLAG or offloads_experts(arguments)
        if replaced and getattr(arguments, _argument_of(flag), False):
            given.append(flag)
    return tuple(given)


def switch_off_overlaps(arguments: object) -> None:
    """Switch off the flags in :data:`SWITCHED_OFF`, before Megatron checks them."""
    for flag in overlaps_given(arguments):
        setattr(arguments, _argument_of(flag), False)


def _argument_of(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _read_plan(given: Given) -> Plan | None:
    """The plan of ``--ampipe-plan``, or of a file that an earlier run of this command line has saved."""
    if "plan" in given:
        return Plan.read(Path(given["plan"]))
    saved = given.get("save_plan")
    return Plan.read(Path(saved)) if saved is not None and Path(saved).is_file() else None


def _run_of(given: Given, plan: Plan | None, *, disabled: tuple[str, ...] = ()) -> Run:
    """The run of the settings that the user gives, with the plan that they name."""
    names = frozenset(given)
    if plan is None:
        pipeline = _pipeline(given)
        if pipeline.partner is None and given.get("degree") != AUTO and not pipeline.overlaps:
            _refuse_without_effect(given, stock=pipeline.exchange is Exchange.ROWS)
    elif "plan" in given:
        pipeline = plan.pipeline
        if pipeline.is_stock:
            _refuse_without_effect(given, stock=True, plan=given["plan"])
    else:
        # An earlier run of this command line has chosen. The flags are checked as before its choice, and are
        # from here on as with --ampipe-plan.
        _pipeline(given)
        pipeline = plan.pipeline
        _check_saved_plan(given, pipeline)
        saved = given["save_plan"]
        given = {name: value for name, value in given.items() if not SETTING[name].in_plan}
        given |= {"plan": saved, "save_plan": None}
    settings = Settings(**{**given, "ranks_per_node": ranks_per_node(given.get("ranks_per_node"))})
    check_condense(settings, pipeline)
    return Run(settings=settings, pipeline=pipeline, given=names, plan=plan, disabled_flags=disabled)


def _refuse_without_effect(given: Given, *, stock: bool, plan: str | None = None) -> None:
    """Refuse settings without effect with one chunk, or (``stock``) in Megatron's own layers."""
    why = "which builds Megatron's own layers" if stock else "which is one chunk"
    where = "at --ampipe-degree 1" if plan is None else f"with the plan {plan}"
    for name, value in given.items():
        setting = SETTING[name]
        if setting.acts == "chunks" or (setting.acts == "layers" and stock):
            remedy = f"{'Add --ampipe-degree 2, or leave' if plan is None else 'Leave'} {setting.flag} out."
            raise setting.refuse(value, f"has no effect {where}, {why}", remedy)


def _pipeline(given: Given) -> Pipeline:
    """The pipeline of the flags; if AMPipe chooses, the pipeline before its first choice."""
    _refuse_what_is_chosen(given)
    degree = given.get("degree")
    shares = parse_shares(given["chunks"], flag="--ampipe-chunks") if "chunks" in given else None
    if degree is None:
        degree = 1 if shares is None else len(shares)
    elif degree == AUTO:
        degree = 1
    exchange = given.get("exchange", Exchange.ROWS)
    return Pipeline.of(
        degree,
        backward_degree=given.get("backward_degree"),
        shares=shares,
        schedule=given.get("schedule", Settings().schedule),
        stack=parse_stack(given["stack"], flag="--ampipe-stack") if "stack" in given else ALL_LAYERS,
        memory=_memory(given),
        exchange=Exchange.ROWS if exchange == AUTO else Exchange(exchange),
        partner=_partner(given),
    )


def _refuse_what_is_chosen(given: Given) -> None:
    """Refuse flags that say what ``--ampipe-degree auto`` or a memory budget chooses."""
    automatic = given.get("degree") == AUTO
    memory = given.get("memory", KEEP)
    if "schedule" in given and "cluster" in given and (automatic or "memory_budget" not in given):
        raise SETTING["schedule"].refuse(
            given["schedule"],
            "is what a plan from --ampipe-cluster chooses",
            "Leave one of the two out.",
        )
    if memory != AUTO:
        check_memory(memory)
    if automatic and len(chunk_strategies(memory)) > 1:
        raise SETTING["memory"].refuse(
            memory,
            "names the strategy of each chunk, and their number is what --ampipe-degree auto chooses",
            "Use one of all chunks: --ampipe-memory rebuild, or name the degree: --ampipe-degree 2.",
        )
    if automatic and given.get("partner") and "cluster" not in given:
        raise SETTING["partner"].refuse(
            "on",
            "is not what the first iterations can try",
            "Add --ampipe-cluster FILE, which predicts them, or name the degree: --ampipe-degree 2.",
        )


def _memory(given: Given) -> str:
    """The memory strategy of the flags; a budget chooses it later."""
    memory: str = given.get("memory", KEEP)
    return KEEP if memory == AUTO else memory


def _partner(given: Given) -> Partner | None:
    """How passes with a partner run; with ``--ampipe-degree auto``, a planner chooses it later."""
    if not given.get("partner") or given.get("degree") == AUTO:
        return None
    return Partner(
        given.get("partner_degree", 1),
        given.get("schedule", Settings().schedule),
        given.get("partner_order"),
    )


def _check_saved_plan(given: Given, chosen: Pipeline) -> None:
    """Refuse flags that contradict the plan that an earlier run of this command line chose."""
    planned = {"schedule": chosen.name, "memory": chosen.memory, "exchange": str(chosen.exchange)}
    # A planner may choose layer by layer, however many layers may share a schedule.
    if "cluster" not in given or chosen.stack != 1:
        planned["stack"] = stack_to_text(chosen.stack)
    for name, value in planned.items():
        if given.get(name, AUTO) not in (AUTO, value):
            raise SETTING[name].refuse(
                given[name],
                f"is not that of the plan in {given['save_plan']}, which is {value}",
                "Remove the file, or name another one, to choose again.",
            )
