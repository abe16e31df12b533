"""The kernel of an emulated link that moves bytes: how long it lasts; every block moves its share."""

from typing import Any

import pytest
import torch

from megatron_ampipe.tools.measuring import moving
from megatron_ampipe.tools.measuring.meters import Clock
from megatron_ampipe.tools.measuring.moving import Move
from megatron_ampipe.tools.measuring.network import parse_link

pytestmark = pytest.mark.gpu
TRANSFER_BYTES = 100_000_000


@pytest.mark.parametrize(
    "text", ["emulated:20GB/s:nccl", "emulated:50GB/s:nccl32", "emulated:50GB/s:1ms:nccl8"]
)
def test_a_transfer_lasts_as_long_as_the_link_takes(text: str) -> None:
    link = parse_link(text)
    assert link.blocks is not None
    launch = moving.device_mover(link.blocks)
    for size in (0, 1_000_000, TRANSFER_BYTES):
        clock = Clock(on_cuda=True)
        launch(Move.of(link, size, size))
        measured_s, asked_s = clock.passed_s(), link.transfer_s(size)
        # The time of a launch, and of a look at the timer.
        assert asked_s <= measured_s + 2e-6
        assert measured_s < 1.05 * asked_s + 50e-6, f"{size} bytes took {measured_s * 1e3:.3f} ms"


def test_every_block_moves_its_share() -> None:
    kernel, calls = moving._kernel(), []

    def launched(**launch: Any) -> object:
        calls.append(launch)
        return kernel(**launch)

    launch = moving.launcher(launched, 16)
    launch(Move(16, 1, 0.0))
    source, target, *_ = calls[0]["args"]
    source.fill_(7)
    # More than a piece, and not a whole number of them.
    launch(Move(16, 9_001, 1e-4))
    slices = target.view(16, -1)
    assert bool((slices[:, : 9_001 * 16] == 7).all())
    assert bool((slices[:, 9_001 * 16 :] == 0).all())
    # Longer than a slice, which is used again.
    launch(Move(16, slices.shape[1] // 16 + 5, 1e-3))
    torch.cuda.synchronize()
    assert bool((target == 7).all())
