"""Copies to host memory and back: sizes, strides and shared memory, and what is used again."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
import torch

from megatron_ampipe.runtime.saved_tensors import HostCopies, InnerTensors, is_host_memory
from megatron_ampipe.tools.measuring.meters import TensorMeter, Watch


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(shape).to(dtype)


def test_what_comes_back_is_laid_out_as_what_was_stored() -> None:
    whole = random_tensor((8, 12))
    left, right = whole.chunk(2, dim=-1)
    late = random_tensor((40, 3), torch.bfloat16)[7:]
    stored = [left, right, late, random_tensor((3,)), whole[:0], late.t()]
    expected = [tensor.clone() for tensor in stored]
    copies = HostCopies(stored)
    released = []
    copies.store(lambda: released.append(True)).wait()
    assert released
    for tensor in (whole, late):
        tensor.fill_(float("nan"))
    transfer = copies.load()
    transfer.wait()
    for before, wanted, found in zip(stored, expected, transfer.outputs, strict=True):
        assert found.stride() == before.stride() and torch.equal(found, wanted)
        assert found.untyped_storage()._cdata != before.untyped_storage()._cdata
        assert not is_host_memory(found)
    # Halves of one tensor share memory again.
    assert transfer.outputs[0].untyped_storage()._cdata == transfer.outputs[1].untyped_storage()._cdata


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


def test_a_graph_holds_nothing_between_store_and_load() -> None:
    weight = torch.nn.Parameter(random_tensor((4, 4)))
    inner = InnerTensors([weight], copied=True)
    tokens = random_tensor((5, 4))
    with inner.dropped():
        output = torch.nn.functional.gelu(tokens @ weight).square()
    kept = torch.nn.functional.gelu(tokens @ weight).square()
    (expected,) = torch.autograd.grad(kept.sum(), weight)
    inner.store().wait()
    with pytest.raises(AssertionError, match="before its tensors are restored"):
        torch.autograd.grad(output.sum(), weight, retain_graph=True)
    inner.load().wait()
    (found,) = torch.autograd.grad(output.sum(), weight)
    assert torch.equal(found, expected)
