"""Reductions of gradients that are held back until a schedule has a place for them.

Data parallelism asks for a reduction as soon as the last gradient of a bucket is complete, which is where the
next block waits for its first all-to-all. :class:`Reductions` keeps what was asked for. A stage of the
backward pass (``schedule.kinds.REDUCE``, ``REDUCE_EXPERTS``) starts what was there when the block above had
ended, or the experts of the same block; what is left when no pass is to come any more starts at once.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable

from megatron_ampipe.runtime.collectives import Transfer, Waitable

Start = Callable[[], Waitable | None]
"""Starts a reduction; None if it has ended by then."""


class Reductions:
    """What data parallelism has asked for and what has not been started yet: in one order on every rank.

    ``on_cuda``, streams order what is reduced; ``of_experts``, parameters of experts are reduced too.
    """

    def __init__(self, *, on_cuda: bool, of_experts: bool) -> None:
        self.on_cuda, self.of_experts = on_cuda, of_experts
        self._held: deque[tuple[Hashable, Start]] = deque()
        self._num_asked = 0
        self._to_come: weakref.WeakSet[object] = weakref.WeakSet()
        # A reduction that starts may have Megatron finish the one before it.
        self._lock = threading.RLock()

    def expect(self, call: object) -> None:
        """A pass has run whose backward will start reductions; forgotten with the object."""
        self._to_come.add(call)

    def passed(self, call: object) -> None:
        """The backward of this pass has ended."""
        self._to_come.discard(call)

    def ask(self, key: Hashable, start: Start) -> None:
        """Start a reduction now if no backward pass is to come, else keep it."""
        with self._lock:
            self._num_asked += 1
            if self._to_come:
                self._held.append((key, start))
                return
            # Earlier ones first: each group of ranks must see one order.
            self._start(len(self._held))
            start()

    def is_held(self, key: Hashable) -> bool:
        """Whether a reduction was asked for and not started."""
        return any(held == key for held, _ in self._held)

    def start_all(self) -> None:
        """Start everything that is held."""
        with self._lock:
            self._start(len(self._held))

    @property
    def mark(self) -> int:
        """How many have been asked for so far, for :meth:`start_until`."""
        return self._num_asked

    def start_until(self, mark: int) -> Transfer:
        """What was asked for by then, as one transfer that is alone in its lane; an empty one without it."""
        count = mark - (self._num_asked - len(self._held))
        return Transfer(()) if count <= 0 else Transfer((), begin=functools.partial(self._start, count))

    def _start(self, count: int) -> list[Waitable]:
        with self._lock:
            found = [self._held.popleft()[1]() for _ in range(count)]
        return [handle for handle in found if handle is not None]
