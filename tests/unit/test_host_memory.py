"""Copies to host memory and back: sizes, strides and shared memory, and what is used again."""

import pytest

pytest.importorskip("torch")
import torch

from megatron_ampipe.runtime.saved_tensors import HostCopies
from megatron_ampipe.tools.measuring.meters import TensorMeter, Watch


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(shape).to(dtype)


def test_nothing_is_copied_before_the_transfer_is_waited_for() -> None:
    stored, released = random_tensor((4,)), []
    copies = HostCopies([stored])
    transfer = copies.store(lambda: released.append(True))
    stored.fill_(3.0)
    assert not released
    transfer.wait()
    again = copies.load()
    again.wait()
    assert torch.equal(again.outputs[0], torch.full((4,), 3.0))


def test_memory_of_the_host_is_used_again_and_not_counted_as_the_devices() -> None:
    meter, stored = TensorMeter(), random_tensor((1024,))
    meter.restart([stored])
    with Watch(meter):
        for _ in range(3):
            copies = HostCopies([stored])
            copies.store(lambda: None).wait()
            # Two at once need separate memory.
            host = copies._pieces[0]
            other = HostCopies([stored])
            other.store(lambda: None).wait()
            assert host.bytes.data_ptr() != other._pieces[0].bytes.data_ptr()
            first = host.bytes.data_ptr()
            del host, other
            del copies
            reused = HostCopies([stored])
            reused.store(lambda: None).wait()
            assert reused._pieces[0].bytes.data_ptr() == first
            del reused
    assert meter.now == meter.peak == 0
