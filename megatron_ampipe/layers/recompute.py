"""Recomputes a function in the backward pass instead of keeping what it computed.

For pieces of a stage that draw random numbers through Megatron's tracker. Megatron's own checkpoint runs a
backward pass of its own inside and therefore refuses to work under ``torch.autograd.grad``, which is how
stages are differentiated; torch's non-reentrant one does not. Used by :mod:`.chunk_attention`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """``function(*tensors)``, run again in the backward pass with the random state of the first time."""
    output: Tensor = checkpoint(function, *tensors, use_reentrant=False, context_fn=_with_same_randomness)
    return output


def _with_same_randomness() -> tuple[Any, Any]:
    return contextlib.nullcontext(), _tracker_at(get_cuda_rng_tracker().get_states())


@contextlib.contextmanager
def _tracker_at(states: dict[str, Tensor]) -> Iterator[None]:
    tracker = get_cuda_rng_tracker()
    now = tracker.get_states()
    tracker.set_states(states)
    try:
        yield
    finally:
        tracker.set_states(now)
