"""What runs again in the backward pass: whole layers, with the same random numbers, and parts of a stage.

Megatron's checkpoint function is reentrant: it calls ``backward`` inside its backward, which fails under
``torch.autograd.grad``, and stages are differentiated with that. torch's non-reentrant checkpoint works.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.tensor_parallel import get_cuda_rng_tracker, random
from torch import Tensor
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, slots=True)
class FullRecompute:
    """Megatron's full recompute, run inside the schedule: which layers keep only what they are given."""

    method: str
    """``uniform`` for every layer, ``block`` for the first ones of a pipeline stage."""
    num_layers: int
    """How many layers ``block`` recomputes. Megatron's ``uniform`` keeps the input of one layer in so many;
    here
    every layer keeps its own, and at most two layers are recomputed at a time."""

    def covers(self, place: int) -> bool:
        """Whether a layer is recomputed; ``place`` counts from 0 in its (virtual) pipeline stage."""
        return self.method == "uniform" or place < self.num_layers

    @property
    def covers_mtp(self) -> bool:
        """Whether layers of multi-token prediction are recomputed; Megatron skips them under ``block``."""
        return self.method == "uniform"


def recomputed(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """``function(*tensors)``, run again in the backward pass with the random state of the first run."""
    states = get_cuda_rng_tracker().get_states()
    output: Tensor = checkpoint(
        function,
        *tensors,
        use_reentrant=False,
        context_fn=lambda: (contextlib.nullcontext(), _rng_states(states)),
    )
    return output


class RandomStates:
    """The random states with which functions ran, so that they can draw the same numbers once more."""

    def __init__(self) -> None:
        self._states: dict[Any, Any] = {}

    def drawn(self, function: Callable[..., Any], key: object, *, again: bool) -> Callable[..., Any]:
        """See ``runtime.block_functions.Draws``."""
        if not again:
            self._states[key] = random._get_all_rng_states()
            return function

        def run(*args: Any, **kwargs: Any) -> Any:
            states = self._states.pop(key, None)
            if states is None:
                return function(*args, **kwargs)
            # Afterwards the states of now go on.
            with random._fork_rng():
                random._set_all_rng_states(*states)
                return function(*args, **kwargs)

        return run


@contextlib.contextmanager
def _rng_states(states: dict[str, Tensor]) -> Iterator[None]:
    tracker = get_cuda_rng_tracker()
    now = tracker.get_states()
    tracker.set_states(states)
    try:
        yield
    finally:
        tracker.set_states(now)
