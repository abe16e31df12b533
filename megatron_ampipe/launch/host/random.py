"""Makes torch's CPU generator the random state of the device.

With a GPU there are two generators: one for the CPU, and one for the GPU, which Megatron's RNG tracker
switches between named states so that dropout is equal or different across ranks, as required. Without a GPU,
operations on "device" tensors use the CPU generator, so it takes the place of the GPU's, and random numbers
for the host must not change its state. Called by :func:`megatron_ampipe.launch.host.install`.
"""

import functools
import logging
from typing import Any

import torch
import torch.utils.data.dataloader as dataloader

TRACKER_LOGGER = "megatron.core.tensor_parallel.random"


def get_rng_state(*_args: object, **_kwargs: object) -> torch.Tensor:
    """A copy of the device's random state; replaces the getters of torch.cuda and of Megatron."""
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, *_args: object, **_kwargs: object) -> None:
    """Set the device's random state; replaces the setters of torch.cuda and of Megatron."""
    torch.set_rng_state(new_state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _keep_device_state_over_iterator() -> None:
    """Make DataLoader iterators leave the random state unchanged.

    An iterator draws a seed when it is created, and only some ranks have a DataLoader. Without this function,
    dropout outside the tensor-parallel regions would differ between tensor-parallel ranks, and a resumed run,
    which creates its iterators after restoring the state, would differ from an uninterrupted one.
    """
    create = dataloader._BaseDataLoaderIter.__init__

    @functools.wraps(create)
    def create_on_host(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        state = torch.get_rng_state()
        # Megatron requests pinned memory; torch warns about that if there is no accelerator.
        loader.pin_memory = False
        create(self, loader, *args, **kwargs)
        torch.set_rng_state(state)

    dataloader._BaseDataLoaderIter.__init__ = create_on_host


def _expected_warning(record: logging.LogRecord) -> bool:
    # The tracker's fork() warns if the CPU state changes inside it, as it always does here.
    return "CPU RNG state changed" not in record.getMessage()


def install() -> None:
    """Replace the random-state calls of ``torch.cuda``; :mod:`.megatron` replaces those of Megatron."""
    for namespace in (torch.cuda, torch.cuda.random):
        namespace.get_rng_state = get_rng_state
        namespace.set_rng_state = set_rng_state
        namespace.manual_seed = _manual_seed
    _keep_device_state_over_iterator()
    logging.getLogger(TRACKER_LOGGER).addFilter(_expected_warning)
