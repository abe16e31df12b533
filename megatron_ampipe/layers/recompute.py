"""Activation checkpointing of a function inside a stage.

For functions that draw random numbers through Megatron's RNG tracker. Megatron's checkpoint function is
reentrant: it calls ``backward`` inside its backward, which fails under ``torch.autograd.grad``, and stages
    are
differentiated with that. torch's non-reentrant checkpoint works. Used by :mod:`.chunk_attention`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """``function(*tensors)``, run again in the backward pass with the random state of the first run."""
    output: Tensor = checkpoint(function, *tensors, use_reentrant=False, context_fn=_contexts)
    return output


def _contexts() -> tuple[Any, Any]:
    return contextlib.nullcontext(), _rng_states(get_cuda_rng_tracker().get_states())


@contextlib.contextmanager
def _rng_states(states: dict[str, Tensor]) -> Iterator[None]:
    tracker = get_cuda_rng_tracker()
    now = tracker.get_states()
    tracker.set_states(states)
    try:
        yield
    finally:
        tracker.set_states(now)
