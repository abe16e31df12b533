"""AMPipe's metrics in Megatron's log, TensorBoard and Weights & Biases at every ``--log-interval``.

They are measured on the rank that writes, the last one, as for Megatron's metrics; no collective is issued
for them. They come from the recorder, which is enabled on that rank in logged iterations only
(:mod:`.trace`). On CUDA it has recorded events; when they are read, Megatron has already read the losses of
the same iteration, so the host does not wait for the device. Called by :mod:`.pretrain`.
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
from megatron_ampipe.schedule.features import expert_tensor_ranks

TrainingLog = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        tag: Name in TensorBoard and Weights & Biases.
        value: Value in TensorBoard and Weights & Biases.
        text: Text in the log.
    """

    tag: str
    value: float
    text: str


@contextlib.contextmanager
def logged(context: AMPipeContext | None, args: argparse.Namespace) -> Iterator[None]:
    """Within this context, Megatron's ``training_log`` also writes AMPipe's metrics.

    Args:
        context: The context of the layers; None at degree 1, where there are no metrics.
        args: Megatron's arguments.
    """
    if context is None:
        yield
        return
    stock = training.training_log
    training.training_log = _with_metrics(stock, context, args)
    try:
        yield
    finally:
        training.training_log = stock


def is_measured(args: argparse.Namespace, iteration: int) -> bool:
    """Whether this rank writes metrics of this iteration, counted from 1."""
    return bool(args.rank == args.world_size - 1 and iteration % args.log_interval == 0)


def _with_metrics(stock: TrainingLog, context: AMPipeContext, args: argparse.Namespace) -> TrainingLog:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def training_log(*positional: Any, **named: Any) -> Any:
        result = stock(*positional, **named)
        iteration = signature.bind(*positional, **named).arguments["iteration"]
        if is_measured(args, iteration):
            _write(iteration, metrics(context, iteration, communicates=has_expert_communication(args)))
        return result

    return training_log


def has_expert_communication(args: argparse.Namespace) -> bool:
    """Whether the experts of a layer are on more than one rank, so that there is communication to hide."""
    ranks: int = args.expert_model_parallel_size * expert_tensor_ranks(args)
    return ranks > 1


def metrics(context: AMPipeContext, iteration: int, *, communicates: bool = True) -> list[Metric]:
    """The metrics of a recorded iteration, with the predictions of the plan if there is one.

    Empty if this rank has no pipelined layer.

    Args:
        context: The context of the layers.
        iteration: Counted from 1.
        communicates: Whether tokens are sent to other ranks. If not, no communication is reported: copies
            within a rank do not count.
    """
    timeline = context.recorder.timeline(rank=torch.distributed.get_rank(), labels={}, iteration=iteration)
    if not timeline.spans:
        return []
    exposed_ms = timeline.exposed_us / 1e3
    found = [Metric("ampipe/degree", context.pipeline.degree, f"degree: {context.pipeline.degree}")]
    if communicates:
        share = timeline.hidden_share
        found += [
            Metric("ampipe/hidden-share", share, f"hidden share: {share:.3f}"),
            Metric(
                "ampipe/exposed-communication-ms", exposed_ms, f"exposed communication (ms): {exposed_ms:.2f}"
            ),
        ]
    if context.condenser is not None and (share := context.condenser.take_share()) is not None:
        found.append(Metric("ampipe/condensed-share", share, f"condensed share: {share:.3f}"))
    times_us = context.recorder.pass_times_us(iteration)
    for direction, predicted_ms in zip(Direction, context.predicted_ms or (None, None), strict=True):
        if times_us[direction]:
            measured_ms = statistics.fmean(times_us[direction]) / 1e3
            found += _block_metrics(f"block {direction.value}", measured_ms, predicted_ms)
    return found


def _block_metrics(name: str, measured_ms: float, predicted_ms: float | None) -> list[Metric]:
    """Measured and predicted time of a pass in one direction."""
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
