"""Adds AMPipe's flags to Megatron's parser, and converts parsed flags to one :class:`AMPipeConfig`.

The flags are the rows of :mod:`megatron_ampipe.block.settings`. Conflicts with Megatron's flags are in
``refusals.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ampipe import compat
from megatron_ampipe.block.settings import AUTO, SETTING, check_given, given_settings
from megatron_ampipe.errors import BadInput, EnvironmentMissing, nearest
from megatron_ampipe.launch import config_files, connections, host
from megatron_ampipe.launch.config_files import CONFIG_FLAG
from megatron_ampipe.launch.ending import LIST_OF_FLAGS, report_parser_errors
from megatron_ampipe.launch.planned import ranks_per_node
from megatron_ampipe.launch.refusals import offloads_experts
from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.schedule import (
    ALL_LAYERS,
    KEEP,
    Exchange,
    Partner,
    Pipeline,
    check_memory,
    chunk_strategies,
    parse_shares,
    parse_stack,
    stack_to_text,
)
from megatron_ampipe.schedule.pipeline import AMPipeConfig

_SAME_EXCHANGES = "AMPipe schedules the same all-to-alls inside each micro-batch"
_PARTNER_FLAG = "--overlap-moe-expert-parallel-comm"
_OFFLOADING_FLAG = "--fine-grained-activation-offloading"
_SAME_WEIGHTS = "it delays weight gradients for an overlap that AMPipe replaces"
_SAME_ROWS = "experts pad the rows of each chunk themselves, as without this flag"
SWITCHED_OFF: Mapping[str, str] = {
    "--moe-shared-expert-overlap": "AMPipe schedules the shared experts itself",
    _PARTNER_FLAG: "--ampipe-partner does the same; with --ampipe-degree auto or a plan, which say how all "
    "micro-batches run, the same all-to-alls are scheduled inside each",
    "--ep-overlap-early-attn-memory-release": _SAME_EXCHANGES,
    "--overlap-dispatch-backward-with-experts-wgrad": _SAME_WEIGHTS,
    "--delay-wgrad-compute": _SAME_WEIGHTS,
    "--moe-router-padding-for-quantization": _SAME_ROWS,
    "--moe-router-padding-for-fp8": _SAME_ROWS,
    _OFFLOADING_FLAG: "--ampipe-memory offload puts away all that experts keep, these modules included",
    "--fused-residual-rmsnorm": (
        "stages call the norm and the residual addition one after the other, with the same result"
    ),
}
"""Flags of Megatron that are switched off if layers are pipelined, with what AMPipe does instead. The run
computes the same function without them."""
LIFTS_ONE_CONNECTION = "overlap_moe_expert_parallel_comm"
"""This argument is set for every pipelined run while Megatron validates its arguments. Megatron requires
``CUDA_DEVICE_MAX_CONNECTIONS=1`` for tensor or context parallelism on Hopper and older GPUs. If this overlap
of the all-to-alls is on, it only prints a warning, which is right for AMPipe's overlap too. ``launch.script``
switches the argument off afterwards."""

is_launched = False
"""Whether one of AMPipe's launchers runs this process. If so, the lines of a patched Megatron do nothing."""


def import_megatron() -> bool:
    """Import Megatron's training, on the host platform if there is no GPU. A patched Megatron stays inactive.

    Returns whether there is a GPU. Raises :class:`EnvironmentMissing` if torch or Megatron is missing or too
    old.
    """
    global is_launched
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise EnvironmentMissing(f"PyTorch cannot be imported ({error}). Run: pip install torch") from error
    on_gpu = host.gpu_available()
    try:
        if on_gpu:
            import megatron.training.training  # noqa: F401
        else:
            host.install()
    except ImportError as error:
        raise EnvironmentMissing(
            f"Megatron cannot be imported ({error}). Run: pip install 'megatron-core[training]>=0.19.2'"
        ) from error
    compat.require_peers()
    is_launched = True
    return on_gpu


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the ``ampipe`` argument group to Megatron's parser, and return the parser.

    When flags of a pipelined run are parsed, other overlaps are switched off and the number of hardware
    queues is set: before CUDA is initialised and before Megatron validates its arguments.
    """
    group = parser.add_argument_group(
        title="ampipe",
        description="Pipelining of attention and MoE inside every block: while the tokens of one chunk of "
        "the sequence travel between the experts, the attention and experts of other chunks compute.",
    )
    group.add_argument(
        CONFIG_FLAG,
        nargs="+",
        action="extend",
        metavar="FILE",
        help="YAML files of settings, or names of included ones such as mixtral-8x7b: Megatron's flags "
        "without the dashes in front, AMPipe's in a section 'ampipe:'; later files win over earlier ones, "
        "and the command line over all",
    )
    for setting in SETTING.values():
        if setting.type is bool:
            group.add_argument(setting.flag, action="store_true", default=None, help=setting.plain_help)
            continue
        group.add_argument(
            setting.flag,
            type=setting.type,
            choices=setting.choices,
            default=None,
            metavar=None if setting.choices else setting.metavar,
            help=setting.plain_help,
        )
    parse = parser.parse_known_args

    @functools.wraps(parse)
    def parsing(*words: Any, **options: Any) -> Any:
        try:
            args, rest = parse(*words, **options)
        except KeyError as error:
            # An enum of Megatron's raises it.
            raise _no_choice(parser, words[0] if words else None, error) from error
        args.ampipe_disabled_flags = ()
        # The caller reports these errors: not all of them concern a single flag.
        with contextlib.suppress(BadInput):
            if config_from_args(args).pipelined:
                # Plain text: Megatron writes its arguments into checkpoints, which stock Megatron reads.
                args.ampipe_disabled_flags = switch_off_overlaps(args)
                if _OFFLOADING_FLAG in args.ampipe_disabled_flags:
                    args.ampipe_memory = "offload"
                is_open = args.ampipe_degree != AUTO and not (args.ampipe_plan or args.ampipe_save_plan)
                if _PARTNER_FLAG in args.ampipe_disabled_flags and is_open:
                    args.ampipe_partner = True
                setattr(args, LIFTS_ONE_CONNECTION, True)
                connections.set_default()
        return args, rest

    parser.parse_known_args = parsing  # type: ignore[method-assign]
    return parser


def _no_choice(parser: argparse.ArgumentParser, words: Sequence[str] | None, error: KeyError) -> BadInput:
    """The error for a word that no choice of its flag has as a name."""
    name = str(error.args[0])
    given = list(sys.argv[1:] if words is None else words)
    before = [given[at - 1] for at, word in enumerate(given) if at and word == name]
    before += [word.partition("=")[0] for word in given if word.endswith(f"={name}")]
    flag = next(iter(before), "arguments")
    actions = (action for action in parser._actions if flag in action.option_strings)
    choices = [
        choice.name for action in actions for choice in action.choices or () if hasattr(choice, "name")
    ]
    remedy = nearest(name, choices) if choices else LIST_OF_FLAGS
    return BadInput(flag, name, rule="is not one of its values", remedy=remedy)


def full_parser() -> argparse.ArgumentParser:
    """Megatron's own parser with AMPipe's flags added. Call it after :func:`import_megatron`."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    report_parser_errors(parser)
    return add_arguments(parser)


def switch_off_overlaps(arguments: Any) -> tuple[str, ...]:
    """Switch off the flags in :data:`SWITCHED_OFF`, before Megatron checks them. Returns the ones set."""
    names = {flag: flag.removeprefix("--").replace("-", "_") for flag in SWITCHED_OFF}
    if not offloads_experts(arguments):
        # Such offloading is refused later.
        del names[_OFFLOADING_FLAG]
    given = tuple(flag for flag, name in names.items() if getattr(arguments, name, False))
    for flag in given:
        setattr(arguments, names[flag], False)
    return given


def check_settings(resolved: config_files.Resolved, parser: argparse.ArgumentParser) -> None:
    """Check types and choices of all flags, and AMPipe's settings together; errors name file and line."""
    try:
        args, _ = parser.parse_known_args(resolved.words)
        config_from_args(args)
    except BadInput as error:
        raise resolved.located(error) from error


def config_from_args(args: argparse.Namespace) -> AMPipeConfig:
    """The configuration of parsed flags; :class:`BadInput` for a wrong value, or a flag without effect."""
    config_files.refuse_unread(args)
    given = given_settings(args)
    check_given(given)
    plan, saved = given.get("plan"), given.get("save_plan")
    pipeline = _pipeline(given) if plan is None else Plan.read(Path(plan)).pipeline
    if saved is not None and Path(saved).is_file():
        # An earlier run of this command line has chosen; from here on as with --ampipe-plan.
        pipeline = Plan.read(Path(saved)).pipeline
        _check_saved_plan(given, pipeline)
        given = {name: value for name, value in given.items() if not SETTING[name].in_plan}
        given |= {"plan": saved, "save_plan": None}
    elif plan is not None:
        if pipeline.is_stock:
            _refuse_without_effect(given, stock=True, plan=plan)
    elif pipeline.partner is None and given.get("degree") != AUTO and not pipeline.overlaps:
        _refuse_without_effect(given, stock=pipeline.exchange is Exchange.ROWS)
    given["ranks_per_node"] = ranks_per_node(args)
    return AMPipeConfig(pipeline=pipeline, **given)


def _refuse_without_effect(given: dict[str, Any], *, stock: bool, plan: str | None = None) -> None:
    """Refuse settings without effect with one chunk, or (``stock``) in Megatron's own layers."""
    why = "which builds Megatron's own layers" if stock else "which is one chunk"
    where = "at --ampipe-degree 1" if plan is None else f"with the plan {plan}"
    for name, value in given.items():
        setting = SETTING[name]
        if setting.acts == "chunks" or (setting.acts == "layers" and stock):
            remedy = f"{'Add --ampipe-degree 2, or leave' if plan is None else 'Leave'} {setting.flag} out."
            raise setting.refuse(value, f"has no effect {where}, {why}", remedy)


def _pipeline(given: dict[str, Any]) -> Pipeline:
    """The pipeline of the flags; if AMPipe chooses, the pipeline before its first choice."""
    degree, schedule, memory = given.get("degree"), given.get("schedule"), given.get("memory", KEEP)
    if schedule is not None and "cluster" in given and (degree == AUTO or "memory_budget" not in given):
        remedy = "Leave one of the two out."
        raise SETTING["schedule"].refuse(schedule, "is what a plan from --ampipe-cluster chooses", remedy)
    if memory == AUTO:
        memory = KEEP
    check_memory(memory)
    if degree == AUTO and len(chunk_strategies(memory)) > 1:
        raise SETTING["memory"].refuse(
            memory,
            "names the strategy of each chunk, and their number is what --ampipe-degree auto chooses",
            "Use one of all chunks: --ampipe-memory rebuild, or name the degree: --ampipe-degree 2.",
        )
    shares, stack = None, ALL_LAYERS
    if "chunks" in given:
        shares = parse_shares(given["chunks"], flag="--ampipe-chunks")
    if "stack" in given:
        stack = parse_stack(given["stack"], flag="--ampipe-stack")
    if degree is None:
        degree = 1 if shares is None else len(shares)
    exchange, partner = given.get("exchange", AUTO), None
    if given.get("partner") and degree == AUTO and "cluster" not in given:
        remedy = "Add --ampipe-cluster FILE, which predicts them, or name the degree: --ampipe-degree 2."
        raise SETTING["partner"].refuse("on", "is not what the first iterations can try", remedy)
    if given.get("partner") and degree != AUTO:
        partner = Partner(
            given.get("partner_degree", 1),
            schedule or SETTING["schedule"].default,
            given.get("partner_order"),
        )
    return Pipeline.of(
        1 if degree == AUTO else degree,
        backward_degree=given.get("backward_degree"),
        shares=shares,
        schedule=schedule or SETTING["schedule"].default,
        stack=stack,
        memory=memory,
        exchange=Exchange.ROWS if exchange == AUTO else Exchange(exchange),
        partner=partner,
    )


def _check_saved_plan(given: dict[str, Any], chosen: Pipeline) -> None:
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
