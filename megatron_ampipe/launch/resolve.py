"""Decides how a run is pipelined, from Megatron's validated arguments, before any process group exists.

The second step of a :class:`~megatron_ampipe.launch.run.Run`: all combinations that AMPipe does not support
are refused, a plan, a planner and a memory budget choose, and Megatron's arguments are changed where
pipelined blocks replace what they ask for. What is left to decide are the trials of ``--ampipe-degree auto``.

Below the entries of a launch, only this module, and the functions of arguments in ``environment.py`` and
``refusals`` that it calls, see Megatron's arguments.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import replace

from megatron_ampipe import compat
from megatron_ampipe.attention.kernels import choose_kernel
from megatron_ampipe.block.settings import SETTING, Settings
from megatron_ampipe.launch.captured import (
    MAMBA,
    CapturedStages,
    captured_modules,
    captured_stages,
    no_partner,
)
from megatron_ampipe.launch.environment import (
    block_of_args,
    environment_of,
    features_of_args,
    high_priority_groups,
    layers_split_weights,
    packs_documents,
    partnered_share,
    passes_in_flight,
    reads_masks,
)
from megatron_ampipe.launch.planned import choose_memory, custom_orders, plan_of_run, planner_of
from megatron_ampipe.launch.refusals import refuse_unsupported, refuse_with_token_ids
from megatron_ampipe.launch.run import (
    RELAXES_MAX_CONNECTIONS_CHECK,
    Run,
    why_switched_off,
    without_partner,
)
from megatron_ampipe.layers.gates import TokenIdRouter, load_gate
from megatron_ampipe.plan.cluster import find_cluster, read_cluster
from megatron_ampipe.schedule import IN_ONE_CHUNK, is_custom
from megatron_ampipe.schedule.features import uses_ring_attention


def resolve(args: argparse.Namespace, run: Run, *, adjustments: Mapping[str, str], on_gpu: bool) -> Run:
    """Check Megatron's validated arguments against all rules, and complete a run of :func:`requested`.

    ``adjustments`` are the flags that the host platform has added. Changes ``args`` where pipelined blocks
    replace what they ask for.

    Raises:
        BadInput: a combination is not supported, or a plan, budget or router does not fit the model.
    """
    if run.pipelined:
        # Megatron has validated its arguments.
        setattr(args, RELAXES_MAX_CONNECTIONS_CHECK, False)
        run = _with_possible_partner(args, run)
    gate = refuse(args, run)
    run = replace(run, gate=gate, adjustments=adjustments)
    if run.pipelined:
        if run.settings.rows == "fixed" and on_gpu and not args.bf16:
            rule = "without --bf16, products over experts make the host of a GPU wait for their sizes"
            raise SETTING["rows"].refuse("fixed", rule, "Add --bf16, or use --ampipe-rows exact.")
        run = _with_changed_arguments(args, run, on_gpu=on_gpu)
    run = replace(run, environment=environment_of(args, run.settings, on_gpu=on_gpu))
    if run.pipelined:
        documents = run.resolved_environment.documents is not None
        kernel = choose_kernel(
            args, local=args.transformer_impl == "local", on_gpu=on_gpu, documents=documents
        )
        run = replace(run, attention=(kernel.name, kernel.reason))
    run = _with_predictions(args, run)
    if run.plan is not None:
        choice = plan_of_run(run)
        run = replace(run, choice=choice, pipeline=choice.pipeline)
    return replace(run, custom_orders=custom_orders(run)) if run.pipelined else run


def _with_possible_partner(args: argparse.Namespace, run: Run) -> Run:
    """The run with chunks alone, where only Megatron's flag asks for a partner, and there can be none."""
    reason = no_partner(args) if "partner" in run.implied else None
    if reason is None:
        return run
    args.ampipe_partner = None
    return without_partner(run, reason)


def refuse(args: argparse.Namespace, run: Run) -> type | None:
    """Apply the refusals of flags and models, except what depends on the device.

    Those of files follow when they are read and compared.

    Returns the router class of ``--ampipe-router``; None for Megatron's own. Raises :class:`BadInput`.
    """
    gate = find_gate(run.settings, args)
    if run.pipelined:
        refuse_unsupported(run.settings, run.pipeline, args)
    folder = run.settings.routing_dir
    if folder is not None and (args.skip_train or not args.num_experts):
        rule = f"has no effect {'with --skip-train' if args.skip_train else 'without --num-experts'}"
        raise SETTING["routing_dir"].refuse(folder, rule, "Leave it out.")
    return gate


def _with_changed_arguments(args: argparse.Namespace, run: Run, *, on_gpu: bool) -> Run:
    """The run with what pipelined blocks take over from Megatron, whose arguments are changed."""
    changed = adjust_arguments(args, run, on_gpu=on_gpu)
    # Before recompute is taken over: what runs again is not captured.
    graphs = take_over_graphs(args)
    return replace(
        run,
        adjustments={**run.adjustments, **changed},
        recomputed_layers=take_over_recompute(args, run),
        graphs=graphs,
    )


def _with_predictions(args: argparse.Namespace, run: Run) -> Run:
    """The run with its block, if anything is predicted of it, and with what follows from a prediction.

    The memory strategy fits the budget, and a planner chooses the pipeline. Reads the cluster's file.
    """
    settings = run.settings
    if run.plan is not None or settings.save_plan is not None or is_custom(run.pipeline.schedule):
        run = replace(run, features=features_of_args(args, settings))
    named = (run.plan, settings.save_plan, settings.cluster, settings.memory_budget)
    is_predicted = any(value is not None for value in named)
    if not is_predicted:
        return _with_one_chunk(args, run)
    # Schedules recompute in place of Megatron, where they have taken it over.
    block, layers = block_of_args(args, settings, recomputes=run.recomputed_layers > 0)
    block = replace(block, captures_passes=run.graphs.of_passes)
    run = replace(run, block=block)
    cluster = None
    if settings.cluster is not None:
        cluster = read_cluster(find_cluster(settings.cluster, flag="--ampipe-cluster"))
    if settings.memory_budget is not None:
        chosen = choose_memory(run, layers, cluster, passes=passes_in_flight(args, settings))
        run = replace(run, pipeline=chosen.pipeline, memory_reason=chosen.reason)
    run = _with_one_chunk(args, run)
    if settings.automatic and cluster is not None:
        planner = planner_of(run, cluster, layers, partnered_share=partnered_share(args, settings))
        run = replace(run, planner=planner, choice=planner(run.resolved_environment.shape))
    return run


def _with_one_chunk(args: argparse.Namespace, run: Run) -> Run:
    """Overlap weight gradients with transfers, if the user names no schedule and the layers support it."""
    if not run.pipelined or "schedule" in run.given or not layers_split_weights(args):
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
    args.recompute_granularity = None
    first: int = args.recompute_num_layers
    return first if args.recompute_method == "block" else math.inf


def take_over_graphs(args: argparse.Namespace) -> CapturedStages:
    """Replace Megatron's CUDA graphs of layers by graphs of the stages of pipelined blocks.

    Graphs of Mamba layers stay Megatron's. Returns what is captured.
    """
    graphs = captured_stages(args)
    if not captured_modules(args):
        return graphs
    # In older versions of Megatron, the second is the only one.
    names = [name for name in ("cuda_graph_modules", "cuda_graph_scope") if hasattr(args, name)]
    for place, name in enumerate(names):
        kept = [MAMBA] if graphs.keeps_mamba and place == 0 else []
        setattr(args, name, compat.graph_modules(kept))
    if not graphs.keeps_mamba:
        args.cuda_graph_impl = "none"
        # Megatron derives it from the implementation, and checks it again later.
        if hasattr(args, "inference_cuda_graph_scope"):
            args.inference_cuda_graph_scope = None
    return graphs


def adjust_arguments(args: argparse.Namespace, run: Run, *, on_gpu: bool) -> dict[str, str]:
    """Change arguments as pipelined blocks need them. Returns the changed flags, each with the reason.

    Arguments that cannot be changed without another result are refused instead (``refusals``).
    """
    changes: dict[str, str] = {}
    if args.create_attention_mask_in_dataloader and not reads_masks(args):
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
        changes[flag] = f"switched off: {why_switched_off(run, flag)}"
    in_ring = uses_ring_attention(args)
    modes = args.cp_comm_type if isinstance(args.cp_comm_type, list) else [args.cp_comm_type]
    others = [mode for mode in dict.fromkeys(modes) if mode != "all_gather"]
    if args.context_parallel_size > 1 and others and not in_ring:
        reason = f"in pipelined blocks, in place of {' and '.join(others)}: the same function"
        changes["--cp-comm-type all_gather"] = reason
    if on_gpu:
        given = args.high_priority_stream_groups
        missing = [name for name in high_priority_groups(args) if name not in given]
        if missing:
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
