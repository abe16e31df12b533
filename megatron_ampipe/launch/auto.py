"""``--ampipe-degree auto``: chooses the pipeline of the blocks, between iterations.

With a cluster file, the planner chooses; without one, :mod:`.trials` chooses during the first iterations of
each input size. Every rank must issue the same collectives, so measured times are reduced over all ranks, and
plans are compared between ranks. After a choice, only the input shape is reduced, every
:data:`SHAPE_INTERVAL` iterations. ``--ampipe-save-plan`` saves the choice for the input shape of the flags.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_ampipe.errors import RunFailed, global_rank
from megatron_ampipe.launch.hooks import Hook
from megatron_ampipe.launch.planned import saved_form
from megatron_ampipe.launch.run import Run
from megatron_ampipe.launch.trials import (
    Planner,
    Shape,
    SizeRanges,
    Trials,
    candidates,
    most_iterations,
)
from megatron_ampipe.layers.context import AMPipeContext
from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.schedule import Direction, Exchange, Pipeline, to_text

SHAPE_INTERVAL = 50
"""Iterations between two reductions of the input shape, while no pipelines are tried."""


class AutoDegree(Hook):
    """Chooses a pipeline once for each input shape that occurs in training.

    Args:
        context: Where the pipeline is set.
        planner: Chooses without measuring; if None, pipelines are tried in the first iterations.
        exchanges: The exchanges that are tried.
        in_one_chunk: Name of a further schedule that is tried at degree 1; None for none.
        keep: Called with every new choice and its shape, on every rank.
        rows_of_tile: Rows of an FP8 tile for a batch size; all chunks are multiples of it.
        warm_up: Iterations with each pipeline before it is timed.
    """

    def __init__(
        self,
        context: AMPipeContext,
        *,
        planner: Planner | None,
        exchanges: Sequence[Exchange] = (Exchange.ROWS,),
        in_one_chunk: str | None = None,
        keep: Callable[[Shape, Plan], None] = lambda shape, choice: None,
        rows_of_tile: Callable[[int], int] = lambda batch: 1,
        warm_up: int = 1,
    ) -> None:
        self._context, self._planner = context, planner
        self._exchanges, self._in_one_chunk = exchanges, in_one_chunk
        self._keep, self._rows_of_tile = keep, rows_of_tile
        self._warm_up = warm_up
        self._was_repeated = False
        self._ranges = SizeRanges()
        self._choices: dict[Shape, Plan] = {}
        self._shape: Shape | None = None
        self._trials: Trials | None = None
        self._until_compared = 0
        self._next = Plan(pipeline=context.pipeline, reason="from the flags")

    def start(self, shape: Shape, choice: Plan) -> None:
        """Begin with the planner's choice for the input shape of the flags, before process groups exist."""
        self._shape, self._next = shape, choice
        self._choices[shape] = choice
        self._keep(shape, choice)
        self._use_next()

    def before_step(self) -> None:
        """Set the next pipeline; measure it if pipelines are being tried."""
        # Set here, not right after the choice: an iteration is logged after its step, with its pipeline.
        self._use_next()
        self._was_repeated = False
        passes = self._context.recorder.passes
        passes.restart()
        passes.measuring = self._trials is not None

    def before_repeat(self) -> None:
        """The times of this step are not used: they are of passes with other rows, and of a repeat."""
        self._was_repeated = True

    def after_step(self) -> None:
        """Choose the pipeline of the next iteration."""
        self._context.recorder.passes.measuring = False
        if self._until_compared:
            # Rare, because it is a collective that all ranks and devices wait for; equal on all ranks.
            self._until_compared -= 1
        else:
            self._decide()

    def _use_next(self) -> None:
        self._context.pipeline = self._next.pipeline
        self._context.predicted_ms = self._next.stages_ms

    def _decide(self) -> None:
        passes = self._context.recorder.passes
        times_us = [passes.sum_us(direction) for direction in Direction]
        *times_us, rows, batch = _largest_over_ranks([*times_us, *passes.shape])
        shape = (int(rows), int(batch))
        if 0 in shape:
            # No rank has run a block, for example because Megatron skipped the iteration.
            return
        if shape != self._shape:
            self._begin_shape(shape)
        elif self._trials is not None and not self._was_repeated:
            self._trials.add_times(*times_us)
        if self._trials is not None:
            self._next = Plan(pipeline=self._trials.pipeline, reason="a trial")
            if self._trials.choice is not None:
                self._settle(self._trials.choice)
        if self._trials is None:
            self._until_compared = SHAPE_INTERVAL - 1

    def _begin_shape(self, shape: Shape) -> None:
        """Handle a new input shape. The times of this iteration are not used."""
        self._shape, self._trials = shape, None
        # The prediction is for another shape than that of this iteration, which will be logged.
        self._context.predicted_ms = None
        degrees, tokens = candidates(shape[0], self._rows_of_tile(shape[1])), math.prod(shape)
        if shape in self._choices:
            self._settle(self._choices[shape])
        elif self._planner is not None:
            choice = self._planner(shape)
            require_agreement(choice.pipeline)
            self._settle(choice)
        elif (known := self._ranges.find(tokens, degrees)) is not None:
            pipeline, sizes = known
            self._settle(Plan(pipeline=pipeline, reason=f"as for {sizes}"))
        else:
            self._begin_trials(shape, self._ranges.left(tokens, degrees))

    def _begin_trials(self, shape: Shape, degrees: Sequence[int]) -> None:
        given = self._context.given
        cut = [
            replace(given, degree=degree, backward_degree=degree, exchange=exchange)
            for exchange in self._exchanges
            for degree in degrees
        ]
        uncut = []
        if self._in_one_chunk is not None:
            uncut = [
                replace(pipeline, schedule=self._in_one_chunk) for pipeline in cut if pipeline.degree == 1
            ]
        pipelines = list(dict.fromkeys([*uncut, *cut]))
        self._trials = Trials(pipelines, warm_up=self._warm_up)
        tried = ", ".join(map(str, degrees))
        most = most_iterations(len(pipelines), warm_up=self._warm_up)
        print_on_first_rank(
            f"input of {shape[0]} rows x {shape[1]}: trying degrees {tried}, one per iteration, for "
            f"up to {most} iterations; for a short run, set the degree: --ampipe-degree 2"
        )

    def _settle(self, choice: Plan) -> None:
        assert self._shape is not None
        self._trials = None
        self._next = choice
        if self._choices.get(self._shape) is not choice:
            self._choices[self._shape] = choice
            self._ranges.add(math.prod(self._shape), choice.pipeline)
            rows, batch = self._shape
            print_on_first_rank(f"input of {rows} rows x {batch}: {choice.pipeline}: {choice.reason}")
            self._keep(self._shape, choice)


class Agreement(Hook):
    """Compares the pipelines of all ranks before the first step.

    Each rank has read a plan file, or called the function of a custom schedule, whose orders are
    ``custom_orders``.
    """

    def __init__(self, pipeline: Pipeline, custom_orders: Sequence[str] = ()) -> None:
        self._pipeline: Pipeline | None = pipeline
        self._custom_orders = tuple(custom_orders)

    def before_step(self) -> None:
        """Compare once."""
        if self._pipeline is not None:
            require_agreement(self._pipeline, self._custom_orders)
            self._pipeline = None


def require_agreement(pipeline: Pipeline, custom_orders: Sequence[str] = ()) -> None:
    """Compare the pipeline that each rank chose, and its custom orders, with those of rank 0.

    Raises:
        RunFailed: on every rank, if the pipelines or orders of some ranks differ.
    """
    orders = tuple(custom_orders) if pipeline.order is None else (to_text(pipeline.order),)
    decision = (str(pipeline), orders)
    decisions = [decision] * dist.get_world_size()
    dist.all_gather_object(decisions, decision)
    for rank, other in enumerate(decisions):
        if custom_orders and other[0] == decisions[0][0] and other[1] != decisions[0][1]:
            raise RunFailed(
                f"{pipeline.schedule} returns another order on rank {rank} than on rank 0. It may depend on "
                "nothing but its arguments, and all ranks need the same file, where every rank can read it."
            )
    for rank, decision in enumerate(decisions):
        if decision != decisions[0]:
            raise RunFailed(
                f"rank {rank} runs '{decision[0]}' and rank 0 '{decisions[0][0]}': they read different "
                "files. Put the file where every rank can read it, and give its full path."
            )


def print_on_first_rank(line: str) -> None:
    """Print a line to the log, on rank 0."""
    if global_rank() == 0:
        print(f"AMPipe: {line}", flush=True)


def _largest_over_ranks(numbers: list[float]) -> list[float]:
    """The maximum of each number over all ranks, the same on all of them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    reduced = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
    return [float(number) for number in reduced.tolist()]


def save_choice(run: Run, shape: Shape, choice: Plan) -> None:
    """Write the choice for the input shape of the flags as a plan file, on rank 0.

    If that fails, training continues with the choice.
    """
    path = run.settings.save_plan
    is_of_flags = shape == run.resolved_environment.shape
    if path is None or not is_of_flags or global_rank() != 0:
        return
    try:
        head = "chosen by --ampipe-degree auto; for --ampipe-plan FILE"
        saved_form(run, choice).write(Path(path), head=head)
    except RunFailed as error:
        print_on_first_rank(f"a restart chooses again: {error}")
