"""``--ampipe-degree auto`` on ranks whose clocks and loads differ randomly; reports each rank's choices."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable
from typing import Any

import torch

from tests.dist.cases import AUX, Case
from tests.dist.worker import report, start, use_groups

SEEDS = (1, 2)
LONG, SHORT = 64, 16


def main() -> None:
    rank, _ = start()
    use_groups()
    from megatron_ampipe.launch import auto
    from megatron_ampipe.runtime import recorder

    # Shapes are compared in every iteration.
    interval, auto.SHAPE_INTERVAL = auto.SHAPE_INTERVAL, 1
    results = []
    for seed in SEEDS:
        noise = random.Random(1000 * seed + rank)
        recorder.time = _Clock(noise)
        results.append(_train(rank, noise))
    recorder.time = time
    auto.SHAPE_INTERVAL = interval
    report({"runs": results, "refusal": _disagree(rank), "reduced": _settle()})


def around(hook: Any, train_step: Callable[..., object]) -> Callable[..., object]:
    """A training step with one hook."""
    from megatron_ampipe.launch.hooks import Hooks

    hooks = Hooks()
    hooks.add(hook)
    return hooks.around_step(train_step)


class _Clock:
    """A clock with a random rate and random jumps, so that the measurements of the ranks differ widely."""

    def __init__(self, noise: random.Random) -> None:
        self._noise, self._pace, self._jitter_s = noise, 1 + noise.random(), noise.random() * 5e-3

    def perf_counter(self) -> float:
        return time.perf_counter() * self._pace + self._noise.random() * self._jitter_s


def _train(rank: int, noise: random.Random) -> dict[str, object]:
    """Train with three shapes, of which the third is already known."""
    from megatron_ampipe.launch.auto import AutoDegree
    from megatron_ampipe.launch.trials import Trials, candidates
    from megatron_ampipe.schedule import Direction, Pipeline

    layer, context = _layer()
    said: list[str] = []
    auto = AutoDegree(context, planner=None, say=said.append)
    passes = context.recorder.passes
    outputs: dict[int, torch.Tensor] = {}
    difference = 0.0
    alone = Trials([Pipeline.of(degree) for degree in candidates(LONG)])
    megatrons: set[int] = set()
    layer.mlp.register_forward_pre_hook(lambda *_: megatrons.add(context.pipeline.num_chunks))
    timed: set[tuple[int, bool]] = set()

    def train_step(rows: int) -> None:
        nonlocal difference
        ran.append(f"{context.pipeline.degree}:{context.pipeline.backward_degree}")
        time.sleep(noise.random() * 3e-3)
        generator = torch.Generator().manual_seed(rank)
        hidden = torch.randn(rows, 1, 32, generator=generator).requires_grad_()
        output, _ = layer(hidden_states=hidden, attention_mask=None)
        output.sum().backward()
        both = torch.cat([output.detach(), hidden.grad])
        first = outputs.setdefault(rows, both)
        difference = max(difference, float((both - first).abs().max() / first.abs().max()))

    ran: list[str] = []
    step = around(auto, train_step)
    for iteration, rows in enumerate([LONG] * 26 + [SHORT] * 12 + [LONG] * 2):
        step(rows)
        if 0 < iteration < 5:  # every degree once
            timed.add((context.pipeline.num_chunks, all(passes.sum_us(direction) for direction in Direction)))
        if 0 < iteration < 26:
            alone.add_times(*(passes.sum_us(direction) + noise.random() * 1e3 for direction in Direction))
    return {
        "ran": ran,
        "said": said,
        "difference": difference,
        "alone": str(alone.choice),
        "megatrons": sorted(megatrons),
        "timed": sorted(timed),
    }


def _settle() -> dict[str, list[int]]:
    """The iterations in which numbers are reduced, of a run that tries and of one that has a plan."""
    from megatron_ampipe.launch import auto as module
    from megatron_ampipe.launch.auto import SHAPE_INTERVAL, AutoDegree
    from megatron_ampipe.launch.trials import Choice
    from megatron_ampipe.schedule import Pipeline

    reduce, reduced = module._largest_over_ranks, []

    def counted(numbers: list[float]) -> list[float]:
        reduced.append(iteration)
        return reduce(numbers)

    module._largest_over_ranks = counted
    found = {}
    for name, planner in (("tried", None), ("planned", lambda shape: Choice(Pipeline.of(2), "a plan"))):
        layer, context = _layer()
        auto = AutoDegree(context, planner=planner, say=lambda line: None)
        auto.start((SHORT, 1))
        step = around(auto, functools.partial(layer, attention_mask=None))
        reduced = []
        for iteration in range(2 * SHAPE_INTERVAL + 20):
            step(hidden_states=torch.randn(SHORT if iteration < SHAPE_INTERVAL + 5 else 2 * SHORT, 1, 32))
        found[name] = reduced
    module._largest_over_ranks = reduce
    return found


def _layer() -> tuple[torch.nn.Module, object]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module

    from megatron_ampipe.layers.context import AMPipeContext
    from megatron_ampipe.layers.layer import pipelined
    from megatron_ampipe.schedule.pipeline import AMPipeConfig
    from tests.dist.blocks import transformer_config

    config = transformer_config(Case("auto", world_size=4, model=AUX))
    context = AMPipeContext(AMPipeConfig(degree="auto"), kernel="exact")
    torch.manual_seed(7)
    spec = pipelined(get_gpt_layer_local_spec(4, False, normalization="RMSNorm"), context)
    return build_module(spec, config=config, layer_number=1), context


def _disagree(rank: int) -> str:
    """The last rank reads a different plan."""
    from megatron_ampipe.errors import RunFailed
    from megatron_ampipe.launch.auto import Agreement
    from megatron_ampipe.schedule import Pipeline

    try:
        Agreement(Pipeline.of(4 if rank == 3 else 2)).before_step([])
    except RunFailed as error:
        return str(error)
    return "ran"


if __name__ == "__main__":
    main()
