"""The hooks of AMPipe in Megatron's training, installed and removed together.

Each feature of a run is a :class:`Hook`, which overrides the methods that it needs. :class:`Hooks` replaces
Megatron's functions in one place and restores them at the end, also after a failure.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Sequence

import torch

from megatron_ampipe.launch.megatron_types import BucketGroup, Model, Optimizer, RunPasses
from megatron_ampipe.runtime.collectives import Waitable
from megatron_ampipe.runtime.reductions import Reductions


class Hook:
    """Base class of hooks; its methods do nothing. All ranks call each method equally often."""

    def models_built(self, models: Sequence[Model]) -> None:
        """Called before the first step with the parts of the model on this rank, in Megatron's wrappers."""

    def before_step(self) -> None:
        """Called before every ``train_step``."""

    def wrap_passes(self, run_passes: RunPasses, optimizer: Optimizer) -> RunPasses:
        """Return what a ``train_step`` calls for all its passes, in place of Megatron's ``run_passes``."""
        return run_passes

    def before_repeat(self) -> None:
        """Called before the passes of a step run again, because the first ones were not exact."""

    def after_step(self) -> None:
        """Called after every ``train_step`` that has not failed."""

    def after_log(self) -> None:
        """Called after Megatron's ``training_log`` of an iteration."""

    def at_end(self) -> None:
        """Called when training has ended, also after a failure."""


class Hooks:
    """The hooks of one run, called in the order in which they were added."""

    def __init__(self) -> None:
        self._hooks: list[Hook] = []
        self._restore = contextlib.ExitStack()

    def add(self, hook: Hook) -> None:
        """Add a hook; it is called from now on."""
        self._hooks.append(hook)

    def replace(self, owner: object, name: str, function: object) -> None:
        """Replace a function of Megatron until :meth:`remove`."""
        self._restore.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, function)

    def install(self, *, pipelined: bool) -> None:
        """Replace the functions of Megatron that must call hooks; none if there are no hooks.

        Args:
            pipelined: Whether layers are AMPipe's, whose gradients are accumulated on the training stream.
        """
        from megatron.core.distributed import DistributedDataParallel
        from megatron.training import training

        if self._hooks:
            self.replace(training, "train_step", self.around_step(training.train_step))
            self.replace(training, "training_log", self._around_log(training.training_log))
        if pipelined:
            construct = on_training_stream(DistributedDataParallel.__init__)
            self.replace(DistributedDataParallel, "__init__", construct)

    def remove(self) -> None:
        """Restore Megatron's functions, and end every hook."""
        self._restore.close()
        while self._hooks:
            self._hooks.pop(0).at_end()

    def around_step[**P, Output](self, train_step: Callable[P, Output]) -> Callable[P, Output]:
        """Megatron's ``train_step``, wrapped to call the hooks before and after it."""
        signature = inspect.signature(train_step)

        @functools.wraps(train_step)
        def step(*args: P.args, **kwargs: P.kwargs) -> Output:
            for hook in self._hooks:
                hook.before_step()
            wrapping = [hook for hook in self._hooks if type(hook).wrap_passes is not Hook.wrap_passes]
            if wrapping:
                bound = signature.bind(*args, **kwargs)
                given = bound.arguments
                for hook in wrapping:
                    run_passes, optimizer = given["forward_backward_func"], given["optimizer"]
                    given["forward_backward_func"] = hook.wrap_passes(run_passes, optimizer)
                step_output = train_step(*bound.args, **bound.kwargs)
            else:
                step_output = train_step(*args, **kwargs)
            for hook in self._hooks:
                hook.after_step()
            return step_output

        return step

    def before_repeat(self) -> None:
        """Call every hook before the passes of a step run again."""
        for hook in self._hooks:
            hook.before_repeat()

    def models_built(self, models: Sequence[Model]) -> None:
        """Call every hook with the wrapped models of this rank."""
        for hook in self._hooks:
            hook.models_built(models)

    def _around_log[**P, Output](self, training_log: Callable[P, Output]) -> Callable[P, Output]:
        @functools.wraps(training_log)
        def log(*args: P.args, **kwargs: P.kwargs) -> Output:
            report_memory = training_log(*args, **kwargs)
            for hook in self._hooks:
                hook.after_log()
            return report_memory

        return log


def on_training_stream[**P, R](construct: Callable[P, R]) -> Callable[P, R]:
    """Wrap the constructor of Megatron's ``DistributedDataParallel`` to run on the training stream.

    The accumulation nodes that it keeps belong to the current stream. Megatron builds it on a separate
    stream, to which the gradients of every chunk would have to cross.
    """

    @functools.wraps(construct)
    def constructing(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.cuda.stream(torch.cuda.default_stream()):
            return construct(*args, **kwargs)

    return constructing


class PlacedReductions(Hook):
    """``--ampipe-grad-reduce placed``: a stage of the schedule starts Megatron's gradient reductions.

    With ``--overlap-grad-reduce``, a bucket group of Megatron's ``DistributedDataParallel`` starts its
    reduction when its last gradient is complete. Here it requests the reduction from ``reductions`` instead.
    """

    def __init__(self, reductions: Reductions) -> None:
        self._reductions = reductions

    def models_built(self, models: Sequence[Model]) -> None:
        for model in models:
            for group in (*model.bucket_groups, *model.expert_parallel_bucket_groups):
                defer_grad_sync(group, self._reductions)


def defer_grad_sync(group: BucketGroup, reductions: Reductions) -> None:
    """Make a ``_ParamAndGradBucketGroup`` of Megatron request its reduction instead of starting it."""
    start_now, finish_now = group.start_grad_sync, group.finish_grad_sync
    finishing = False

    @functools.wraps(start_now)
    def start_grad_sync(*args: object, **kwargs: object) -> None:
        def start() -> Waitable | None:
            start_now(*args, **kwargs)
            if group.grad_reduce_handle is None:
                return None
            # Both the schedule and Megatron wait for it.
            handle = WaitedOnce(group.grad_reduce_handle, on_cuda=reductions.on_cuda)
            group.grad_reduce_handle = handle
            return handle

        if finishing:
            # In the first iteration, Megatron starts a reduction only when it finishes it.
            start()
        else:
            reductions.ask(id(group), start)

    @functools.wraps(finish_now)
    def finish_grad_sync(*args: object, **kwargs: object) -> None:
        nonlocal finishing
        if reductions.is_held(id(group)):
            reductions.start_all()
        finishing = True
        try:
            finish_now(*args, **kwargs)
        finally:
            finishing = False

    group.start_grad_sync, group.finish_grad_sync = start_grad_sync, finish_grad_sync


class WaitedOnce:
    """A handle that can be waited for several times, of a reduction whose wait may be called only once."""

    def __init__(self, handle: Waitable, *, on_cuda: bool) -> None:
        self._handle: Waitable | None = handle
        self._on_cuda = on_cuda
        self._ended: torch.cuda.Event | None = None
        self._lock = threading.Lock()

    def wait(self) -> None:
        """See ``runtime.collectives.Waitable``."""
        with self._lock:
            if self._handle is not None:
                self._handle.wait()
                self._handle = None
                self._ended = torch.cuda.current_stream().record_event() if self._on_cuda else None
            elif self._ended is not None:
                torch.cuda.current_stream().wait_event(self._ended)
