"""The ``--ampipe-*`` flags on Megatron's parser, and what they resolve to: one :class:`AMPipeConfig`.

The flags are the rows of :mod:`megatron_ampipe.block.settings`. What Megatron's flags exclude is in
``refusals.py``.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ampipe.block.settings import AUTO, SETTING, check_given, given_settings
from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch import connections
from megatron_ampipe.launch.refusal_conditions import ranks_per_node
from megatron_ampipe.launch.settings import CONFIG_FLAG
from megatron_ampipe.launch.switched_off_flags import LIFTS_ONE_CONNECTION, switch_off_overlaps
from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.schedule import (
    ALL_LAYERS,
    KEEP,
    Exchange,
    Pipeline,
    check_memory,
    of_chunks,
    parse_shares,
    parse_stack,
    stack_to_text,
)
from megatron_ampipe.schedule.config import AMPipeConfig
from megatron_ampipe.schedule.features import gather_lane

PlanReader = Callable[[Path], Plan]
"""Reads a plan file. A launch hands in one that remembers what it read."""


def add_arguments(
    parser: argparse.ArgumentParser, *, read_plan: PlanReader = Plan.read
) -> argparse.ArgumentParser:
    """Add the ``ampipe`` argument group to Megatron's parser, and return the parser."""
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
        group.add_argument(
            setting.flag,
            type=setting.type,
            choices=setting.choices,
            default=None,
            metavar=None if setting.choices else setting.metavar,
            help=setting.plain_help,
        )
    _prepare_when_parsed(parser, read_plan)
    return parser


def _prepare_when_parsed(parser: argparse.ArgumentParser, read_plan: PlanReader) -> None:
    """For a pipelined run, switch off other overlaps as soon as flags are parsed, and choose the queues.

    The start-up table says so (:mod:`.attach`). Until then CUDA has not been initialised, and Megatron has
    not validated its arguments.
    """
    parse = parser.parse_known_args

    @functools.wraps(parse)
    def parsing(*args: Any, **kwargs: Any) -> Any:
        found, rest = parse(*args, **kwargs)
        found.ampipe_put_aside = ()
        if getattr(found, "yaml_cfg", None) is not None:
            return found, rest
        if found.ampipe_config is not None:
            # Known once the files are read, after torch is imported, which may initialise CUDA.
            connections.set_default()
            return found, rest
        try:
            is_pipelined = config_from_args(found, read_plan=read_plan).pipelined
        except BadInput:
            # Reported by whoever parses: not all of these errors are of single flags.
            return found, rest
        if is_pipelined:
            connections.set_default()
            # Plain text: Megatron writes its arguments into checkpoints, which stock Megatron reads.
            found.ampipe_put_aside = tuple(one.setting for one in switch_off_overlaps(found))
            setattr(found, LIFTS_ONE_CONNECTION, True)
        else:
            connections.unset_default()
        return found, rest

    parser.parse_known_args = parsing  # type: ignore[method-assign]


def config_from_args(args: argparse.Namespace, *, read_plan: PlanReader = Plan.read) -> AMPipeConfig:
    """What the flags resolve to.

    Args:
        args: The parsed flags.
        read_plan: Reads the plan file that they name.

    Raises:
        BadInput: a value is wrong, or a flag could have no effect.
    """
    # Megatron puts what such a file holds in place of what was parsed, before or after this is called.
    if not hasattr(args, "ampipe_degree") or getattr(args, "yaml_cfg", None) is not None:
        raise BadInput(
            "--yaml-cfg",
            getattr(args, "yaml_cfg", ""),
            rule="replaces every flag, those of AMPipe included",
            remedy=f"Give the settings as flags, or in a file of {CONFIG_FLAG}.",
        )
    if args.ampipe_config is not None:
        raise BadInput(
            CONFIG_FLAG,
            " ".join(args.ampipe_config),
            rule="this launch parses flags without reading files first",
            remedy="Use -m megatron_ampipe.pretrain_gpt, or -m megatron_ampipe.launch and the script, or "
            f"give the flags that 'ampipe config --format command {CONFIG_FLAG} ...' prints.",
        )
    given = given_settings(args)
    check_given(given)
    plan = given.get("plan")
    if plan is None:
        pipeline = _pipeline(given)
        saved = given.get("save_plan")
        if saved is not None and Path(saved).is_file():
            # An earlier run of this command line chose; the rest is as with --ampipe-plan.
            pipeline = read_plan(Path(saved)).pipeline()
            _check_saved_plan(given, pipeline)
            given = {name: value for name, value in given.items() if not SETTING[name].of_plan}
            given |= {"plan": saved, "save_plan": None}
        elif given.get("degree") != AUTO and pipeline.degree == 1 and not pipeline.splits_weights:
            _refuse_without_effect(given, stock=pipeline.exchange is Exchange.ROWS)
    else:
        pipeline = read_plan(Path(plan)).pipeline()
        if pipeline.is_stock:
            _refuse_without_effect(given, stock=True, plan=plan)
    given["ranks_per_node"] = _ranks_per_node(args, given, pipeline.exchange)
    return AMPipeConfig(pipeline=pipeline, **given)


def _refuse_without_effect(given: dict[str, Any], *, stock: bool, plan: str | None = None) -> None:
    """Refuse settings without effect in one chunk, and those without effect in Megatron's own layers."""
    why = "which builds Megatron's own layers" if stock else "which is one chunk"
    where = "at --ampipe-degree 1" if plan is None else f"with the plan {plan}"
    for name, value in given.items():
        setting = SETTING[name]
        if setting.acts == "chunks" or (setting.acts == "layers" and stock):
            remedy = f"{'Add --ampipe-degree 4, or leave' if plan is None else 'Leave'} {setting.flag} out."
            raise setting.refuse(value, f"has no effect {where}, {why}", remedy)


def _pipeline(given: dict[str, Any]) -> Pipeline:
    """The pipeline that the flags name; that before the first choice where they leave it to AMPipe."""
    degree, schedule, memory = given.get("degree"), given.get("schedule"), given.get("memory", KEEP)
    if schedule is not None and "cluster" in given and (degree == AUTO or "memory_budget" not in given):
        remedy = "Leave one of the two out."
        raise SETTING["schedule"].refuse(schedule, "is what a plan from --ampipe-cluster chooses", remedy)
    if memory == AUTO:
        memory = KEEP
    check_memory(memory)
    if degree == AUTO and len(of_chunks(memory)) > 1:
        raise SETTING["memory"].refuse(
            memory,
            "names the strategy of each chunk, and their number is what --ampipe-degree auto chooses",
            "Use one of all chunks: --ampipe-memory rebuild, or name the degree: --ampipe-degree 4.",
        )
    shares, stack = None, ALL_LAYERS
    if "chunks" in given:
        shares = parse_shares(given["chunks"], flag="--ampipe-chunks")
    if "stack" in given:
        stack = parse_stack(given["stack"], flag="--ampipe-stack")
    if degree is None:
        degree = 1 if shares is None else len(shares)
    exchange = given.get("exchange", AUTO)
    return Pipeline.of(
        1 if degree == AUTO else degree,
        backward_degree=given.get("backward_degree"),
        shares=shares,
        schedule=schedule or SETTING["schedule"].default,
        stack=stack,
        memory=memory,
        exchange=Exchange.ROWS if exchange == AUTO else Exchange(exchange),
    )


def _check_saved_plan(given: dict[str, Any], chosen: Pipeline) -> None:
    """Refuse flags that say otherwise than the plan that an earlier run of this command line chose."""
    of_plan = {"schedule": chosen.name, "memory": chosen.memory, "exchange": str(chosen.exchange)}
    # A planner may choose layer by layer, however many layers may share a schedule.
    if "cluster" not in given or chosen.stack != 1:
        of_plan["stack"] = stack_to_text(chosen.stack)
    for name, value in of_plan.items():
        if given.get(name, AUTO) not in (AUTO, value):
            raise SETTING[name].refuse(
                given[name],
                f"is not that of the plan in {given['save_plan']}, which is {value}",
                "Remove the file, or name another one, to choose again.",
            )


def _ranks_per_node(args: argparse.Namespace, given: dict[str, Any], exchange: Exchange) -> int | None:
    """Ranks of a node, for this exchange, or for one that is chosen or was chosen by an earlier run."""
    uses = exchange.has_two_hops or args.ampipe_exchange == AUTO or _may_gather(args)
    if "ranks_per_node" in given and not uses:
        raise SETTING["ranks_per_node"].refuse(
            given["ranks_per_node"],
            f"has no effect with the exchange {exchange}, which has no second hop, where no ranks share an "
            "expert or rows of attention",
            "Use --ampipe-exchange nodes, or leave it out.",
        )
    return ranks_per_node(args)


def _may_gather(args: argparse.Namespace) -> bool:
    """Whether ranks gather or scatter within a layer; unknown while AMPipe's flags are parsed alone."""
    if not hasattr(args, "moe_token_dispatcher_type"):
        return True
    scatters = args.tensor_model_parallel_size > 1 and args.transformer_impl == "local"
    return scatters or bool(gather_lane(args, None))
