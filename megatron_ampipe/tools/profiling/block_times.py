"""A real block, stage by stage and as a whole, and Megatron's own: what they take beyond their operations.

The block is built, and its stages run alone, as in ``ampipe bench``. Called by :mod:`.measure`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_ampipe.runtime.executors import SequentialExecutor
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.schedule import Direction
from megatron_ampipe.tools.measuring.blocks import DTYPES, BlockFactory
from megatron_ampipe.tools.measuring.grid import Case
from megatron_ampipe.tools.measuring.stage_times import stage_times
from megatron_ampipe.tools.measuring.variant import Cut, Variant
from megatron_ampipe.tools.profiling.timing import WARMUP, Stopwatch

DEGREES = (2, 4, 8)


def block_times(
    case: Case, factory: BlockFactory, *, watch: Stopwatch, progress: Callable[[], None]
) -> dict[str, Any]:
    """Microseconds of a block's parts on this rank.

    Returns:
        ``stages``: by degree, direction and stage, the median of the stage alone; ``around``: by degree and
        direction, of what a pass spends outside its stages; ``stock``: by direction, of Megatron's own layer;
        ``issue``: of the host to issue one stage (0 where the host computes); ``issue_of``: by direction and
        kind, of the host to issue a stage while the device is busy (empty where the host computes).
    """
    rounds = WARMUP + watch.repeats
    runner = _Runner(case, watch)
    alone = {degree: factory.build_timed(_variant(degree), num_passes=rounds) for degree in DEGREES}
    in_order = {degree: Recorder(num_iterations=rounds) for degree in DEGREES}
    layers = {
        degree: factory.build(_variant(degree), recorder=recorder, executor=SequentialExecutor())
        for degree, recorder in in_order.items()
    }
    usual = factory.build(_variant(max(DEGREES)))
    stock, whole, issued = [], {degree: [] for degree in DEGREES}, []
    for number in range(rounds):
        stock.append(runner.run(factory.stock))
        for degree, (layer, recorder, _) in alone.items():
            recorder.start_iteration(number)
            runner.run(layer)
            in_order[degree].start_iteration(number)
            whole[degree].append(runner.run(layers[degree]))
        if watch.on_cuda:
            runner.run(usual)
            issued.append(runner.issued_us)
        progress()
    stages = {str(degree): _medians(stage_times(recorder)) for degree, (_, recorder, _) in alone.items()}
    num_stages = len(stages[str(max(DEGREES))]["forward"])
    return {
        "stock": {way: statistics.median(times[way] for times in stock[WARMUP:]) for way in Direction},
        "stages": stages,
        "around": {str(degree): _outside(whole[degree], in_order[degree]) for degree in DEGREES},
        "issue": statistics.median(issued[WARMUP:]) / num_stages if issued else 0.0,
        "issue_of": alone[max(DEGREES)][2].queue.issued_us(),
    }


class _Runner:
    """Runs a layer forward and backward, always on the same input."""

    def __init__(self, case: Case, watch: Stopwatch) -> None:
        shape = (case.sequence_length, case.batch, case.hidden)
        device = "cuda" if watch.on_cuda else "cpu"
        self._watch = watch
        self._input, self._gradient = (
            torch.randn(shape, device=device, dtype=DTYPES[case.dtype]) for _ in range(2)
        )
        self.issued_us = 0.0
        """Of the last forward pass, how long the host needed to issue it."""

    def run(self, layer: torch.nn.Module) -> dict[Direction, float]:
        """Microseconds of each direction."""
        for parameter in layer.parameters():
            parameter.grad = None
        hidden = self._input.detach().requires_grad_()
        self._watch.meet()
        begin = time.perf_counter()
        output, _ = layer(hidden_states=hidden, attention_mask=None)
        self.issued_us = (time.perf_counter() - begin) * 1e6
        forward_us = self._watch.since(begin)
        begin = time.perf_counter()
        output.backward(self._gradient)
        backward_us = self._watch.since(begin)
        self._watch.give_sign()
        return {Direction.FORWARD: forward_us, Direction.BACKWARD: backward_us}


def _variant(degree: int) -> Variant:
    return Variant("ampipe", Cut.of(degree))


def _medians(times: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    return {
        direction: {stage: statistics.median(passes[WARMUP:]) for stage, passes in stages.items()}
        for direction, stages in times.items()
    }


def _outside(whole: Sequence[dict[Direction, float]], recorder: Recorder) -> dict[str, float]:
    """The median of what passes took beyond the sum of their stages."""
    times = stage_times(recorder)
    found = {}
    for way in Direction:
        in_stages = map(sum, zip(*times[way.value].values(), strict=True))
        beyond = [took[way] - inside for took, inside in zip(whole, in_stages, strict=True)]
        found[way.value] = max(0.0, statistics.median(beyond[WARMUP:]))
    return found
