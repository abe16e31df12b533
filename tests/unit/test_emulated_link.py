"""Emulated links that move bytes or are late: what is launched, and for how long; no GPU, no clock."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_ampipe.errors import EnvironmentMissing
from megatron_ampipe.tools.measuring import emulation, moving
from megatron_ampipe.tools.measuring.moving import Move
from megatron_ampipe.tools.measuring.network import SPIN_KERNELS, parse_link

NCCL = parse_link("emulated:20GB/s:nccl")
RATE_BYTES_PER_S = 20e9


class Launches:
    """Stands in for a compiled kernel."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **launch: Any) -> None:
        self.calls.append(launch)


class Hours:
    """A clock that sleeping alone moves."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


class Alone:
    """Stands in for the process group of two ranks, of which this is the first."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch) -> Hours:
    hours = Hours()
    monkeypatch.setattr(time, "monotonic", hours.monotonic)
    monkeypatch.setattr(time, "sleep", hours.sleep)
    return hours


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of the device are made on the CPU; collectives that are patched come back."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **kinds: zeros(*size, **kinds))
    for name in ("all_to_all_single", "all_gather_into_tensor"):
        monkeypatch.setattr(dist, name, getattr(dist, name))


def test_the_bytes_are_sent_and_received_at_the_rate() -> None:
    """The time is that of the busier direction; both directions cost memory."""
    move = Move.of(NCCL, 40_000_000, 8_000_000)
    assert move.seconds == pytest.approx(40e6 / RATE_BYTES_PER_S)
    # 16 blocks of 16 bytes a vector.
    assert (move.blocks, move.vectors) == (16, 48_000_000 // (16 * 16))
    # Nothing is lost to rounding down.
    assert Move.of(NCCL, 257, 0).vectors == 2
    # A transfer to nobody waits for the latency, so it has something to copy.
    late = Move.of(parse_link("emulated:20GB/s:10us:nccl32"), 0, 0)
    assert late == Move(32, 1, pytest.approx(10e-6))


def test_a_transfer_is_one_launch_with_its_bytes_and_its_time(on_host: None) -> None:
    kernel = Launches()
    launch = moving.launcher(kernel, 32)
    launch(Move(32, 1000, 1.5e-3))
    (call,) = kernel.calls
    source, target, vectors, nanoseconds = call["args"]
    assert (call["grid"], call["block"]) == ((32, 1, 1), (moving.THREADS, 1, 1))
    # torch passes an int as 32 bits, and a float as the 64 that the kernel takes.
    assert (vectors, nanoseconds) == (1000.0, 1.5e6)
    assert isinstance(vectors, float)
    assert isinstance(nanoseconds, float)
    # A slice of each block, as the kernel has it, in either buffer.
    (slice_vectors,) = re.findall(r"#define SLICE (\d+)LL", moving.MOVE_SOURCE)
    assert source.numel() == target.numel() == 32 * 16 * int(slice_vectors)
    assert source.data_ptr() != target.data_ptr()
    # What torch launches without being told the size before.
    assert 0 < call["shared_mem"] < 48 * 1024


def test_the_kernel_compiles_with_torchs_compiler() -> None:
    assert SPIN_KERNELS[-1].encode() in moving.compiled("sm_90")


def test_what_the_compiler_says_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "MOVE_SOURCE", "nothing of C")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.raises(EnvironmentMissing, match=r"cannot be compiled \(ampipe_move.cu.*Leave :nccl out"):
        moving.device_mover(16)


@pytest.mark.parametrize("measured_s", [1e-3, 5.02e-3, 8e-3])
def test_a_kernel_that_does_not_last_as_long_is_refused(
    measured_s: float, on_host: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Measured:
        def __init__(self, *, on_cuda: bool) -> None:
            assert on_cuda

        def passed_s(self) -> float:
            return measured_s

    kernel = Launches()
    monkeypatch.setattr(moving, "_kernel", lambda: kernel)
    monkeypatch.setattr(moving, "Clock", Measured)
    if measured_s == 5.02e-3:
        moving.device_mover(16)
        assert len(kernel.calls) == 2
    else:
        with pytest.raises(EnvironmentMissing, match=f"let {measured_s * 1e3:.2f} ms pass for 5.00 ms"):
            moving.device_mover(16)


def test_a_cpu_copies_the_bytes_at_the_rate(hours: Hours, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    copy = torch.Tensor.copy_

    def counted(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        copied.append(source.numel())
        # A thread that has copied waits for as much less.
        hours.now_s += 0.01
        return copy(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    move = Move(16, 40_000, 0.5)
    moving.host_mover()(move)
    assert sum(copied) == 16 * 40_000 * 16
    assert len(copied) > 1
    assert hours.now_s == pytest.approx(100.5)
    # At a constant rate, not all at once and then a wait.
    assert hours.slept[0] == pytest.approx(0.5 * copied[0] / sum(copied) - 0.01)


def _exchange(rows: int) -> None:
    """An all-to-all of rows of 1000 bytes between two ranks, half of them from and to this one."""
    sent = torch.zeros(rows, 250)
    dist.all_to_all_single(torch.empty_like(sent), sent, group=Alone())


@pytest.mark.parametrize(
    ("text", "transfer_s"),
    [
        ("emulated:1MB/s", 0.5),
        ("emulated:1MB/s:100ms", 0.6),
        ("emulated:1MB/s:nccl", 0.5),
        ("emulated:1MB/s:100ms:nccl32", 0.6),
    ],
)
def test_links_of_both_kinds_take_as_long(text: str, transfer_s: float, hours: Hours, on_host: None) -> None:
    emulation.install(parse_link(text), on_cuda=False, emulates_peers=True)
    _exchange(1000)
    assert hours.now_s == pytest.approx(100 + transfer_s)


def test_a_device_moves_tokens_and_probabilities_in_two_launches(
    on_host: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Launches()
    monkeypatch.setattr(emulation, "device_spin", lambda: (lambda seconds: None, None))
    monkeypatch.setattr(emulation, "device_mover", lambda blocks: moving.launcher(kernel, blocks))
    emulation.install(NCCL, on_cuda=True, emulates_peers=True)
    handles = [
        dist.all_to_all_single(torch.empty_like(part), part, group=Alone(), async_op=True)
        for part in (torch.zeros(1024, 256), torch.zeros(1024))
    ]
    # They are launched where they are waited for.
    assert kernel.calls == []
    for handle in handles:
        handle.wait()
    vectors = [call["args"][2] for call in kernel.calls]
    # Half of the rows leave, and as many arrive.
    assert vectors == [1024 * 256 * 4 / (16 * 16), 1024 * 4 / (16 * 16)]


def _late(emulates_peers: bool, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The exchange of counts over a link whose other ranks are 2 s late."""

    class Done:
        def wait(self) -> bool:
            return True

    monkeypatch.setattr(dist, "all_gather_into_tensor", lambda *_, **__: Done())
    installed = emulation.install(
        parse_link("emulated:1gbit:skew2s"), on_cuda=False, emulates_peers=emulates_peers
    )
    installed.num_experts = 4
    gather: Callable[..., Any] = dist.all_gather_into_tensor
    return gather


@pytest.mark.parametrize("emulates_peers", [True, False])
def test_counts_of_late_ranks_arrive_late(
    emulates_peers: bool, hours: Hours, on_host: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the rank that waits at once, and for one that goes on until it waits."""
    gather = _late(emulates_peers, monkeypatch)
    counts = torch.arange(4)
    gather(torch.empty(8, dtype=counts.dtype), counts, group=Alone())
    assert hours.now_s == 102
    handle = gather(torch.empty(8, dtype=counts.dtype), counts, group=Alone(), async_op=True)
    assert hours.now_s == 102
    handle.wait()
    handle.wait()
    assert hours.now_s == 104
    # Weights are gathered as before, and all-to-alls wait for their bytes alone.
    if not emulates_peers:
        gather(torch.empty(8), torch.zeros(4), group=Alone())
    assert hours.now_s == 104
