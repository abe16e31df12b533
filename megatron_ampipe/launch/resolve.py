"""Decides how a run is pipelined, from Megatron's validated arguments, before any process group exists.

The second step of a :class:`~megatron_ampipe.launch.run.Run`: all combinations that AMPipe does not support
are refused, a plan and a memory budget choose, and Megatron's arguments are changed where pipelined blocks
replace what they ask for.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import replace

from megatron_ampipe.block.settings import SETTING, Settings
from megatron_ampipe.launch import startup
from megatron_ampipe.launch.planned import (
    captured_modules,
    choose_memory,
    layers_split_weights,
    packs_documents,
    plan_of_run,
)
from megatron_ampipe.launch.refusals import refuse_unsupported, refuse_with_token_ids
from megatron_ampipe.launch.run import SWITCHED_OFF, Run
from megatron_ampipe.layers.gates import TokenIdRouter, load_gate
from megatron_ampipe.schedule import IN_ONE_CHUNK
from megatron_ampipe.schedule.features import gather_lane, uses_ring_attention


def resolve(args: argparse.Namespace, run: Run, *, adjustments: Mapping[str, str], on_gpu: bool) -> Run:
    """Check Megatron's validated arguments against all rules, and complete a run of :func:`requested`.

    ``adjustments`` are the flags that the host platform has added. Changes ``args`` where pipelined blocks
    replace what they ask for.

    Raises:
        BadInput: a combination is not supported, or a plan, budget or router does not fit the model.
    """
    run = replace(run, gate=find_gate(run.settings, args), adjustments=adjustments)
    if run.pipelined:
        refuse_unsupported(run.settings, run.pipeline, args)
        run = _with_memory(args, run)
        run = _with_one_chunk(args, run)
        changed = adjust_arguments(args, run, on_gpu=on_gpu)
        run = replace(
            run,
            adjustments={**adjustments, **changed},
            recomputed_layers=take_over_recompute(args, run),
            graph_modules=take_over_graphs(args),
        )
    if run.plan is not None:
        assert run.settings.plan is not None
        choice = plan_of_run(args, run.plan, run.settings.plan)
        run = replace(run, choice=choice, pipeline=choice.pipeline)
    return run


def _with_memory(args: argparse.Namespace, run: Run) -> Run:
    """The run with the memory strategy that fits the budget, if there is one."""
    budget = run.settings.memory_budget
    if budget is None:
        return run
    chosen = choose_memory(args, run.pipeline, budget, run.settings.cluster, automatic=run.settings.automatic)
    return replace(run, pipeline=chosen.pipeline, memory_reason=chosen.reason)


def _with_one_chunk(args: argparse.Namespace, run: Run) -> Run:
    """Overlap weight gradients with transfers, if the user names no schedule and the layers support it."""
    if args.ampipe_schedule is not None or not layers_split_weights(args):
        return run
    pipeline = run.pipeline
    if run.settings.partner and pipeline.partner is not None:
        partner = replace(pipeline.partner, schedule=IN_ONE_CHUNK)
        pipeline = replace(pipeline, partner=partner)
    return replace(run, pipeline=pipeline, in_one_chunk=IN_ONE_CHUNK)


def take_over_recompute(args: argparse.Namespace, run: Run) -> float:
    """Replace Megatron's full recompute by recompute inside the schedules, if layers can share schedules.

    Megatron's recompute stays with ``--distribute-saved-activations`` and in hybrid models. Returns how many
    layers are recomputed (``AMPipeContext.recomputed_layers``).
    """
    shares = run.settings.automatic or run.pipeline.stack != 1
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


def adjust_arguments(args: argparse.Namespace, run: Run, *, on_gpu: bool) -> dict[str, str]:
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
    for flag in run.disabled_flags:
        changes[flag] = f"switched off: {SWITCHED_OFF[flag]}"
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


def find_gate(settings: Settings, args: argparse.Namespace) -> type | None:
    """The router class of a run's MoE layers (``--ampipe-router``); None for Megatron's own.

    Raises :class:`BadInput` if the class does not fit the other flags.
    """
    name, setting = settings.router, SETTING["router"]
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
    reason, by_chunk = getattr(gate, "needs_all_tokens", None), settings.router_scope == "chunk"
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
