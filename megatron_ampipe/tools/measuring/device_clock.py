"""Keeps a CUDA stream busy for a time: by the device's nanosecond timer, or by its clock cycles.

A GPU changes its clock rate with load and heat, so a number of cycles is not a time. Its ``%globaltimer``
counts nanoseconds whatever the clock; it advances in steps of at most about a microsecond. torch compiles the
kernel when it is first used, with the compiler that it brings (NVRTC); nothing else has to be installed.
Where that fails, or the timer is wrong, cycles are counted, and the reason is returned. Used by
:mod:`.emulation`. The kernel compiles (a test does that); it has not been run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

Clock = Literal["nanoseconds", "cycles"]

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
"""What each thread does for one element: wait, and return how long it waited."""

_CALIBRATION_CYCLES = 20_000_000
_TRIAL_S = 5e-3
_ALLOWED_ERROR = 0.05
"""Of the trial, compared with CUDA's events: far above the time of a launch, far below another unit."""


def device_spin() -> tuple[Callable[[float], object], Clock, str | None]:
    """A function that keeps the current stream busy for a number of seconds.

    Returns:
        The function; what it counts; and why that is cycles, if it is.
    """
    try:
        spin = _by_nanoseconds()
    except (RuntimeError, AttributeError, OSError) as error:
        reason = f"the kernel cannot be compiled ({str(error).strip().splitlines()[0]})"
        return _by_cycles(), "cycles", reason
    measured_s = _seconds(lambda: spin(_TRIAL_S))
    if abs(measured_s / _TRIAL_S - 1) > _ALLOWED_ERROR:
        reason = f"the timer let {measured_s * 1e3:.2f} ms pass for {_TRIAL_S * 1e3:.2f} ms"
        return _by_cycles(), "cycles", reason
    return spin, "nanoseconds", None


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
    """How long the device needs for what ``launch`` launches, by events; the second time, warm."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    launch()
    begin.record()
    launch()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
