"""Chooses what the experts keep so that a pass fits into a budget: ``--ampipe-memory auto``.

Every strategy does more work than the one before it (``schedule.STRATEGIES``), so the fastest that fits is
the first. Decided from sizes alone, before any layer is built, identically on all ranks. Called by
:mod:`.attach`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.memory_size import FLAG, parse_size, size_to_text
from megatron_ampipe.launch.planned import stage_of_args, workload_of_args
from megatron_ampipe.plan.memory import peak_bytes
from megatron_ampipe.schedule import STRATEGIES, Pipeline


@dataclass(frozen=True, slots=True)
class MemoryChoice:
    """A strategy and why.

    Attributes:
        strategy: One of ``schedule.STRATEGIES``.
        reason: One sentence, for the start-up table.
    """

    strategy: str
    reason: str


def choose_memory(args: argparse.Namespace, pipeline: Pipeline, budget: str) -> MemoryChoice:
    """The fastest strategy whose predicted peak fits.

    Counted are the activations of the layers of a pipeline stage, of all micro-batches that wait for their
    backward; not the embedding and the logits, weights, gradients and the optimizer.

    Args:
        args: Megatron's validated arguments.
        pipeline: Its degrees; if they are chosen later, two chunks are assumed.
        budget: The value of ``--ampipe-memory-budget``.

    Raises:
        BadInput: none fits, or the budget is no size.
    """
    limit = parse_size(budget)
    workload, num_layers = workload_of_args(args, None), stage_of_args(args).num_layers * in_flight(args)
    peaks = {
        strategy: peak_bytes(
            workload,
            forward_degree=max(2, pipeline.degree),
            backward_degree=max(2, pipeline.backward_degree),
            num_layers=num_layers,
            memory=strategy,
            local=args.transformer_impl == "local",
        )
        for strategy in STRATEGIES
    }
    fitting = [strategy for strategy, peak in peaks.items() if peak <= limit]
    least = min(peaks, key=peaks.__getitem__)
    if not fitting:
        raise BadInput(
            FLAG,
            budget,
            rule=f"is met by no strategy: {least} holds least, and is predicted to hold "
            f"{size_to_text(peaks[least])}",
            remedy=f"Use at least {FLAG} {size_to_text(peaks[least])}, --recompute-granularity full, a "
            "shorter sequence, or more ranks.",
        )
    chosen = fitting[0]
    others = ", ".join(f"{name} {size_to_text(peak)}" for name, peak in peaks.items() if name != chosen)
    return MemoryChoice(
        chosen,
        f"the fastest within {budget}: predicted peak of the layers' activations "
        f"{size_to_text(peaks[chosen])} ({others})",
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
