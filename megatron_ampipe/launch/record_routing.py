"""``--ampipe-routing-dir``: every Nth iteration, the routing of one micro-batch becomes a file.

A restart that goes on from an earlier iteration removes the files of later ones, which it will write again.
Called by :mod:`.session`, at any degree.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron.training import training

from megatron_ampipe.errors import BadInput, RunFailed
from megatron_ampipe.files import outputs
from megatron_ampipe.launch.auto import print_on_first_rank
from megatron_ampipe.launch.routing_recorder import RecordedSizes, RoutingRecorder
from megatron_ampipe.layers.context import AMPipeContext
from megatron_ampipe.plan.recorded_routing import THRESHOLDS, files_of, read_record
from megatron_ampipe.schedule.config import AMPipeConfig

FLAG, INTERVAL_FLAG = "--ampipe-routing-dir", "--ampipe-routing-interval"
TrainStep = Callable[..., Any]


@contextlib.contextmanager
def recorded_routing(
    args: argparse.Namespace, config: AMPipeConfig, context: AMPipeContext | None
) -> Iterator[None]:
    """Within this context, Megatron's training step records, if the user asks for it.

    Args:
        args: Megatron's validated arguments.
        config: What AMPipe's flags resolve to.
        context: What pipelined layers share; None at degree 1.

    Raises:
        BadInput: nothing could be recorded, or the folder cannot be used.
    """
    if config.routing_dir is None:
        yield
        return
    folder = Path(config.routing_dir)
    _check(args, folder, config.routing_interval)
    if int(os.environ.get("RANK", "0")) == 0:
        _prepare(args, folder)
    stock = training.train_step
    training.train_step = recording(stock, args, config, context)
    try:
        yield
    finally:
        training.train_step = stock


def recording(
    step: TrainStep, args: argparse.Namespace, config: AMPipeConfig, context: AMPipeContext | None
) -> TrainStep:
    """Megatron's ``train_step``, with a recorder around every Nth one. All ranks call it equally often."""
    signature = inspect.signature(step)
    assert config.routing_dir is not None
    folder, interval, is_first = Path(config.routing_dir), config.routing_interval, True

    @functools.wraps(step)
    def train_step(*positional: Any, **named: Any) -> Any:
        nonlocal is_first
        iteration = args.curr_iteration + 1
        if is_first:
            is_first = False
            _remove_from(folder, iteration)
        if iteration % interval:
            return step(*positional, **named)
        models = signature.bind(*positional, **named).arguments["model"]
        recorder = RoutingRecorder(
            models if isinstance(models, list) else [models],
            _sizes(args, config, context),
            turn=iteration // interval - 1,
        )
        try:
            result = step(*positional, **named)
            record = recorder.finish(iteration)
        finally:
            recorder.stop()
        if record is not None:
            try:
                record.write(folder)
            except RunFailed as error:
                # Training is worth more than its statistics.
                print_on_first_rank(f"the routing of iteration {iteration} was not recorded: {error}")
        return result

    return train_step


def _sizes(args: argparse.Namespace, config: AMPipeConfig, context: AMPipeContext | None) -> RecordedSizes:
    thresholds = {*THRESHOLDS} if config.condense is None else {*THRESHOLDS, config.condense}
    return RecordedSizes(
        num_layers=args.num_layers,
        num_experts=args.num_experts,
        num_chunks=1 if context is None else context.pipeline.num_chunks,
        batch=args.micro_batch_size,
        hidden_size=args.hidden_size,
        ranks_per_sequence=args.tensor_model_parallel_size * args.context_parallel_size,
        thresholds=tuple(sorted(thresholds)),
    )


def _check(args: argparse.Namespace, folder: Path, interval: int) -> None:
    if not args.num_experts:
        raise BadInput(
            FLAG, folder, rule="the model has no MoE layer", remedy="Set --num-experts, or leave it out."
        )
    if args.skip_train:
        rule = "has no effect with --skip-train: only training iterations are recorded"
        raise BadInput(FLAG, folder, rule=rule, remedy="Leave it out.")
    if args.train_iters is not None and interval > args.train_iters:
        raise BadInput(
            INTERVAL_FLAG,
            interval,
            rule=f"records none of the {args.train_iters} iterations of this training",
            remedy=f"Use {INTERVAL_FLAG} {max(1, args.train_iters // 10)}.",
        )


def _prepare(args: argparse.Namespace, folder: Path) -> None:
    """Make the folder, and refuse one with files of another model."""
    remedy = f"Name a folder that you can write to, for example {FLAG} routing."
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = files_of(folder)
    except OSError as error:
        rule = f"cannot be written to ({error.strerror})"
        raise BadInput(FLAG, folder, rule=rule, remedy=remedy) from error
    outputs.check_folder(folder.absolute(), flag=FLAG, value=folder)
    if found:
        earlier = read_record(next(iter(found.values())), flag=FLAG)
        if (earlier.num_experts, earlier.hidden_size) != (args.num_experts, args.hidden_size):
            raise BadInput(
                FLAG,
                folder,
                rule=f"has the routing of another model, with {earlier.num_experts} experts and hidden size "
                f"{earlier.hidden_size}",
                remedy="Name another folder, or remove its files.",
            )


def _remove_from(folder: Path, iteration: int) -> None:
    """Remove what an interrupted run recorded from the iteration on with which this one begins."""
    if int(os.environ.get("RANK", "0")) == 0:
        for recorded, path in files_of(folder).items():
            if recorded >= iteration:
                path.unlink(missing_ok=True)
