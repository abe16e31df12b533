"""What a run records of its blocks: the trace of each rank, and metrics at every ``--log-interval``.

Metrics go to Megatron's log, TensorBoard and Weights & Biases. They are those of the rank that writes, the
last one, as for Megatron's metrics; no collective is issued for them. Its recorder is enabled in logged
iterations only, for a trace in all of them. On CUDA it has recorded events; when they are read, Megatron has
already read the losses of the same iteration, so the host does not wait for the device.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from megatron.training import print_rank_last
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

from megatron_ampipe.files import outputs
from megatron_ampipe.launch.hooks import Hook
from megatron_ampipe.layers.context import AMPipeContext
from megatron_ampipe.schedule import Direction
from megatron_ampipe.schedule.features import expert_tensor_ranks


class Metric(NamedTuple):
    """One metric: its name in the log, its value, and the digits that the log shows."""

    name: str
    value: float
    digits: int = 2

    @property
    def tag(self) -> str:
        """Its name in TensorBoard and Weights & Biases."""
        return "ampipe/" + self.name.replace(" (ms)", "-ms").replace("/", "-to-").replace(" ", "-")


def has_expert_communication(args: argparse.Namespace) -> bool:
    """Whether the experts of a layer are on more than one rank, so that there is communication to hide."""
    ranks: int = args.expert_model_parallel_size * expert_tensor_ranks(args)
    return ranks > 1


class Recording(Hook):
    """Selects the iterations that are recorded, logs their metrics and writes the trace at the end.

    Args:
        context: What the layers share.
        args: Megatron's validated arguments.

    Raises:
        BadInput: the folder of the trace is not writable.
    """

    def __init__(self, context: AMPipeContext, args: argparse.Namespace) -> None:
        self._context, self._args = context, args
        self._folder = None if context.config.trace_dir is None else Path(context.config.trace_dir)
        if self._folder is not None:
            flag = "--ampipe-trace-dir"
            outputs.check_folder(self._folder.absolute(), flag=flag, value=self._folder)
            for earlier in self._folder.glob("rank*.trace.json"):
                earlier.unlink(missing_ok=True)

    def _is_logged(self, iteration: int) -> bool:
        args = self._args
        return bool(args.rank == args.world_size - 1 and iteration % args.log_interval == 0)

    def before_forward(self, model: Any) -> None:
        """Set the recorder's iteration, or pause it."""
        # With --skip-train, args has no count of iterations. Megatron counts from 0 here, from 1 in its log.
        if model.training and (self._folder or self._is_logged(self._args.curr_iteration + 1)):
            self._context.recorder.start_iteration(self._args.curr_iteration + 1)
        else:
            self._context.recorder.pause()

    def after_log(self, iteration: int) -> None:
        """Write the metrics of a recorded iteration to all outputs of this run."""
        metrics = self._metrics(iteration) if self._is_logged(iteration) else []
        if not metrics:
            return
        tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
        if tensorboard:
            for metric in metrics:
                tensorboard.add_scalar(metric.tag, metric.value, iteration)
        if wandb:
            wandb.log({metric.tag: metric.value for metric in metrics}, iteration)
        text = " | ".join(f"{metric.name}: {metric.value:.{metric.digits}f}" for metric in metrics)
        print_rank_last(f" ampipe at iteration {iteration:8d} | {text} |")

    def _metrics(self, iteration: int) -> list[Metric]:
        """The metrics of an iteration, with the predictions of a plan; none without a pipelined layer."""
        context = self._context
        timeline = context.recorder.timeline(rank=self._args.rank, labels={}, iteration=iteration)
        if not timeline.spans:
            return []
        metrics = [Metric("degree", context.pipeline.degree, 0)]
        # Copies within a rank are no communication.
        if has_expert_communication(self._args):
            metrics.append(Metric("hidden share", timeline.hidden_share, 3))
            metrics.append(Metric("exposed communication (ms)", timeline.exposed_us / 1e3))
        if context.condenser is not None and (share := context.condenser.take_share()) is not None:
            metrics.append(Metric("condensed share", share, 3))
        times_us = context.recorder.pass_times_us(iteration)
        for direction, predicted_ms in zip(Direction, context.predicted_ms or (None, None), strict=True):
            if times_us[direction]:
                measured_ms = statistics.fmean(times_us[direction]) / 1e3
                metrics.append(Metric(f"block {direction.value} (ms)", measured_ms))
                if predicted_ms:
                    metrics.append(Metric(f"block {direction.value} predicted (ms)", predicted_ms))
                    ratio = measured_ms / predicted_ms
                    metrics.append(Metric(f"block {direction.value} measured/predicted", ratio))
        return metrics

    def at_end(self) -> None:
        """Write this rank's trace, if there is one: what was recorded before a failure is worth seeing."""
        if self._folder is not None:
            # The process group may have been destroyed already.
            rank = int(os.environ.get("RANK", "0"))
            timeline = self._context.recorder.timeline(rank=rank, labels=self._context.pipeline.labels)
            if timeline.spans:
                timeline.write_chrome(self._folder / f"rank{rank}.trace.json")
