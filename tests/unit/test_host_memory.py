"""Copies to host memory: when they are made, in which blocks, and that memory is used again."""

import mmap
import random
from unittest import mock

import pytest

pytest.importorskip("torch")
import torch

from megatron_ampipe.runtime.host_copies import SMALLEST_BLOCK, HostCopies, block_sizes


def stored_copies(tensor: torch.Tensor) -> HostCopies:
    copies = HostCopies([tensor])
    copies.store(lambda: None).wait()
    return copies


def address(copies: HostCopies) -> int:
    return copies._pieces[0].blocks[0].data_ptr()


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


MIB = 1 << 20


@pytest.mark.parametrize(
    ("num_bytes", "sizes"),
    [
        (65 * MIB, [64 * MIB, 8 * MIB]),
        (64 * MIB, [64 * MIB]),
        (64 * MIB - 1, [64 * MIB]),
        (120 * MIB, [64 * MIB, 32 * MIB, 16 * MIB, 8 * MIB]),
        (121 * MIB, [128 * MIB]),
        (257 << 10, [256 << 10, 64 << 10]),
        (3000, [4096]),
        (1, [1]),
        (0, []),
    ],
)
def test_sizes_of_blocks(num_bytes: int, sizes: list[int]) -> None:
    assert block_sizes(num_bytes) == sizes


def test_little_host_memory_is_unused() -> None:
    """torch rounds a block up to a power of two: these are powers of two."""
    chooser = random.Random(0)
    for _ in range(5000):
        num_bytes = chooser.randrange(1, 1 << chooser.randrange(1, 40))
        sizes = block_sizes(num_bytes)
        assert all(size.bit_count() == 1 for size in sizes)
        assert len(sizes) <= 4 and sizes == sorted(set(sizes), reverse=True)
        assert 0 <= sum(sizes) - num_bytes < max(num_bytes / 8, SMALLEST_BLOCK)
        # The last block is used.
        assert sum(sizes[:-1]) < num_bytes


@pytest.mark.parametrize("num_elements", [0, 1, 5000, 65 << 8, 100_003, 480_000])
def test_values_of_several_blocks_are_restored(num_elements: int) -> None:
    whole = torch.randn(num_elements + 3)
    stored = [whole[1:-2], whole[: num_elements // 2], torch.arange(7)]
    expected = [tensor.clone() for tensor in stored]
    copies = HostCopies(stored)
    copies.store(lambda: None).wait()
    for tensor in stored:
        tensor.zero_()
    restored = copies.load()
    restored.wait()
    for tensor, values in zip(restored.outputs, expected, strict=True):
        assert torch.equal(tensor, values)
    if num_elements:
        assert restored.outputs[0].untyped_storage()._cdata == restored.outputs[1].untyped_storage()._cdata
