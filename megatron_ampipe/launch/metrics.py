"""What AMPipe adds to Megatron's log, TensorBoard and Weights & Biases at every ``--log-interval``.

Figures of the rank that writes, which is the last one, as for Megatron's own; no collective is issued for
them. They come from the recorder, which runs on that rank in the logged iterations alone (:mod:`.trace`). On
CUDA it holds events, and by the time they are read Megatron has read the losses of the same iteration, so
nothing is waited for. Called by :mod:`.pretrain`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import megatron.training.training as training
import torch
from megatron.training import print_rank_last
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

from megatron_ampipe.layers.context import AMPipeContext
from megatron_ampipe.schedule import Direction

TrainingLog = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure.

    Attributes:
        tag: In TensorBoard and Weights & Biases.
        value: As a number there.
        text: In the log.
    """

    tag: str
    value: float
    text: str


@contextlib.contextmanager
def logged(context: AMPipeContext | None, args: argparse.Namespace) -> Iterator[None]:
    """Within this context, Megatron's ``training_log`` is followed by ours.

    Args:
        context: What the layers share; None at degree 1, where there is nothing to add.
        args: Megatron's arguments.
    """
    if context is None:
        yield
        return
    stock = training.training_log
    training.training_log = _followed(stock, context, args)
    try:
        yield
    finally:
        training.training_log = stock


def is_measured(args: argparse.Namespace, iteration: int) -> bool:
    """Whether this rank writes figures of this iteration, counted from 1."""
    return bool(args.rank == args.world_size - 1 and iteration % args.log_interval == 0)


def _followed(stock: TrainingLog, context: AMPipeContext, args: argparse.Namespace) -> TrainingLog:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def training_log(*positional: Any, **named: Any) -> Any:
        result = stock(*positional, **named)
        iteration = signature.bind(*positional, **named).arguments["iteration"]
        if is_measured(args, iteration):
            _write(iteration, metrics(context, iteration, travels=tokens_travel(args)))
        return result

    return training_log


def tokens_travel(args: argparse.Namespace) -> bool:
    """Whether more than one rank shares the experts of a layer, so that there is something to hide."""
    ranks: int = args.expert_model_parallel_size * (args.expert_tensor_parallel_size or 1)
    return ranks > 1


def metrics(context: AMPipeContext, iteration: int, *, travels: bool = True) -> list[Metric]:
    """What the recorder has of an iteration, and what the plan predicted, if there is one.

    Empty where this rank has no pipelined layer.

    Args:
        context: What the layers share.
        iteration: Counted from 1.
        travels: Whether tokens go to other ranks. What a rank copies to itself is no communication, and
            it is then not reported.
    """
    timeline = context.recorder.timeline(rank=torch.distributed.get_rank(), labels={}, iteration=iteration)
    if not timeline.spans:
        return []
    exposed_ms = timeline.exposed_us / 1e3
    found = [Metric("ampipe/degree", context.pipeline.degree, f"degree: {context.pipeline.degree}")]
    if travels:
        share = timeline.hidden_share
        found += [
            Metric("ampipe/hidden-share", share, f"hidden share: {share:.3f}"),
            Metric(
                "ampipe/exposed-communication-ms", exposed_ms, f"exposed communication (ms): {exposed_ms:.2f}"
            ),
        ]
    times_us = context.recorder.pass_times_us(iteration)
    for direction, predicted_ms in zip(Direction, context.predicted_ms or (None, None), strict=True):
        if times_us[direction]:
            measured_ms = statistics.fmean(times_us[direction]) / 1e3
            found += _of_block(f"block {direction.value}", measured_ms, predicted_ms)
    return found


def _of_block(name: str, measured_ms: float, predicted_ms: float | None) -> list[Metric]:
    """One direction: what a pass took, and what the plan predicted."""
    tag = f"ampipe/{name.replace(' ', '-')}"
    found = [Metric(f"{tag}-ms", measured_ms, f"{name} (ms): {measured_ms:.2f}")]
    if predicted_ms:
        ratio = measured_ms / predicted_ms
        found += [
            Metric(f"{tag}-predicted-ms", predicted_ms, f"{name} predicted (ms): {predicted_ms:.2f}"),
            Metric(f"{tag}-measured-to-predicted", ratio, f"{name} measured/predicted: {ratio:.2f}"),
        ]
    return found


def _write(iteration: int, found: list[Metric]) -> None:
    """Write to all outputs of this run: log, TensorBoard, Weights & Biases."""
    if not found:
        return
    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    if tensorboard:
        for metric in found:
            tensorboard.add_scalar(metric.tag, metric.value, iteration)
    if wandb:
        wandb.log({metric.tag: metric.value for metric in found}, iteration)
    print_rank_last(f" ampipe at iteration {iteration:8d} | {' | '.join(metric.text for metric in found)} |")
