"""What AMPipe does around Megatron's training: one list of hooks, installed and removed together.

Each feature of a run is a :class:`Hook` with the moments that it needs. :class:`Hooks` replaces Megatron's
functions in one place and gives them back at the end, also after a failure.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch


class Hook:
    """What a feature does at moments of the training; here, nothing. All ranks call it equally often."""

    def before_step(self, models: list[Any]) -> None:
        """Before every ``train_step``, whose models are the parts on this rank, wrapped as Megatron does."""

    def after_step(self) -> None:
        """After a ``train_step`` that has not failed."""

    def before_forward(self, model: Any) -> None:
        """Before the forward pass of a micro-batch through an unwrapped model; in evaluation too."""

    def after_log(self, iteration: int) -> None:
        """After Megatron's ``training_log`` of an iteration, counted from 1."""

    def at_end(self) -> None:
        """When the training has ended, in whatever way."""


class Hooks:
    """The hooks of one run, called in the order in which they were added."""

    def __init__(self) -> None:
        self._hooks: list[Hook] = []
        self._restore = contextlib.ExitStack()

    def add(self, hook: Hook) -> None:
        """Call it from the next moment on."""
        self._hooks.append(hook)

    def install(self, *, pipelined: bool) -> None:
        """Replace Megatron's functions that have moments; none without hooks.

        Args:
            pipelined: Layers are AMPipe's, which ask for gradients on the training stream.
        """
        from megatron.training import training

        if self._hooks:
            wrapped = {
                "train_step": self.around_step(training.train_step),
                "training_log": self._around_log(training.training_log),
            }
            for name, function in wrapped.items():
                self._restore.callback(setattr, training, name, getattr(training, name))
                setattr(training, name, function)
        if pipelined:
            self._restore.enter_context(accumulating_on_training_stream())

    def remove(self) -> None:
        """Give Megatron its functions back, and end every hook."""
        self._restore.close()
        while self._hooks:
            self._hooks.pop(0).at_end()

    def around_step(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's ``train_step`` with its two moments."""
        signature = inspect.signature(train_step)

        @functools.wraps(train_step)
        def step(*args: Any, **kwargs: Any) -> Any:
            models = signature.bind(*args, **kwargs).arguments.get("model", [])
            for hook in self._hooks:
                hook.before_step(models if isinstance(models, list) else [models])
            result = train_step(*args, **kwargs)
            for hook in self._hooks:
                hook.after_step()
            return result

        return step

    def around_forward(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """The forward step that a script gives to ``pretrain``, with its moment."""
        from megatron.core.utils import unwrap_model

        @functools.wraps(forward_step)
        def step(data_iterator: Any, model: Any, *rest: Any, **kwargs: Any) -> Any:
            for hook in self._hooks:
                hook.before_forward(unwrap_model(model))
            return forward_step(data_iterator, model, *rest, **kwargs)

        return step

    def _around_log(self, training_log: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(training_log)

        @functools.wraps(training_log)
        def log(*args: Any, **kwargs: Any) -> Any:
            result = training_log(*args, **kwargs)
            for hook in self._hooks:
                hook.after_log(signature.bind(*args, **kwargs).arguments["iteration"])
            return result

        return log


@contextlib.contextmanager
def accumulating_on_training_stream() -> Iterator[None]:
    """Within it, gradients are accumulated on the stream that computes them.

    Megatron's ``DistributedDataParallel`` keeps the accumulation nodes of all parameters, which belong to the
    stream that is current when it is built, and Megatron builds it on a separate stream. A block asks for
    the gradients of every chunk at these nodes: each would cross to that stream by an event, a wait and
    ``record_stream``, and memory would be released at another stage in every pass (``runtime.streams``).
    Training runs on the default stream, because CUDA graphs are refused.
    """
    from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel

    construct = DistributedDataParallel.__init__

    @functools.wraps(construct)
    def constructing(*args: Any, **kwargs: Any) -> None:
        with torch.cuda.stream(torch.cuda.default_stream()):
            construct(*args, **kwargs)

    DistributedDataParallel.__init__ = constructing
    try:
        yield
    finally:
        DistributedDataParallel.__init__ = construct
