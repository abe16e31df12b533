"""Everything that ``ampipe profile`` measures, on one rank, in the order in which all ranks measure it.

Called by :mod:`.profile_worker` on the ranks that the command started, and by the command under torchrun.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from megatron_ampipe.runtime.executors import demote_gloo_threads
from megatron_ampipe.tools.measuring.blocks import BlockFactory
from megatron_ampipe.tools.measuring.grid import Case
from megatron_ampipe.tools.profiling.block_times import block_times
from megatron_ampipe.tools.profiling.compute import Computation
from megatron_ampipe.tools.profiling.timing import Stopwatch
from megatron_ampipe.tools.profiling.traffic import Traffic, link_groups


def measure(
    case: Case,
    *,
    rank: int,
    num_ranks: int,
    ranks_per_node: int,
    turns: int,
    repeats: int,
    on_cuda: bool,
    seed: int,
    progress: Callable[[], None],
    alive: Callable[[], None],
) -> dict[str, Any]:
    """Measure around one block.

    Args:
        case: Whose sizes are measured.
        rank: Of this process.
        num_ranks: Over which experts are spread.
        ranks_per_node: Of them on one node.
        turns: In how many turns ranks time their computation: as many as share a core.
        repeats: Timed calls of each operation.
        on_cuda: Whether there is a GPU.
        seed: Of weights.
        progress: Called after each step.
        alive: Called in between, about once a second.

    Returns:
        ``samples``, ``slowdowns``, ``block`` (:func:`.block_times.block_times`), ``kernel`` and
        ``fused_gradients``.
    """
    watch = Stopwatch(repeats=repeats, on_cuda=on_cuda, alive=alive)
    factory = BlockFactory(case, rank=rank, num_ranks=num_ranks, on_cuda=on_cuda, seed=seed)
    compute = Computation(case, kernel=factory.kernel, on_cuda=on_cuda)
    traffic = Traffic(case, watch=watch)
    links = link_groups(ranks_per_node)
    demote_gloo_threads()
    samples = []
    for turn in range(turns):
        watch.meet()
        if rank % turns == turn:
            # Ranks that share a core would be timed together or alone by chance. What sharing costs is in the
            # stages of the block, which all ranks run at the same time.
            samples = watch.samples(list(compute.probes()))
    watch.meet()
    progress()
    samples += watch.samples(list(traffic.probes(links)))
    progress()
    # On the links where the longest transfers are.
    slowdowns = traffic.slowdowns(links[-1].exchange)
    progress()
    block = block_times(case, factory, watch=watch, progress=progress)
    return {
        "samples": [asdict(sample) for sample in samples],
        "slowdowns": slowdowns,
        "block": block,
        "kernel": factory.kernel,
        "fused_gradients": factory.fused_gradients,
    }
