"""``--ampipe-degree auto``: chooses the pipeline of the blocks, between iterations, and remembers it.

With a cluster file, the planner chooses; without one, :mod:`.trials` chooses during the first iterations of
each size of input. Measured times are reduced over all ranks before they are used, and plans are compared
between the ranks, because every rank must issue the same collectives. Once chosen, only the shape of the
input is reduced, now and then.

The choice for the shape of the flags becomes the plan file of ``--ampipe-save-plan``. What trials chose for
every shape is in :data:`NAME` next to the checkpoints, so that a restart tries no size of input twice.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_ampipe.errors import BadInput, RunFailed
from megatron_ampipe.files.inputs import load
from megatron_ampipe.files.records import read_record, write_record
from megatron_ampipe.launch.hooks import Hook
from megatron_ampipe.launch.planned import made_for_of_args, plan_of_choice
from megatron_ampipe.launch.trials import Choice, Planner, Shape, SizeRanges, Trials, candidates
from megatron_ampipe.layers.context import AMPipeContext
from megatron_ampipe.plan.plan_file import MadeFor, differences
from megatron_ampipe.schedule import Direction, Exchange, Pipeline, to_text
from megatron_ampipe.schedule.pipeline import AMPipeConfig

NAME = "ampipe-degrees.yaml"
SHAPE_INTERVAL = 50
"""Iterations between two comparisons of the ranks' input shapes, while no pipeline is tried."""


class AutoDegree(Hook):
    """Chooses a pipeline once for each shape of input that occurs in training.

    Args:
        context: The pipeline is set in this context.
        planner: Chooses without measuring; if None, pipelines are tried in the first iterations.
        exchanges: What trials choose from.
        in_one_chunk: Name of a second schedule that is tried at degree 1; none if None.
        say: Prints a line to the log; called on every rank.
        keep: Called with every new choice and its shape, on every rank.
        earlier: Returns what an earlier run chose. Called once, on the first rank, which tells the others.
        iterations_left: Returns how many iterations the run has left, including the current one, or None if
            that is unknown. A warning is logged if the run may end before the trials.
    """

    def __init__(
        self,
        context: AMPipeContext,
        *,
        planner: Planner | None,
        exchanges: Sequence[Exchange] = (Exchange.ROWS,),
        in_one_chunk: str | None = None,
        say: Callable[[str], None],
        keep: Callable[[Shape, Choice], None] = lambda shape, choice: None,
        earlier: Callable[[], Sequence[tuple[Shape, Pipeline]]] = tuple,
        iterations_left: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._context, self._planner, self._say = context, planner, say
        self._exchanges, self._in_one_chunk = exchanges, in_one_chunk
        self._keep, self._earlier, self._iterations_left = keep, earlier, iterations_left
        self._ranges = SizeRanges()
        self._choices: dict[Shape, Choice] = {}
        self._shape: Shape | None = None
        self._trials: Trials | None = None
        self._agreed = False
        self._until_compared = 0
        self._next = Choice(context.pipeline, "from the flags")

    def start(self, shape: Shape) -> Choice | None:
        """Plan for the input shape of the flags, before process groups exist; None without a planner."""
        if self._planner is None:
            return None
        self._shape, self._next = shape, self._planner(shape)
        self._choices[shape] = self._next
        self._keep(shape, self._next)
        self._use_next()
        return self._next

    def before_step(self, models: list[Any]) -> None:
        """Run the next pipeline, and measure it while pipelines are tried."""
        if not self._agreed:
            require_agreement(self._context.pipeline)
            # The first rank tells the others, which may not see its files.
            told = [self._earlier() if dist.get_rank() == 0 else ()]
            dist.broadcast_object_list(told, src=0)
            for shape, pipeline in told[0]:
                self._ranges.add(math.prod(shape), pipeline)
            self._agreed = True
        # Set here, not right after the choice: an iteration is logged after its step, with its pipeline.
        self._use_next()
        passes = self._context.recorder.passes
        passes.restart()
        passes.measuring = self._trials is not None

    def after_step(self) -> None:
        """Choose the pipeline of the next iteration."""
        self._context.recorder.passes.measuring = False
        if self._until_compared:
            # The same on all ranks. A comparison is a collective that all ranks and devices wait for.
            self._until_compared -= 1
        else:
            self._decide()

    def _use_next(self) -> None:
        self._context.pipeline = self._next.pipeline
        self._context.predicted_ms = self._next.predicted_ms

    def _decide(self) -> None:
        passes = self._context.recorder.passes
        times_us = [passes.sum_us(direction) for direction in Direction]
        *times_us, rows, batch = _largest_over_ranks([*times_us, *passes.shape])
        shape = (int(rows), int(batch))
        if 0 in shape:
            # No rank ran a block, for example if Megatron skips the iteration.
            return
        if shape != self._shape:
            self._begin_shape(shape)
        elif self._trials is not None:
            self._trials.add_times(*times_us)
        if self._trials is not None:
            self._next = Choice(self._trials.pipeline, "a trial")
            if self._trials.choice is not None:
                self._settle(self._trials.choice)
        if self._trials is None:
            self._until_compared = SHAPE_INTERVAL - 1

    def _begin_shape(self, shape: Shape) -> None:
        """Handle a new input shape. The times of this iteration are not used."""
        self._shape, self._trials = shape, None
        # The prediction does not apply to the shape of this iteration, which will be logged.
        self._context.predicted_ms = None
        degrees, tokens = candidates(shape[0]), math.prod(shape)
        if shape in self._choices:
            self._settle(self._choices[shape])
        elif self._planner is not None:
            choice = self._planner(shape)
            require_agreement(choice.pipeline)
            self._settle(choice)
        elif (known := self._ranges.find(tokens, degrees)) is not None:
            pipeline, sizes = known
            self._settle(Choice(pipeline, f"as for {sizes}"))
        else:
            self._begin_trials(shape, self._ranges.left(tokens, degrees))

    def _begin_trials(self, shape: Shape, degrees: Sequence[int]) -> None:
        given, left = self._context.config.pipeline, self._iterations_left()
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
        self._trials = Trials(list(dict.fromkeys([*uncut, *cut])), iterations_left=left)
        tried = ", ".join(map(str, degrees))
        self._say(f"input of {shape[0]} rows x {shape[1]}: trying degrees {tried}, one per iteration")
        needed = self._trials.most_iterations
        if left is not None and left < needed:
            self._say(
                f"the run has {left} iterations left, and the trials take up to {needed}: it may end "
                "before a degree is chosen. For a short run, set the degree: --ampipe-degree 4"
            )

    def _settle(self, choice: Choice) -> None:
        assert self._shape is not None
        self._trials = None
        self._next = choice
        if self._choices.get(self._shape) is not choice:
            self._choices[self._shape] = choice
            self._ranges.add(math.prod(self._shape), choice.pipeline)
            rows, batch = self._shape
            self._say(f"input of {rows} rows x {batch}: {choice.pipeline}: {choice.reason}")
            self._keep(self._shape, choice)


class Agreement(Hook):
    """Compares the pipelines of all ranks before the first step: each has read a plan file."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline: Pipeline | None = pipeline

    def before_step(self, models: list[Any]) -> None:
        """Compare them once."""
        if self._pipeline is not None:
            require_agreement(self._pipeline)
            self._pipeline = None


def require_agreement(pipeline: Pipeline) -> None:
    """Compare the pipeline that each rank chose with that of rank 0.

    Raises:
        RunFailed: on every rank, if the pipelines of some ranks differ.
    """
    order = "" if pipeline.order is None else to_text(pipeline.order)
    decisions: list[tuple[str, str]] = [("", "")] * dist.get_world_size()
    dist.all_gather_object(decisions, (str(pipeline), order))
    for rank, decision in enumerate(decisions):
        if decision != decisions[0]:
            raise RunFailed(
                f"rank {rank} runs '{decision[0]}' and rank 0 '{decisions[0][0]}': they read different "
                "files. Put the file where every rank can read it, and give its full path."
            )


def print_on_first_rank(line: str) -> None:
    """Print a line to the log."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"AMPipe: {line}", flush=True)


def _largest_over_ranks(numbers: list[float]) -> list[float]:
    """The maximum of each number over all ranks, the same on all of them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    reduced = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
    return [float(number) for number in reduced.tolist()]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChosenSize:
    """A shape of input, and what trials chose for it; see ``Pipeline``."""

    rows: int
    batch: int
    degree: int
    backward_degree: int
    schedule: str
    exchange: Literal["rows", "ranks", "nodes", "2dh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _DegreesFile:
    """The format of :data:`NAME`.

    Attributes:
        flags: What the flags of AMPipe leave to the trials, as text, to compare.
        made_for: The block and its layout.
        sizes: What was chosen.
    """

    format: Literal["ampipe-degrees-1"]
    flags: str
    made_for: MadeFor = field(metadata={"last": True})
    sizes: tuple[_ChosenSize, ...] = field(metadata={"last": True})


class KeptChoices:
    """Writes choices on the first rank, and reads what an earlier run of the same model and flags wrote.

    Args:
        args: Megatron's validated arguments.
        config: AMPipe's settings.
        announced: The shape of input that the flags give, whose choice becomes the plan file.
        exchanges: Those that the trials compare; nothing is remembered where a planner chooses.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        config: AMPipeConfig,
        *,
        announced: Shape,
        exchanges: Sequence[Exchange],
    ) -> None:
        self._args, self._config, self._announced = args, config, announced
        self._flags = f"{config.pipeline}; exchange {' or '.join(exchanges)}"
        self._chosen: dict[Shape, Pipeline] = {}

    def _file(self, folder: str | None) -> Path | None:
        """The file next to checkpoints; None without any, or where they are in an object store."""
        if folder is None or "://" in folder or self._config.cluster is not None:
            return None
        return Path(folder) / NAME

    def read(self) -> Sequence[tuple[Shape, Pipeline]]:
        """What an earlier run chose; nothing if there is no such file, or it is for another run."""
        path = self._file(self._args.load or self._args.save)
        if path is None or not path.is_file():
            return ()
        try:
            top = load(path, what="degrees", remedy="Remove it: degrees are tried again.")
            earlier, _ = read_record(path, _DegreesFile, top)
            chosen = {
                (size.rows, size.batch): replace(
                    self._config.pipeline,
                    degree=size.degree,
                    backward_degree=size.backward_degree,
                    schedule=size.schedule,
                    exchange=Exchange(size.exchange),
                )
                for size in earlier.sizes
            }
        except BadInput as error:
            print_on_first_rank(f"degrees are tried again: {error}")
            return ()
        other = list(differences(earlier.made_for, made_for_of_args(self._args)))
        if earlier.flags != self._flags:
            other.append(f"{earlier.flags} (this run: {self._flags})")
        if other:
            print_on_first_rank(f"degrees are tried again: {path} is for {', '.join(other)}")
            return ()
        self._chosen = chosen
        return tuple(chosen.items())

    def keep(self, shape: Shape, choice: Choice) -> None:
        """Write a new choice. If that fails, training continues: the choice is made, and was logged."""
        if int(os.environ.get("RANK", "0")) != 0:
            return
        head, path = "chosen by --ampipe-degree auto", self._file(self._args.save)
        try:
            if self._config.save_plan is not None and shape == self._announced:
                plan = plan_of_choice(self._args, choice)
                plan.write(Path(self._config.save_plan), head=f"{head}; for --ampipe-plan FILE")
            if path is not None:
                self._chosen[shape] = choice.pipeline
                write_record(path, self._record(), head=f"{head}, for restarts of this run")
        except RunFailed as error:
            print_on_first_rank(f"a restart chooses again: {error}")

    def _record(self) -> _DegreesFile:
        sizes = (
            _ChosenSize(
                rows=rows,
                batch=batch,
                degree=pipeline.degree,
                backward_degree=pipeline.backward_degree,
                schedule=pipeline.schedule,
                exchange=pipeline.exchange.value,
            )
            for (rows, batch), pipeline in self._chosen.items()
        )
        return _DegreesFile(
            format="ampipe-degrees-1",
            flags=self._flags,
            made_for=made_for_of_args(self._args),
            sizes=tuple(sizes),
        )


def iterations_left(args: argparse.Namespace) -> int | None:
    """Iterations of training up to the end of the run, including the current one; None if it is not known."""
    done: int | None = getattr(args, "curr_iteration", None)
    if done is None or not args.train_iters:
        return None
    left: int = args.train_iters - done
    every = args.exit_interval
    return min(left, every - done % every) if every else left
