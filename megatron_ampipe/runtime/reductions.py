"""Delays gradient reductions until a stage of the schedule starts them.

Data parallelism requests the reduction of a bucket when its last gradient is complete. At that time the next
block waits for its first all-to-all, so :class:`Reductions` keeps the request. A stage of the backward pass
(``schedule.kinds.REDUCE``, ``REDUCE_EXPERTS``) starts the requests made before the block above, or the
experts of the same block, had ended. When no backward pass is left, requests start at once.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable

from megatron_ampipe.runtime.collectives import Transfer, Waitable

Start = Callable[[], Waitable | None]
"""Starts a reduction; returns None if it has already ended."""


class Reductions:
    """The requested reductions that have not been started, in the same order on every rank.

    ``on_cuda``: streams order the reductions. ``with_experts``: gradients of experts are reduced so too.
    """

    def __init__(self, *, on_cuda: bool, with_experts: bool) -> None:
        self.on_cuda, self.with_experts = on_cuda, with_experts
        self._held: deque[tuple[Hashable, Start]] = deque()
        self._num_asked = 0
        self._to_come: weakref.WeakSet[object] = weakref.WeakSet()
        # Reentrant: when a reduction starts, Megatron may finish the previous one.
        self._lock = threading.RLock()

    def expect(self, call: object) -> None:
        """Register a forward pass whose backward will start reductions; a weak reference."""
        self._to_come.add(call)

    def passed(self, call: object) -> None:
        """Unregister a pass, because its backward has ended."""
        self._to_come.discard(call)

    def ask(self, key: Hashable, start: Start) -> None:
        """Request a reduction: start it now if no backward pass is left, else keep it."""
        with self._lock:
            self._num_asked += 1
            if self._to_come:
                self._held.append((key, start))
                return
            # Kept ones first: all ranks of a group must use the same order.
            self._start(len(self._held))
            start()

    def is_held(self, key: Hashable) -> bool:
        """Whether a reduction was requested but not started."""
        return any(held == key for held, _ in self._held)

    def start_all(self) -> None:
        """Start all reductions that are held."""
        with self._lock:
            self._start(len(self._held))

    @property
    def mark(self) -> int:
        """How many reductions have been requested so far, for :meth:`start_until`."""
        return self._num_asked

    def start_until(self, mark: int) -> Transfer:
        """The held reductions up to ``mark``, as a transfer that runs alone in its lane; may be empty."""
        count = mark - (self._num_asked - len(self._held))
        return Transfer(()) if count <= 0 else Transfer((), begin=functools.partial(self._start, count))

    def _start(self, count: int) -> list[Waitable]:
        with self._lock:
            handles = [self._held.popleft()[1]() for _ in range(count)]
        return [handle for handle in handles if handle is not None]
