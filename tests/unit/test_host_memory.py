"""Copies to host memory: when they are made, and that memory is used again."""

import mmap
from unittest import mock

import pytest

pytest.importorskip("torch")
import torch

from megatron_ampipe.runtime.saved_tensors import HostCopies


def stored_copies(tensor: torch.Tensor) -> HostCopies:
    copies = HostCopies([tensor])
    copies.store(lambda: None).wait()
    return copies


def address(copies: HostCopies) -> int:
    return copies._pieces[0].bytes.data_ptr()


def test_nothing_is_copied_before_the_transfer_is_waited_for() -> None:
    stored, released = torch.randn(4), []
    copies = HostCopies([stored])
    transfer = copies.store(lambda: released.append(True))
    stored.fill_(3.0)
    assert not released
    transfer.wait()
    again = copies.load()
    again.wait()
    assert torch.equal(again.outputs[0], torch.full((4,), 3.0))


def test_memory_of_the_host_is_used_again() -> None:
    stored = torch.randn(1024)
    with mock.patch.object(mmap, "mmap", wraps=mmap.mmap) as made:
        for _ in range(3):
            copies, other = stored_copies(stored), stored_copies(stored)
            assert address(copies) != address(other), "two at once need separate memory"
            del copies, other
    assert made.call_count <= 2
