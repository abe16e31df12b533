"""The kernel that keeps a GPU busy for some time, without a GPU: compilation, and choice of the clock."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_ampipe.tools.measuring import device_clock
from megatron_ampipe.tools.measuring.link import SPIN_KERNELS


def _nvrtc() -> ctypes.CDLL | None:
    """torch's run-time compiler for CUDA, which needs no GPU; None if this torch is built without it."""
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    found = [path for folder in folders for path in sorted(Path(folder).glob("*/lib/libnvrtc.so.*"))]
    return ctypes.CDLL(str(found[0])) if found else None


NVRTC = _nvrtc()


def test_torch_finds_the_function_in_the_source() -> None:
    kernel = torch.cuda.jiterator._create_jit_fn(device_clock.SPIN_SOURCE, nanoseconds=0)
    assert kernel.kernel_name == SPIN_KERNELS[0]
    with pytest.raises(KeyError, match="cycles"):
        # What it is called with is declared.
        kernel.is_cuda_available = True
        kernel(cycles=3)


@pytest.mark.skipif(NVRTC is None, reason="this torch brings no NVRTC")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_the_kernel_compiles_and_reads_the_nanosecond_timer(architecture: str) -> None:
    assert NVRTC is not None
    # With the code that torch adds: the type, and a kernel that calls it for one element.
    source = (
        "typedef long long int int64_t;\n" + device_clock.SPIN_SOURCE + 'extern "C" __global__ void '
        "probe(int64_t *data, int64_t time) { data[0] = ampipe_spin<int64_t>(data[0], time); }"
    )
    program = ctypes.c_void_p()
    text = source.encode()
    assert NVRTC.nvrtcCreateProgram(ctypes.byref(program), text, b"probe.cu", 0, None, None) == 0
    words = (f"--gpu-architecture={architecture}".encode(), b"-default-device", b"-std=c++17")
    code = NVRTC.nvrtcCompileProgram(program, len(words), (ctypes.c_char_p * len(words))(*words))
    size = ctypes.c_size_t()
    NVRTC.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    NVRTC.nvrtcGetProgramLog(program, log)
    assert code == 0, log.value.decode()
    assert NVRTC.nvrtcGetPTXSize(program, ctypes.byref(size)) == 0
    ptx = ctypes.create_string_buffer(size.value)
    assert NVRTC.nvrtcGetPTX(program, ptx) == 0
    # Both reads of the timer are present: the loop was not optimised away.
    assert ptx.value.decode().count("%globaltimer") == 2


@pytest.fixture
def cycles(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], object]:
    def by_cycles(seconds: float) -> object:
        raise AssertionError("only built here")

    monkeypatch.setattr(device_clock, "_by_cycles", lambda: by_cycles)
    return by_cycles


def test_a_timer_that_keeps_time_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    spin = lambda seconds: None  # noqa: E731
    monkeypatch.setattr(device_clock, "_by_nanoseconds", lambda: spin)
    monkeypatch.setattr(device_clock, "_seconds", lambda launch: 5.02e-3)
    assert device_clock.device_spin() == (spin, "nanoseconds", None)


def test_a_timer_that_does_not_keep_time_is_named(
    monkeypatch: pytest.MonkeyPatch, cycles: Callable[[float], object]
) -> None:
    monkeypatch.setattr(device_clock, "_by_nanoseconds", lambda: lambda seconds: None)
    monkeypatch.setattr(device_clock, "_seconds", lambda launch: 1e-3)
    found = device_clock.device_spin()
    assert found == (cycles, "cycles", "the timer let 1.00 ms pass for 5.00 ms")


def test_a_kernel_that_cannot_be_compiled_is_named(
    monkeypatch: pytest.MonkeyPatch, cycles: Callable[[float], object]
) -> None:
    def fail() -> None:
        raise RuntimeError("libnvrtc.so is missing\nat ...")

    monkeypatch.setattr(device_clock, "_by_nanoseconds", fail)
    found = device_clock.device_spin()
    assert found == (cycles, "cycles", "the kernel cannot be compiled (libnvrtc.so is missing)")
