"""The random state of the device, kept in torch's CPU generator.

On a GPU there are two generators: the CPU's for the host's own draws, and the GPU's, which Megatron's
tracker switches between named states so that dropout agrees, or differs, across ranks as it should. Here
operations on "device" tensors draw from the CPU generator, so that one *is* the device's, and draws that
belong to the host must leave no mark on it. Called by :func:`megatron_ampipe.launch.host.install`.
"""

import functools
import logging
from typing import Any

import torch
import torch.utils.data.dataloader as dataloader

TRACKER_LOGGER = "megatron.core.tensor_parallel.random"


def get_rng_state(*_args: object, **_kwargs: object) -> torch.Tensor:
    """The device's random state, a copy; stands in for the getters of torch.cuda and of Megatron."""
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, *_args: object, **_kwargs: object) -> None:
    """Sets the device's random state; stands in for the setters of torch.cuda and of Megatron."""
    torch.set_rng_state(new_state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _keep_device_state_over_iterator() -> None:
    """A DataLoader draws a seed when it is iterated, and only some ranks have one.

    Left alone, tensor-parallel ranks would part ways in dropout outside the parallel regions, and a
    resumed run, which builds its loaders after restoring the state, would differ from an unbroken one.
    """
    create = dataloader._BaseDataLoaderIter.__init__

    @functools.wraps(create)
    def create_on_host(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        state = torch.get_rng_state()
        # Megatron asks for pinned pages; torch warns where no accelerator would read them.
        loader.pin_memory = False
        create(self, loader, *args, **kwargs)
        torch.set_rng_state(state)

    dataloader._BaseDataLoaderIter.__init__ = create_on_host


def _expected_warning(record: logging.LogRecord) -> bool:
    # The tracker's fork() reports when the CPU state changes inside it, as it always does here.
    return "CPU RNG state changed" not in record.getMessage()


def install() -> None:
    """Replace the random-state calls of ``torch.cuda``; Megatron's own are replaced in :mod:`.megatron`."""
    for namespace in (torch.cuda, torch.cuda.random):
        namespace.get_rng_state = get_rng_state
        namespace.set_rng_state = set_rng_state
        namespace.manual_seed = _manual_seed
    _keep_device_state_over_iterator()
    logging.getLogger(TRACKER_LOGGER).addFilter(_expected_warning)
