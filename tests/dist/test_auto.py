"""``--ampipe-degree auto`` on ranks whose clocks and loads differ randomly: they choose the same degree."""

import functools
import itertools
import random
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from tests.dist.cases import AUX, Case
from tests.dist.worker import use_groups

RANKS = 4
LONG, SHORT = 64, 16
pytestmark = pytest.mark.ranks(RANKS)


@pytest.fixture(autouse=True, scope="module")
def _groups() -> None:
    use_groups()


def around(hook: Any, train_step: Callable[..., object]) -> Callable[..., object]:
    """A training step with one hook."""
    from megatron_ampipe.launch.hooks import Hooks

    hooks = Hooks()
    hooks.add(hook)
    return hooks.around_step(train_step)


def of_ranks(found: Any) -> list[Any]:
    """What each rank has found."""
    gathered: list[Any] = [None] * RANKS
    torch.distributed.all_gather_object(gathered, found)
    return gathered


class _Clock:
    """A clock with a random rate and random jumps, so that the measurements of the ranks differ widely."""

    def __init__(self, noise: random.Random) -> None:
        self._noise, self._pace, self._jitter_s = noise, 1 + noise.random(), noise.random() * 5e-3

    def perf_counter(self) -> float:
        return time.perf_counter() * self._pace + self._noise.random() * self._jitter_s


def _layer() -> tuple[torch.nn.Module, Any]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module

    from megatron_ampipe.block.settings import Settings
    from megatron_ampipe.layers.context import AMPipeContext
    from megatron_ampipe.layers.layer import pipelined
    from megatron_ampipe.schedule import Pipeline
    from tests.dist.blocks import transformer_config

    config = transformer_config(Case("auto", world_size=RANKS, model=AUX))
    context = AMPipeContext(Settings(degree="auto"), Pipeline.of(1), kernel="exact")
    torch.manual_seed(7)
    spec = pipelined(get_gpt_layer_local_spec(4, False, normalization="RMSNorm"), context)
    return build_module(spec, config=config, layer_number=1), context


def test_it_chooses_once_for_each_shape_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three shapes, of which the third is already known. Trials do not change results."""
    disagreed = [ranks_would_disagree(seed, monkeypatch) for seed in (1, 2)]
    assert any(disagreed), "the noise is too small"


def ranks_would_disagree(seed: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether they would with their own measurements."""
    from megatron_ampipe.launch import auto as module
    from megatron_ampipe.launch.trials import Trials, candidates
    from megatron_ampipe.runtime import recorder
    from megatron_ampipe.schedule import Direction, Pipeline

    rank = torch.distributed.get_rank()
    noise, said, ran = random.Random(1000 * seed + rank), [], []
    # Shapes are compared in every iteration.
    monkeypatch.setattr(module, "SHAPE_INTERVAL", 1)
    monkeypatch.setattr(module, "print_on_first_rank", said.append)
    monkeypatch.setattr(recorder, "time", _Clock(noise))
    megatrons: set[int] = set()
    layer, context = _layer()
    auto, passes = module.AutoDegree(context, planner=None), context.recorder.passes
    outputs: dict[int, torch.Tensor] = {}
    alone = Trials([Pipeline.of(degree) for degree in candidates(LONG)])
    timed: set[tuple[int, bool]] = set()
    call = torch.nn.Module.__call__

    def noted(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module is layer.mlp:
            megatrons.add(context.pipeline.num_chunks)
        return call(module, *args, **kwargs)

    def train_step(rows: int) -> None:
        ran.append(f"{context.pipeline.degree}:{context.pipeline.backward_degree}")
        time.sleep(noise.random() * 3e-3)
        generator = torch.Generator().manual_seed(rank)
        hidden = torch.randn(rows, 1, 32, generator=generator).requires_grad_()
        # A hook would be refused: AMPipe never calls the MoE layer, as Megatron's layer does.
        with mock.patch.object(torch.nn.Module, "__call__", noted):
            output, _ = layer(hidden_states=hidden, attention_mask=None)
        output.sum().backward()
        both = torch.cat([output.detach(), hidden.grad])
        first = outputs.setdefault(rows, both)
        assert (both - first).abs().max() <= 1e-5 * first.abs().max()

    step = around(auto, train_step)
    for iteration, rows in enumerate([LONG] * 26 + [SHORT] * 12 + [LONG] * 2):
        step(rows)
        times = [passes.sum_us(direction) for direction in Direction]
        if 0 < iteration < 5:  # every degree once
            timed.add((context.pipeline.num_chunks, all(times)))
        if 0 < iteration < 26:
            alone.add_times(*(each + noise.random() * 1e3 for each in times))
    # Degree 1 is Megatron's own layer, and timed like the others.
    assert megatrons == {1}
    assert timed == {(1, True), (2, True), (4, True), (8, True)}
    inputs = [line.split(":")[0] for line in said]
    assert inputs == [f"input of {rows} rows x 1" for rows in (LONG, LONG, SHORT, SHORT)], said
    assert {"1:1", "2:2", "4:4", "8:8"} <= set(ran[:26])
    assert set(ran[27:38]) <= {"1:1", "2:2", "1:2", "2:1"}
    # The first iteration of a shape still runs with the previous choice; the next one with its own.
    assert ran[-1] == ran[26]
    assert of_ranks([ran, said]) == [[ran, said]] * RANKS
    return len({*of_ranks(str(alone.choice))}) > 1


def test_nothing_is_reduced_in_every_iteration_once_a_pipeline_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron_ampipe.launch import auto as module
    from megatron_ampipe.plan.plan_file import Plan
    from megatron_ampipe.schedule import Pipeline

    interval, reduce = module.SHAPE_INTERVAL, module._largest_over_ranks
    iterations: list[int] = []

    def counted(numbers: list[float]) -> list[float]:
        iterations.append(iteration)
        return reduce(numbers)

    monkeypatch.setattr(module, "_largest_over_ranks", counted)
    found = []
    for planner in (None, lambda shape: Plan(pipeline=Pipeline.of(2), reason="a plan")):
        layer, context = _layer()
        auto = module.AutoDegree(context, planner=planner)
        if planner is not None:
            auto.start((SHORT, 1), planner((SHORT, 1)))
        step = around(auto, functools.partial(layer, attention_mask=None))
        iterations.clear()
        for iteration in range(2 * interval + 20):
            step(hidden_states=torch.randn(SHORT if iteration < interval + 5 else 2 * SHORT, 1, 32))
        found.append([*iterations])
    tried, planned = found
    assert planned == [0, interval, 2 * interval]
    # Degrees 1 and 2 of 16 rows are tried at first; those of 32 rows once shapes have been compared.
    chosen = tried.index(tried[-1]) + 1
    assert tried == sorted({*tried}) and chosen < 60
    assert {after - before for before, after in itertools.pairwise(tried)} == {1, interval}


def test_ranks_that_read_different_plans_all_stop() -> None:
    from megatron_ampipe.errors import RunFailed
    from megatron_ampipe.launch.auto import Agreement
    from megatron_ampipe.schedule import Pipeline

    rank = torch.distributed.get_rank()
    custom = Pipeline.of(2, schedule="tests.schedules:interleaved")
    Agreement(custom, ["the same"]).before_step()
    with pytest.raises(RunFailed, match=r"^tests\.schedules:interleaved returns another order on rank 2 th"):
        Agreement(custom, ["the same", str(rank == 2)]).before_step()
    agreement = Agreement(Pipeline.of(4 if rank == 3 else 2))
    said = r"^rank 3 runs 'degree 4, schedule ampipe' and rank 0 'degree 2.* where every rank can read it"
    with pytest.raises(RunFailed, match=said):
        agreement.before_step()
