"""``--ampipe-rows fixed``: learns budgets from training steps, and repeats a step that exceeds one.

Megatron's ``train_step`` zeroes gradients, runs all passes of the step and lets the optimizer act. The passes
are wrapped: if a count of any chunk on any rank was above its budget, what the passes have changed is undone,
and they run again from the same data with exact rows. So the optimizer never sees a gradient without a row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import random

from megatron_ampipe import compat
from megatron_ampipe.exchange.budgets import FixedRows
from megatron_ampipe.launch.auto import print_on_first_rank
from megatron_ampipe.launch.environment import Environment
from megatron_ampipe.launch.hooks import Hook
from megatron_ampipe.launch.megatron_types import Model, Optimizer, RunPasses
from megatron_ampipe.schedule.row_budget import WARM_UP, WINDOW, Margin


class FixedRowsSteps(Hook):
    """Runs the passes of every training step with budgets, once these are learned."""

    def __init__(
        self, rows: FixedRows, environment: Environment, *, margin: float, before_repeat: Callable[[], None]
    ) -> None:
        self._rows, self._environment, self._margin = rows, environment, Margin(margin)
        self._before_repeat = before_repeat
        self._models: Sequence[Model] = ()
        self._num_seen = 0
        self._in_window = 0
        self._was_repeated = False

    def models_built(self, models: Sequence[Model]) -> None:
        """See ``Hook``."""
        self._models = models

    def wrap_passes(self, run_passes: RunPasses, optimizer: Optimizer) -> RunPasses:
        """See ``Hook``."""

        def run(**arguments: object) -> object:
            self._rows.is_watched = True
            self._rows.begin_step()
            if self._num_seen < WARM_UP:
                losses = run_passes(**arguments)
            else:
                losses = self._run_with_budgets(run_passes, optimizer, arguments)
            self._rows.end_step()
            self._num_seen += 1
            self._in_window += 1
            return losses

        return run

    def _run_with_budgets(
        self, run_passes: RunPasses, optimizer: Optimizer, arguments: dict[str, object]
    ) -> object:
        rows, data = self._rows, RecordedData.of(arguments["data_iterator"])
        arguments = {**arguments, "data_iterator": data}
        state = StepState(self._models)
        rows.num_steps += 1
        rows.is_active = True
        try:
            losses = run_passes(**arguments)
        finally:
            rows.is_active = False
        if not self._exceeded():
            return losses
        # What was counted after the first missing row is not the routing of this step.
        rows.begin_step()
        self._before_repeat()
        state.restore()
        for model in self._models:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        RecordedData.rewind_all(data)
        losses = run_passes(**arguments)
        self._note_repeat()
        return losses

    def _exceeded(self) -> bool:
        """Whether any rank has seen a count above its budget. The host waits, once per step."""
        device = torch.device("cuda" if self._environment.on_gpu else "cpu")
        flag = self._rows.overflow(device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    def _note_repeat(self) -> None:
        rows = self._rows
        rows.num_repeated += 1
        self._margin.after_repeat()
        self._was_repeated = True
        print_on_first_rank(
            f"iteration {self._environment.iteration}: more rows than a budget of --ampipe-rows fixed; "
            f"the step was repeated with exact rows ({rows.num_repeated} of {rows.num_steps} steps so far; "
            f"margin {self._margin.factor:g})"
        )

    def after_step(self) -> None:
        """Learn budgets after the warm-up, when a window is full, and after a repeated step."""
        is_full = self._in_window >= WINDOW
        if is_full:
            self._margin.after_window()
        if is_full or self._was_repeated:
            self._rows.learn_again(self._margin.factor, may_shrink=is_full)
        self._rows.learn_first(self._margin.factor, warm_up=WARM_UP)
        if is_full:
            self._in_window = 0
        self._was_repeated = False

    def at_end(self) -> None:
        """Say how many steps were repeated."""
        rows = self._rows
        if rows.num_steps:
            print_on_first_rank(
                f"fixed rows: {rows.num_steps} steps with budgets, {rows.num_repeated} of them repeated"
            )


class RecordedData:
    """An iterator over micro-batches that keeps them for a repeat of the step."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._kept: list[Any] = []
        self._again: Iterator[Any] | None = None

    @classmethod
    def of(cls, source: Any) -> Any:
        """The iterator of a model, or those of several; None where a rank reads no data."""
        if isinstance(source, list):
            return [cls.of(one) for one in source]
        return None if source is None else cls(source)

    @staticmethod
    def rewind_all(data: Any) -> None:
        """Begin again with the first micro-batch, in what :meth:`of` has made."""
        for one in data if isinstance(data, list) else [data]:
            if one is not None:
                one._again = iter(one._kept)

    def __iter__(self) -> RecordedData:
        return self

    def __next__(self) -> Any:
        if self._again is not None:
            return copy.copy(next(self._again))
        batch = next(self._source)
        # A copy, as the script may replace entries of the micro-batch.
        self._kept.append(copy.copy(batch))
        return batch


class StepState:
    """What the passes of a step change besides gradients: random states, buffers, and logged losses."""

    def __init__(self, models: Sequence[Model]) -> None:
        modules = dict.fromkeys(module for model in models for _, module in model.named_modules())
        self._random = random._get_all_rng_states()
        self._tensors: list[torch.Tensor] = []
        for module in modules:
            self._tensors += [buffer for buffer in module._buffers.values() if buffer is not None]
        self._tensors += compat.logged_losses().values()
        self._before = [tensor.clone() for tensor in self._tensors]

    @torch.no_grad()
    def restore(self) -> None:
        """Undo all changes. Losses that were first logged in this step are set to zero."""
        random._set_all_rng_states(*self._random)
        known = {id(tensor) for tensor in self._tensors}
        for tensor, before in zip(self._tensors, self._before, strict=True):
            tensor.copy_(before)
        for values in compat.logged_losses().values():
            if id(values) not in known:
                values.zero_()
