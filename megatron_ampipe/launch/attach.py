"""Sets up a pipelined run: checks arguments, chooses the pipeline, adds hooks, prints the start-up table."""

from __future__ import annotations

import argparse
import functools
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.core.utils import unwrap_model

from megatron_ampipe import compat
from megatron_ampipe.block.settings import SETTING, TRACED_ITERATIONS
from megatron_ampipe.exchange.codecs import load_wire
from megatron_ampipe.files import outputs
from megatron_ampipe.launch import host, startup
from megatron_ampipe.launch.auto import Agreement, AutoDegree, save_choice
from megatron_ampipe.launch.ending import warn_of_optimizer_state
from megatron_ampipe.launch.flags import SWITCHED_OFF
from megatron_ampipe.launch.hooks import Hook, Hooks, PlacedReductions
from megatron_ampipe.launch.partners import PartneredSteps
from megatron_ampipe.launch.planned import (
    captured_modules,
    choice_of_plan,
    choose_memory,
    exchanges_of,
    layers_split_weights,
    packs_documents,
    planner_of,
    rows_of_rank,
)
from megatron_ampipe.launch.recording import Recording, RoutingRecording
from megatron_ampipe.launch.refusals import refuse_unsupported, refuse_with_token_ids
from megatron_ampipe.launch.trials import Choice
from megatron_ampipe.layers.context import AMPipeContext, DocumentReader
from megatron_ampipe.layers.gates import TokenIdRouter, give_token_ids, load_gate
from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.runtime.partners import Partners
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.reductions import Reductions
from megatron_ampipe.schedule import IN_ONE_CHUNK
from megatron_ampipe.schedule.features import (
    expert_tensor_ranks,
    gather_lane,
    rows_of_tile,
    uses_ring_attention,
)
from megatron_ampipe.schedule.pipeline import AMPipeConfig


def make_context(
    args: argparse.Namespace,
    config: AMPipeConfig,
    *,
    gate: type | None,
    hooks: Hooks,
    adjustments: Mapping[str, str],
) -> AMPipeContext | None:
    """Check Megatron's validated arguments against all rules, and print the start-up table on rank 0.

    Adds the hooks of the features that the run uses to ``hooks``. ``adjustments`` are the flags that the host
    platform has added, for the table. Returns the state that layers share; None at degree 1.
    """
    context, rows = None, [("degree", "1: Megatron's own layers"), *config.startup_rows(stock=True)]
    if config.pipelined:
        refuse_unsupported(config, args)
        memory = None
        if config.memory_budget is not None:
            memory = choose_memory(
                args, config.pipeline, config.memory_budget, config.cluster, automatic=config.automatic
            )
            config = replace(config, pipeline=memory.pipeline)
        # Overlap weight gradients with transfers, if the user names no schedule and the layers support it.
        is_open = args.ampipe_schedule is None and layers_split_weights(args)
        in_one_chunk = IN_ONE_CHUNK if is_open else None
        if config.partner and config.pipeline.partner is not None and in_one_chunk is not None:
            partner = replace(config.pipeline.partner, schedule=in_one_chunk)
            config = replace(config, pipeline=replace(config.pipeline, partner=partner))
        on_gpu = not host.installed()
        adjustments = {**adjustments, **adjust_arguments(args, on_gpu=on_gpu)}
        # Without a trace, only the current iteration is recorded, for the log.
        context = AMPipeContext(
            config,
            recorder=Recorder(num_iterations=TRACED_ITERATIONS if config.trace_dir else 1),
            recomputed_layers=take_over_recompute(args, config),
            documents=DocumentReader(masked=startup.masks_documents(args)),
            shares=not getattr(args, "use_megatron_fsdp", False),
            gate=gate,
            wire=None if config.wire is None else load_wire(config.wire),
            graph_warm_up=max(1, getattr(args, "cuda_graph_warmup_steps", 1)),
            graph_modules=take_over_graphs(args),
        )
        # Without training, models are not wrapped, and nothing is reduced.
        if config.grad_reduce == "placed" and not args.skip_train:
            ranks_of_stage = args.world_size // args.pipeline_model_parallel_size
            ranks_of_experts = args.expert_model_parallel_size * expert_tensor_ranks(args)
            context.reductions = Reductions(on_cuda=on_gpu, with_experts=ranks_of_stage > ranks_of_experts)
            hooks.add(PlacedReductions(context.reductions))
        if config.partner or config.pipeline.partner is not None:
            context.partners = Partners()
            hooks.add(PartneredSteps(context, args))
        hooks.add(Recording(context, args))
    choice = None
    if config.plan is not None:
        choice = choice_of_plan(args, Plan.read(Path(config.plan)), config.plan)
        # Another rank may have read another plan, or no file that --ampipe-save-plan names.
        hooks.add(Agreement(choice.pipeline))
    if context is not None:
        if choice is not None:
            context.pipeline, context.predicted_ms = choice.pipeline, choice.predicted_ms
        elif config.automatic:
            choice = _choose(args, context, hooks, in_one_chunk)
        rows = startup.pipelined_rows(args, context, choice, memory=memory, on_gpu=on_gpu)
    elif choice is not None:
        rows += startup.reason_rows(choice)
    if gate is not None and issubclass(gate, TokenIdRouter):
        hooks.add(TokenIdsOfModels())
    if config.routing_dir is not None:
        if args.skip_train or not args.num_experts:
            rule = f"has no effect {'with --skip-train' if args.skip_train else 'without --num-experts'}"
            raise SETTING["routing_dir"].refuse(config.routing_dir, rule, "Leave it out.")
        if int(os.environ.get("RANK", "0")) == 0:
            folder = Path(config.routing_dir)
            outputs.check_folder(folder.absolute(), flag=SETTING["routing_dir"].flag, value=folder)
        hooks.add(RoutingRecording(args, config, context))
    if (warning := warn_of_optimizer_state(args)) is not None:
        rows.append(("warning", "checkpoints", warning))
    startup.print_startup_table([("Megatron", compat.describe_megatron()), *rows], adjustments)
    return context


def take_over_recompute(args: argparse.Namespace, config: AMPipeConfig) -> float:
    """Replace Megatron's full recompute by recompute inside the schedules, if layers can share schedules.

    Megatron's recompute stays with ``--distribute-saved-activations`` and in hybrid models. Returns how many
    layers are recomputed (``AMPipeContext.recomputed_layers``).
    """
    shares = config.automatic or config.pipeline.stack != 1
    if args.recompute_granularity != "full" or not shares:
        return 0
    if args.distribute_saved_activations or args.hybrid_layer_pattern is not None:
        return 0
    args.recompute_granularity, args.ampipe_recomputes = None, True
    first: int = args.recompute_num_layers
    return first if args.recompute_method == "block" else math.inf


def take_over_graphs(args: argparse.Namespace) -> frozenset[str]:
    """Replace Megatron's CUDA graphs of layers by graphs of the stages of pipelined blocks.

    Returns the values of ``--cuda-graph-modules``.
    """
    modules = captured_modules(args)
    if modules:
        args.cuda_graph_impl = "none"
        for name in ("cuda_graph_modules", "cuda_graph_scope"):
            if hasattr(args, name):
                setattr(args, name, [])
        # Megatron derives it from the implementation, and checks it again later.
        if hasattr(args, "inference_cuda_graph_scope"):
            args.inference_cuda_graph_scope = None
    return frozenset(modules)


def adjust_arguments(args: argparse.Namespace, *, on_gpu: bool) -> dict[str, str]:
    """Change arguments as pipelined blocks need them. Returns the changed flags, each with the reason.

    Arguments that cannot be changed without another result are refused instead (``refusals.py``).
    """
    changes: dict[str, str] = {}
    if args.create_attention_mask_in_dataloader and not startup.reads_masks(args):
        # No layer reads the mask, whose size is the sequence length squared.
        args.create_attention_mask_in_dataloader = False
        reason = "chunks know their causal mask from their position"
        if args.reset_attention_mask:
            reason = (
                "no layer reads the mask of --reset-attention-mask, in a stock run neither: a token attends "
                "to earlier documents too. To separate them, use --dataloader-inter-document-masking"
            )
        changes["--no-create-attention-mask-in-dataloader"] = reason
    several = args.micro_batch_size > 1 and packs_documents(args)
    if several and args.multi_latent_attention and args.apply_rope_fusion:
        # The fused kernel uses the same position for rows of the same index in all sequences.
        args.apply_rope_fusion = False
        changes["--no-rope-fusion"] = "rows of several packed sequences differ in position: the same function"
    if getattr(args, "use_megatron_fsdp", False) and args.gradient_accumulation_fusion:
        args.gradient_accumulation_fusion = False
        reason = "with Megatron-FSDP, a fused product overwrites what earlier chunks have added"
        changes["--no-gradient-accumulation-fusion"] = reason
    if args.moe_pad_expert_input_to_capacity:
        reason = "ignored: chunks send only the kept tokens, with the same result"
        changes["--moe-pad-expert-input-to-capacity"] = reason
    for flag, reason in SWITCHED_OFF.items():
        if flag in getattr(args, "ampipe_disabled_flags", ()):
            changes[flag] = f"switched off: {reason}"
    in_ring = uses_ring_attention(args)
    modes = args.cp_comm_type if isinstance(args.cp_comm_type, list) else [args.cp_comm_type]
    others = [mode for mode in dict.fromkeys(modes) if mode != "all_gather"]
    if args.context_parallel_size > 1 and others and not in_ring:
        reason = f"in pipelined blocks, in place of {' and '.join(others)}: the same function"
        changes["--cp-comm-type all_gather"] = reason
    if on_gpu:
        groups = {"ep": True, "tp_ep_mp": True, "ep_tp": gather_lane(args, None), "cp": in_ring}
        given = args.high_priority_stream_groups
        if missing := [name for name, is_used in groups.items() if is_used and name not in given]:
            # In place, as Megatron does for its own overlaps.
            given.extend(missing)
            reason = "collectives that are ready do not wait for computation"
            changes[f"--high-priority-stream-groups {' '.join(given)}"] = reason
    return changes


def _choose(
    args: argparse.Namespace, context: AMPipeContext, hooks: Hooks, in_one_chunk: str | None
) -> Choice | None:
    """Let the planner choose the pipeline; without a cluster file, the first iterations."""
    config, planner = context.config, None
    exchanges = exchanges_of(args) if config.chooses_exchange else (config.pipeline.exchange,)
    if config.save_plan is not None:
        outputs.check(Path(config.save_plan), flag="--ampipe-save-plan")
    if config.cluster is not None:
        given = config.pipeline
        planner = planner_of(
            args, config.cluster, stack=given.stack, memory=given.memory, exchanges=exchanges
        )
    shape = (rows_of_rank(args), args.micro_batch_size)
    auto = AutoDegree(
        context,
        planner=planner,
        exchanges=exchanges,
        in_one_chunk=in_one_chunk,
        keep=functools.partial(save_choice, args, config.save_plan, shape),
        rows_of_tile=functools.partial(rows_of_tile, args),
    )
    choice = auto.start(shape)
    hooks.add(Agreement(context.pipeline))
    hooks.add(auto)
    return choice


def find_gate(config: AMPipeConfig, args: argparse.Namespace) -> type | None:
    """The router class of a run's MoE layers (``--ampipe-router``); None for Megatron's own.

    Raises :class:`BadInput` if the class does not fit the other flags.
    """
    name, setting = config.router, SETTING["router"]
    if name is None:
        return None
    if not args.num_experts:
        raise setting.refuse(name, "the model has no MoE layer", "Set --num-experts.")
    gate = load_gate(name)
    for ignored in getattr(gate, "ignored_settings", ()):
        value = getattr(args, ignored, None)
        if any(value) if isinstance(value, list) else value not in (None, False):
            rule = f"chooses experts in its own way, without --{ignored.replace('_', '-')} {value}"
            raise setting.refuse(name, rule, "Leave one of the two out.")
    reason, by_chunk = getattr(gate, "needs_all_tokens", None), config.router_scope == "chunk"
    if reason is not None and not by_chunk:
        remedy = (
            "Add --ampipe-router-scope chunk and --ampipe-degree 2: it then compares the tokens of a chunk, "
            "and later tokens influence earlier ones within a chunk only."
        )
        raise setting.refuse(name, f"{reason}, which causal training does not allow", remedy)
    if reason is None and by_chunk and "sinkhorn" not in args.moe_router_load_balancing_type:
        rule = "needs no --ampipe-router-scope chunk: its choice for a token depends on that token alone"
        remedy = "Leave the scope out; a class says otherwise by an attribute needs_all_tokens."
        raise setting.refuse(name, rule, remedy)
    if issubclass(gate, TokenIdRouter):
        refuse_with_token_ids(name, args)
    return gate


class TokenIdsOfModels(Hook):
    """Passes the token ids of every model to its routers."""

    def models_built(self, models: list[Any]) -> None:
        for model in unwrap_model(models):
            give_token_ids(model).watch(model)
