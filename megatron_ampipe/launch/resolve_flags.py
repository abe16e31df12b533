"""What the ``--ampipe-*`` flags resolve to together: one :class:`AMPipeConfig`. Called by :mod:`.session`.

Refuses single values that are wrong and flags that exclude each other. What Megatron's flags exclude is in
``refusals.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ampipe.block_features import gather_lane_of
from megatron_ampipe.config import AUTO, GRAD_REDUCES, ROUTING_INTERVAL, AMPipeConfig
from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.memory_size import parse_size
from megatron_ampipe.launch.settings import CONFIG_FLAG
from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.refusal_conditions import ranks_per_node
from megatron_ampipe.schedule import (
    ALL_LAYERS,
    KEEP,
    SCHEDULE_NAMES,
    Exchange,
    Pipeline,
    check_memory,
    of_chunks,
    parse_shares,
    parse_stack,
    stack_to_text,
)

PlanReader = Callable[[Path], Plan]
"""Reads a plan file. A launch hands in one that remembers what it read."""


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
    for name in ("plan", "cluster", "save_plan", "router", "wire", "trace_dir", "routing_dir"):
        if getattr(args, f"ampipe_{name}") == "":
            flag = f"--ampipe-{name.replace('_', '-')}"
            raise BadInput(flag, "(empty)", rule="names nothing", remedy="Give a name, or leave it out.")
    shares = None
    if args.ampipe_chunks is not None:
        shares = parse_shares(args.ampipe_chunks, flag="--ampipe-chunks")
    stack = ALL_LAYERS
    if args.ampipe_stack is not None:
        stack = parse_stack(args.ampipe_stack, flag="--ampipe-stack")
    if args.ampipe_plan is not None:
        _refuse_next_to_plan(args)
        return _of_plan(args, args.ampipe_plan, read_plan)
    plans = args.ampipe_degree == AUTO or args.ampipe_memory_budget is None
    if args.ampipe_cluster is not None and args.ampipe_schedule is not None and plans:
        raise BadInput(
            "--ampipe-schedule",
            args.ampipe_schedule,
            rule="is what a plan from --ampipe-cluster chooses",
            remedy="Leave one of the two out.",
        )
    exchange = _exchange(args)
    config = AMPipeConfig(
        pipeline=_pipeline(args, shares, stack, exchange),
        automatic=args.ampipe_degree == AUTO,
        chooses_exchange=args.ampipe_exchange == AUTO,
        cluster=args.ampipe_cluster,
        save_plan=args.ampipe_save_plan,
        memory_budget=args.ampipe_memory_budget,
        **_beside_a_plan(args, exchange),
    )
    if config.save_plan is not None and Path(config.save_plan).is_file():
        return _of_saved_plan(args, read_plan)
    if config.pipeline.degree == 1 and not config.automatic and not config.pipeline.splits_weights:
        _refuse_at_degree_1(args, exchange=config.pipeline.exchange)
    return config


def _refuse_at_degree_1(args: argparse.Namespace, *, exchange: Exchange) -> None:
    """Flags without effect in one chunk, and those without effect in Megatron's own layers."""
    why = "which builds Megatron's own layers"
    given = {
        "--ampipe-memory": args.ampipe_memory,
        "--ampipe-memory-budget": args.ampipe_memory_budget,
        "--ampipe-grad-reduce": args.ampipe_grad_reduce,
        "--ampipe-capacity-scope": args.ampipe_capacity_scope,
        "--ampipe-router-scope": args.ampipe_router_scope,
        "--ampipe-trace-dir": args.ampipe_trace_dir,
    }
    if exchange is not Exchange.ROWS:
        why, given = "which is one chunk", {}
    given = {
        "--ampipe-backward-degree": args.ampipe_backward_degree,
        "--ampipe-chunks": args.ampipe_chunks,
        "--ampipe-schedule": args.ampipe_schedule,
        "--ampipe-stack": args.ampipe_stack,
        **given,
    }
    for flag, value in given.items():
        if value is not None:
            raise BadInput(
                flag,
                value,
                rule=f"has no effect at --ampipe-degree 1, {why}",
                remedy=f"Add --ampipe-degree 4, or leave {flag} out.",
            )


def _exchange(args: argparse.Namespace) -> Exchange:
    """The exchange that the flags name; that before the first choice where they leave it to AMPipe."""
    if args.ampipe_exchange != AUTO:
        return Exchange(args.ampipe_exchange or Exchange.ROWS)
    if args.ampipe_degree != AUTO:
        raise BadInput(
            "--ampipe-exchange",
            AUTO,
            rule="is chosen together with the degree, and the degree is given",
            remedy="Use --ampipe-degree auto, or name the exchange: --ampipe-exchange ranks.",
        )
    return Exchange.ROWS


def _ranks_per_node(args: argparse.Namespace, exchange: Exchange) -> int | None:
    """Ranks of a node, for this exchange, or for one that is chosen or was chosen by an earlier run."""
    given = args.ampipe_ranks_per_node
    if given is not None and given < 1:
        raise BadInput(
            "--ampipe-ranks-per-node",
            given,
            rule="must be a whole number of ranks, at least 1",
            remedy="Give the number of GPUs of a node, or leave it out.",
        )
    uses = exchange.has_two_hops or args.ampipe_exchange == AUTO or _may_gather(args)
    if given is not None and not uses:
        raise BadInput(
            "--ampipe-ranks-per-node",
            given,
            rule=f"has no effect with the exchange {exchange}, which has no second hop, where no ranks "
            "share an expert or rows of attention",
            remedy="Use --ampipe-exchange nodes, or leave it out.",
        )
    return ranks_per_node(args)


def _may_gather(args: argparse.Namespace) -> bool:
    """Whether ranks gather or scatter within a layer; unknown while AMPipe's flags are parsed alone."""
    if not hasattr(args, "moe_token_dispatcher_type"):
        return True
    scatters = args.tensor_model_parallel_size > 1 and args.transformer_impl == "local"
    return scatters or bool(gather_lane_of(args, None))


def _pipeline(
    args: argparse.Namespace, shares: tuple[float, ...] | None, stack: int, exchange: Exchange
) -> Pipeline:
    """The pipeline that the flags name; that before the first choice where they leave it to AMPipe."""
    degree, backward = args.ampipe_degree, args.ampipe_backward_degree
    schedule, memory = args.ampipe_schedule or SCHEDULE_NAMES[0], _memory(args)
    if degree != AUTO:
        if degree is None:
            degree = 1 if shares is None else len(shares)
        return Pipeline.of(
            degree,
            backward_degree=backward,
            shares=shares,
            schedule=schedule,
            stack=stack,
            memory=memory,
            exchange=exchange,
        )
    if shares is not None or backward is not None:
        flag, value = "--ampipe-backward-degree", str(backward)
        if shares is not None:
            flag, value = "--ampipe-chunks", ",".join(f"{share:.6g}" for share in shares)
        raise BadInput(
            flag,
            value,
            rule="is what --ampipe-degree auto chooses",
            remedy=f"Leave {flag} out, or name the degree: --ampipe-degree 4.",
        )
    return Pipeline.of(1, schedule=schedule, stack=stack, memory=memory, exchange=exchange)


def _memory(args: argparse.Namespace) -> str:
    """What the experts keep until a budget chooses."""
    memory, budget = args.ampipe_memory or KEEP, args.ampipe_memory_budget
    if memory == AUTO and budget is None:
        raise BadInput(
            "--ampipe-memory",
            AUTO,
            rule="chooses by a budget, and there is none",
            remedy="Add for example --ampipe-memory-budget 60GiB.",
        )
    if memory != AUTO and budget is not None:
        raise BadInput(
            "--ampipe-memory-budget",
            budget or "(empty)",
            rule=f"has no effect with --ampipe-memory {memory}",
            remedy="Use --ampipe-memory auto, or leave it out.",
        )
    if budget is not None:
        parse_size(budget)
        return KEEP
    check_memory(memory)
    if args.ampipe_degree == AUTO and len(of_chunks(memory)) > 1:
        raise BadInput(
            "--ampipe-memory",
            memory,
            rule="names the strategy of each chunk, and their number is what --ampipe-degree auto chooses",
            remedy="Use one of all chunks: --ampipe-memory rebuild, or name the degree: --ampipe-degree 4.",
        )
    return memory


def _of_saved_plan(args: argparse.Namespace, read_plan: PlanReader) -> AMPipeConfig:
    """The settings of what an earlier run of this command line chose."""
    chosen = read_plan(Path(args.ampipe_save_plan)).pipeline()
    stack = args.ampipe_stack
    if args.ampipe_cluster is not None and chosen.stack == 1:
        # A planner may choose layer by layer, however many layers may share a schedule.
        stack = None
    for flag, value, of_plan in (
        ("--ampipe-schedule", args.ampipe_schedule, chosen.name),
        ("--ampipe-stack", stack, stack_to_text(chosen.stack)),
        ("--ampipe-memory", None if args.ampipe_memory == AUTO else args.ampipe_memory, chosen.memory),
        ("--ampipe-exchange", args.ampipe_exchange, str(chosen.exchange)),
    ):
        if value not in (None, AUTO, of_plan):
            raise BadInput(
                flag,
                value,
                rule=f"is not that of the plan in {args.ampipe_save_plan}, which is {of_plan}",
                remedy="Remove the file, or name another one, to choose again.",
            )
    return _of_plan(args, args.ampipe_save_plan, read_plan)


def _of_plan(args: argparse.Namespace, file: str, read_plan: PlanReader) -> AMPipeConfig:
    """The settings of a plan file."""
    pipeline = read_plan(Path(file)).pipeline()
    return AMPipeConfig(
        pipeline=pipeline,
        plan=file,
        **_beside_a_plan(args, pipeline.exchange),
    )


def _beside_a_plan(args: argparse.Namespace, exchange: Exchange) -> dict[str, Any]:
    """The settings that a plan says nothing of, as fields of ``AMPipeConfig``."""
    return {
        "grad_reduce": args.ampipe_grad_reduce or GRAD_REDUCES[0],
        "ranks_per_node": _ranks_per_node(args, exchange),
        "capacity_scope": args.ampipe_capacity_scope or "sequence",
        "router": args.ampipe_router,
        "router_scope": args.ampipe_router_scope or "sequence",
        "wire": args.ampipe_wire,
        "condense": args.ampipe_condense,
        "trace_dir": args.ampipe_trace_dir,
        "routing_dir": args.ampipe_routing_dir,
        "routing_interval": _routing_interval(args),
    }


def _routing_interval(args: argparse.Namespace) -> int:
    found: int | None = args.ampipe_routing_interval
    if found is None:
        return ROUTING_INTERVAL
    flag = "--ampipe-routing-interval"
    if args.ampipe_routing_dir is None:
        rule, remedy = "has no effect without --ampipe-routing-dir", "Add --ampipe-routing-dir routing."
        raise BadInput(flag, found, rule=rule, remedy=remedy)
    if found < 1:
        raise BadInput(flag, found, rule="must be at least 1", remedy=f"Use {flag} {ROUTING_INTERVAL}.")
    return found


def _refuse_next_to_plan(args: argparse.Namespace) -> None:
    for name in (
        "degree",
        "backward_degree",
        "chunks",
        "cluster",
        "schedule",
        "stack",
        "memory",
        "memory_budget",
        "exchange",
    ):
        value = getattr(args, f"ampipe_{name}")
        flag = f"--ampipe-{name.replace('_', '-')}"
        if value is not None:
            raise BadInput(
                flag,
                value,
                rule=f"is what the plan {args.ampipe_plan} says",
                remedy=f"Leave {flag} or --ampipe-plan out.",
            )
    if args.ampipe_save_plan is not None:
        raise BadInput(
            "--ampipe-save-plan",
            args.ampipe_save_plan,
            rule="has no effect with --ampipe-plan: nothing is chosen",
            remedy="Leave one of the two out.",
        )
