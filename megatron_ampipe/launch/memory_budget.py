"""Chooses what the experts keep so that a pass fits into a budget: ``--ampipe-memory auto``.

Decided from sizes, and from the figures of a cluster file if there is one, before any layer is built,
identically on all ranks.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from megatron_ampipe.block.named_values import parse_size, size_to_text
from megatron_ampipe.block.settings import SETTING
from megatron_ampipe.launch.planned import block_of_args, cluster_of_flag, stage_of_args
from megatron_ampipe.plan.memory import peak_bytes
from megatron_ampipe.plan.planner import Kept, by_work, fitting, simulated
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.schedule import KEEP, STRATEGIES, Pipeline
from megatron_ampipe.schedule.features import boundary


@dataclass(frozen=True, slots=True)
class MemoryChoice:
    """What is kept, as ``Pipeline.memory``, and why: one sentence, for the start-up table."""

    memory: str
    reason: str


def choose_memory(
    args: argparse.Namespace,
    pipeline: Pipeline,
    budget: str,
    cluster_file: str | None = None,
    *,
    automatic: bool = False,
) -> MemoryChoice:
    """The fastest combination of strategies whose predicted peak fits.

    Counted are the activations of the layers of a pipeline stage, of all micro-batches that wait for their
    backward; not the embedding and the logits, weights, gradients and the optimizer.

    Args:
        args: Megatron's validated arguments.
        pipeline: How blocks run.
        budget: The value of ``--ampipe-memory-budget``.
        cluster_file: The value of ``--ampipe-cluster``.
        automatic: The degree is chosen later: two chunks are assumed, which keep the same.

    Raises:
        BadInput: none fits, or the budget is no size, or the cluster file is wrong.
    """
    limit = parse_size(budget)
    block, layers = block_of_args(args, None), stage_of_args(args)
    block = replace(block, exchange=pipeline.exchange)
    num_layers, passes = layers.num_layers, in_flight(args)
    if automatic:
        pipeline = replace(pipeline, degree=2, backward_degree=2)

    def peak(memory: str) -> float:
        return peak_bytes(
            block,
            replace(pipeline, memory=memory),
            num_layers=num_layers * passes,
            dense_layers={num_layers * index + layer for index in range(passes) for layer in layers.dense},
            local=args.transformer_impl == "local",
        )

    if cluster_file is None:
        compared = "the least work done again"
        kept = [Kept(memory, peak(memory)) for memory in by_work(pipeline.backward_degree)]
    else:
        shares = boundary(args, whole_attention=pipeline.whole_attention) is None
        cluster = cluster_of_flag(cluster_file)
        predictor = Predictor(block, cluster, num_layers=pipeline.stack_of(num_layers) if shares else 1)
        compared = f"the fastest by {cluster_file}"
        kept = simulated(predictor, pipeline, peak)
    if automatic:
        kept = [choice for choice in kept if choice.memory in STRATEGIES]
    chosen = fitting(kept, limit)
    if chosen is None:
        least = min(kept, key=lambda choice: choice.peak_bytes)
        needed = size_to_text(least.peak_bytes)
        setting = SETTING["memory_budget"]
        raise setting.refuse(
            budget,
            f"is too small: the leanest strategy, {least.memory}, needs about {needed}",
            f"Use at least {setting.flag} {needed}, --recompute-granularity full, a shorter sequence, or "
            "more ranks.",
        )
    by_name = {choice.memory: choice for choice in kept}
    slower = ""
    if chosen.time_us is not None and chosen.memory != KEEP:
        keeping = by_name[KEEP].time_us or chosen.time_us
        slower = f", {chosen.time_us / keeping - 1:.1%} slower than keep"
    others = ", ".join(
        f"{name} {size_to_text(by_name[name].peak_bytes)}"
        for name in STRATEGIES
        if name in by_name and name != chosen.memory
    )
    return MemoryChoice(
        chosen.memory,
        f"{compared} within {budget}{slower}: predicted peak of the layers' activations "
        f"{size_to_text(chosen.peak_bytes)} ({others})",
    )


def in_flight(args: argparse.Namespace) -> int:
    """How many micro-batches' passes through a (virtual) pipeline stage wait for their backward at most.

    As in ``megatron.core.pipeline_parallel.schedules``: on the first rank, with warm-up and one in work.
    """
    stages = args.pipeline_model_parallel_size
    virtual = args.virtual_pipeline_model_parallel_size or 1
    passes = -(-args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)) * virtual
    waiting = stages if virtual == 1 else 2 * (stages - 1) + (virtual - 1) * stages + 1
    return int(min(waiting, passes))
