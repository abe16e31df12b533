"""``--ampipe-grad-reduce placed``: Megatron's reductions of gradients wait for a stage of the schedule.

With ``--overlap-grad-reduce``, a bucket group of Megatron's ``DistributedDataParallel`` starts its reduction
when its last gradient is complete. Here it asks for it instead (``runtime.reductions``), and finishes it when
Megatron says so.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch

from megatron_ampipe.launch.hooks import Hook
from megatron_ampipe.runtime.collectives import Waitable
from megatron_ampipe.runtime.reductions import Reductions


class PlacedReductions(Hook):
    """Has the bucket groups of the models ask ``reductions`` before they reduce."""

    def __init__(self, reductions: Reductions) -> None:
        self._reductions = reductions
        self._known: set[int] = set()

    def before_step(self, models: list[Any]) -> None:
        """Change the groups that are new."""
        for model in models:
            for group in (*model.bucket_groups, *model.expert_parallel_bucket_groups):
                if id(group) not in self._known:
                    self._known.add(id(group))
                    hold_back(group, self._reductions)


def hold_back(group: Any, reductions: Reductions) -> None:
    """Have one ``_ParamAndGradBucketGroup`` of Megatron ask before it starts its reduction."""
    start_now, finish_now = group.start_grad_sync, group.finish_grad_sync
    finishing = False

    @functools.wraps(start_now)
    def start_grad_sync(*args: Any, **kwargs: Any) -> None:
        def start() -> Waitable | None:
            start_now(*args, **kwargs)
            if group.grad_reduce_handle is None:
                return None
            # Both the schedule and Megatron wait for it.
            group.grad_reduce_handle = WaitedOnce(group.grad_reduce_handle, on_cuda=reductions.on_cuda)
            return group.grad_reduce_handle

        if finishing:
            # In its first iteration, Megatron starts a reduction when it finishes it.
            start()
        else:
            reductions.ask(id(group), start)

    @functools.wraps(finish_now)
    def finish_grad_sync(*args: Any, **kwargs: Any) -> None:
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
    """A handle for several waits, of a reduction that may be waited for once: its wait can add up results.

    Args:
        handle: Of the reduction.
        on_cuda: Whether a wait is of the current stream.
    """

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
