"""The emulated link, and emulated peers. The only module that patches torch's collectives.

:func:`install` replaces ``torch.distributed.all_to_all_single``, which both Megatron's layer and AMPipe's
look up at every call. So every all-to-all of both, forward and backward, takes ``latency + bytes / rate``
longer than its copy, on the lane that waits for it: on CPU the thread sleeps, on CUDA a kernel of one thread
spins on the stream. This is how the paper slowed its links (section 4.3). ``bytes`` is what the rank sends to
or receives from others, whichever is more. The small exchange of counts takes no longer.

A GPU changes its clock rate, so a number of cycles is not a time. Its ``%globaltimer`` counts nanoseconds;
torch compiles the kernel that reads it (NVRTC). Where that fails, or the timer is wrong, cycles are counted.

Emulated peers are for one GPU: this process is rank 0 of N. Every other rank is its mirror image: it sends
as many tokens to each of this rank's experts as this rank sends to the expert of the same place there, and
these tokens are the ones that this rank sends it, with the opposite sign. This equals one rank with all
experts, in which expert ``l`` of every other rank has the weights of this rank's expert ``l``, all negated;
the tests compare outputs and gradients with that.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ampipe.tools.measuring.meters import Clock
from megatron_ampipe.tools.measuring.moving import Move, device_mover, host_mover
from megatron_ampipe.tools.measuring.network import Link

SPIN_SOURCE = """
template <typename T>
T ampipe_spin(T unused, T nanoseconds) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < (unsigned long long)nanoseconds);
  return now - begin;
}
"""
"""The code of each thread for one element: wait, and return how long it waited."""

_CALIBRATION_CYCLES = 20_000_000
_TRIAL_S = 5e-3
_ALLOWED_ERROR = 0.05
"""Length of the trial that is compared with CUDA's events: much longer than the time of a launch."""


class Emulation:
    """The installed emulation.

    Attributes:
        why_cycles: Why a GPU's link counts clock cycles, if it does.
        num_experts: Experts of the running layer over all ranks. With emulated peers, set it before the
            layer runs: they must know which counts belong to their experts.
    """

    why_cycles: str | None = None
    num_experts: int | None = None
    delay: Callable[[], object] = staticmethod(lambda: None)
    """What the exchange of counts waits for."""

    def gather_counts(
        self, output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
    ) -> SequentialWork | None:
        """Replaces ``all_gather_into_tensor``: makes the counts of every emulated peer from this rank's.

        ``input`` is ``[chunks * experts]``, ``output`` ``[ranks * chunks * experts]``.
        """
        ranks = _or_world(group).size()
        experts = self.num_experts
        assert experts is not None, "num_experts has to be set for an emulated peer"
        assert input.dim() == 1 and not input.is_floating_point() and input.numel() % experts == 0, (
            "emulated peers can exchange counts of tokens only"
        )
        counts = input.view(-1, experts)[:, _rotation(ranks, experts, input.device)].transpose(0, 1)
        output.view(counts.shape).copy_(counts)
        return _handle((self.delay,), async_op)


@functools.cache
def _rotation(ranks: int, experts: int, device: torch.device) -> Tensor:
    """``[ranks, experts]``: rank p sends to its q-th next rank what this rank sends to its own."""
    shift = torch.arange(ranks, device=device) * (experts // ranks)
    return (torch.arange(experts, device=device).unsqueeze(0) + shift.unsqueeze(1)) % experts


def install(link: Link, *, on_cuda: bool, emulates_peers: bool) -> Emulation:
    """Patch ``all_to_all_single``, and ``all_gather_into_tensor`` where peers are emulated or late."""
    emulation = Emulation()
    wait: Callable[[float], object] = time.sleep
    if on_cuda:
        wait, emulation.why_cycles = device_spin()
    occupy = _occupation(link, wait, on_cuda=on_cuda)
    exchange, gather = dist.all_to_all_single, dist.all_gather_into_tensor
    if link.skew_s:
        emulation.delay = functools.partial(wait, link.skew_s)

    def all_to_all_single(
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> SequentialWork | None:
        group = _or_world(group)
        splits = _as_list(output_split_sizes), _as_list(input_split_sizes)
        received = _foreign_bytes(output, splits[0], group)
        sent = _foreign_bytes(input, splits[1], group)
        works: tuple[Callable[[], object], ...]
        if emulates_peers:
            # Received rows must not be visible before the link's time is over.
            works = (lambda: occupy(sent, received), lambda: mirror(output, input, *splits, group=group))
        else:
            work = exchange(output, input, *splits, group=group, async_op=True)
            assert work is not None, "this rank is in the group"
            works = (work.wait, lambda: occupy(sent, received))
        return _handle(works, async_op)

    def all_gather_into_tensor(
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> dist.Work | SequentialWork | None:
        if input_tensor.is_floating_point():
            return gather(output_tensor, input_tensor, group=group, async_op=async_op)
        work = gather(output_tensor, input_tensor, group=group, async_op=True)
        assert work is not None, "this rank is in the group"
        return _handle((work.wait, emulation.delay), async_op)

    # A handle is no torch.distributed.Work, and has what is used of one.
    dist.all_to_all_single = all_to_all_single  # type: ignore[assignment]
    if emulates_peers:
        dist.all_gather_into_tensor = emulation.gather_counts  # type: ignore[assignment]
    elif link.skew_s:
        dist.all_gather_into_tensor = all_gather_into_tensor  # type: ignore[assignment]
    return emulation


def _occupation(
    link: Link, wait: Callable[[float], object], *, on_cuda: bool
) -> Callable[[int, int], object]:
    """What an all-to-all does for the link's time, by the bytes that it sends and receives."""
    if link.blocks is None:
        return lambda sent, received: wait(link.transfer_s(max(sent, received)))
    move = device_mover(link.blocks) if on_cuda else host_mover()
    return lambda sent, received: move(Move.of(link, sent, received))


@torch.no_grad()
def mirror(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    *,
    group: dist.ProcessGroup,
) -> None:
    """An all-to-all with emulated peers: rows for this rank arrive, rows for another rank return negated.

    Probabilities come back as they are. The function is its own adjoint, as an all-to-all is with its splits
    exchanged, so it also serves the backward pass.
    """
    assert _as_list(output_split_sizes) == _as_list(input_split_sizes), (
        "an emulated peer sends as many rows as it is sent"
    )
    own = input.shape[0] // group.size() if input_split_sizes is None else input_split_sizes[0]
    if input.dim() == 1:
        output.copy_(input)
        return
    # This process is rank 0, so its rows stand first.
    output[:own].copy_(input[:own])
    torch.neg(input[own:], out=output[own:])


class SequentialWork:
    """A handle whose first wait calls these functions in order. The times of several handles add up."""

    def __init__(self, works: Sequence[Callable[[], object]]) -> None:
        self._works = tuple(works)

    def wait(self, *_: object) -> bool:
        works, self._works = self._works, ()
        for work in works:
            work()
        return True


def _handle(works: Sequence[Callable[[], object]], async_op: bool) -> SequentialWork | None:
    """The handle of these works; None if they are done at once."""
    handle = SequentialWork(works)
    if async_op:
        return handle
    handle.wait()
    return None


def _or_world(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    group = group or dist.group.WORLD
    assert group is not None
    return group


def _as_list(splits: Sequence[int] | None) -> list[int] | None:
    return None if splits is None else [int(rows) for rows in splits]


def _foreign_bytes(tensor: Tensor, splits: Sequence[int] | None, group: dist.ProcessGroup) -> int:
    """Bytes of a tensor's rows that belong to other ranks."""
    rows = tensor.shape[0]
    own = splits[group.rank()] if splits is not None else rows // group.size()
    return (rows - own) * (tensor.numel() // max(rows, 1)) * tensor.element_size()


def device_spin() -> tuple[Callable[[float], object], str | None]:
    """A function that keeps the current stream busy for some seconds; and why it counts cycles, or None."""
    try:
        spin = _by_nanoseconds()
    except (RuntimeError, AttributeError, OSError) as error:
        return _by_cycles(), f"the kernel cannot be compiled ({str(error).strip().splitlines()[0]})"
    measured_s = _seconds(lambda: spin(_TRIAL_S))
    if abs(measured_s / _TRIAL_S - 1) > _ALLOWED_ERROR:
        return _by_cycles(), f"the timer let {measured_s * 1e3:.2f} ms pass for {_TRIAL_S * 1e3:.2f} ms"
    return spin, None


def _by_nanoseconds() -> Callable[[float], object]:
    kernel = torch.cuda.jiterator._create_jit_fn(SPIN_SOURCE, nanoseconds=0)
    # One element, so one thread waits.
    element = torch.zeros(1, dtype=torch.int64, device="cuda")

    def spin(seconds: float) -> object:
        return kernel(element, nanoseconds=round(seconds * 1e9))

    # The first launch compiles.
    spin(0.0)
    return spin


def _by_cycles() -> Callable[[float], object]:
    cycles_per_s = _CALIBRATION_CYCLES / _seconds(lambda: torch.cuda._sleep(_CALIBRATION_CYCLES))
    return lambda seconds: torch.cuda._sleep(int(seconds * cycles_per_s))


def _seconds(launch: Callable[[], object]) -> float:
    """The device time of the kernels that ``launch`` launches, by events, in the second (warm) call."""
    launch()
    clock = Clock(on_cuda=True)
    launch()
    return clock.passed_s()
