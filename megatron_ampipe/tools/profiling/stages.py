"""A real block, stage by stage and as a whole, and Megatron's own: what is left beyond their operations.

Built, and its stages run alone, as ``ampipe bench`` does it. Called by :mod:`.measure`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_ampipe.runtime.executors import SequentialExecutor
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.tools.benchmark.blocks import DTYPES, BlockFactory
from megatron_ampipe.tools.benchmark.grid import Case
from megatron_ampipe.tools.benchmark.job import Cut, Variant
from megatron_ampipe.tools.benchmark.stage_times import stage_times
from megatron_ampipe.tools.profiling.timing import WARMUP, Stopwatch

DEGREES = (2, 4, 8)


def block_times(
    case: Case, factory: BlockFactory, *, watch: Stopwatch, progress: Callable[[], None]
) -> dict[str, Any]:
    """Microseconds of a block's parts on this rank.

    Returns:
        ``stages``: by degree, direction and stage, the median of the stage alone; ``around``: by degree and
        direction, of what a pass spends outside its stages; ``stock``: of Megatron's own layer; ``issue``: of
        the host to issue one stage (0 where the host computes).
    """
    shape = (case.sequence_length, case.batch, case.hidden)
    device = "cuda" if watch.on_cuda else "cpu"
    inputs, gradient = (torch.randn(shape, device=device, dtype=DTYPES[case.dtype]) for _ in range(2))

    def run(layer: torch.nn.Module) -> tuple[float, float, float]:
        """Microseconds forward and backward, and of the host to issue the forward pass."""
        for parameter in layer.parameters():
            parameter.grad = None
        hidden: Tensor = inputs.detach().requires_grad_()
        watch.meet()
        begin = time.perf_counter()
        output, _ = layer(hidden_states=hidden, attention_mask=None)
        issued_us = (time.perf_counter() - begin) * 1e6
        forward_us = watch.since(begin)
        begin = time.perf_counter()
        output.backward(gradient)
        return forward_us, watch.since(begin), issued_us

    def medians(layer: torch.nn.Module) -> tuple[dict[str, float], float]:
        for _ in range(WARMUP):
            run(layer)
        times = [run(layer) for _ in range(watch.repeats)]
        progress()
        forward, backward, issued = (statistics.median(column) for column in zip(*times, strict=True))
        return {"forward": forward, "backward": backward}, issued

    stock, _ = medians(factory.stock)
    found: dict[str, Any] = {"stock": stock, "stages": {}, "around": {}, "issue": 0.0}
    for degree in DEGREES:
        variant = Variant("ampipe", Cut(degree))
        layer, recorder, _ = factory.build_timed(variant, num_passes=watch.repeats + WARMUP)
        recorder.start_iteration(1)
        medians(layer)
        found["stages"][str(degree)] = _medians_of_stages(recorder)
        recorder = Recorder(num_iterations=1)
        recorder.start_iteration(1)
        layer = factory.build(variant, recorder=recorder, executor=SequentialExecutor())
        whole, _ = medians(layer)
        in_stages = _medians_of_stages(recorder)
        found["around"][str(degree)] = {
            direction: max(0.0, whole[direction] - sum(in_stages[direction].values())) for direction in whole
        }
    if watch.on_cuda:
        num_stages = len(found["stages"]["8"]["forward"])
        found["issue"] = medians(factory.build(Variant("ampipe", Cut(8))))[1] / num_stages
    return found


def _medians_of_stages(recorder: Recorder) -> dict[str, dict[str, float]]:
    return {
        direction: {stage: statistics.median(passes[WARMUP:]) for stage, passes in stages.items()}
        for direction, stages in stage_times(recorder).items()
    }
