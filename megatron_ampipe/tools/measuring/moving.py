"""The transfers of an emulated link that costs the device what NCCL's kernels cost it (``:nccl``).

A transfer is one kernel, as each all-to-all of NCCL is: tokens and their probabilities are two. It holds
thread blocks of as many threads as NCCL's and of shared memory, so that large blocks of other kernels find no
room next to them. It moves the bytes at the link's rate: every byte that the rank sends or receives is read
once and written once, as NCCL's kernels do between a tensor and the buffer of a channel. Every block has its
slice of two buffers, copies a piece, and waits until the link would have carried as much.

Not emulated: the other side of the link, which writes and reads the same memory without a kernel here.

On a CPU the thread that waits for the link copies the same bytes.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_ampipe.errors import EnvironmentMissing
from megatron_ampipe.tools.measuring.meters import Clock
from megatron_ampipe.tools.measuring.network import Link

THREADS = 640
"""Of a block, as NCCL's kernels have."""
SHARED_BYTES = 40 * 1024
"""Of a block. More than 48 KiB would need another call before the first launch."""
_VECTOR_BYTES = 16
_SLICE_BYTES, _PIECE_BYTES = 4 * 1024**2, 128 * 1024
"""Of a block: its slice of a buffer, as large as NCCL's, and what it copies between looks at the timer."""
_TRIAL_S, _ALLOWED_ERROR = 5e-3, 0.05
_NAME = "ampipe_move"

MOVE_SOURCE = f"""
#define THREADS {THREADS}
#define SLICE {_SLICE_BYTES // _VECTOR_BYTES}LL
#define PIECE {_PIECE_BYTES // _VECTOR_BYTES}LL
struct alignas(16) Vector {{ unsigned int words[4]; }};

static __device__ unsigned long long now_ns() {{
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}}

extern "C" __global__ void __launch_bounds__(THREADS)
ampipe_move(const Vector *source, Vector *target, double vectors, double nanoseconds) {{
  const unsigned long long begin = now_ns();
  const long long all = (long long)vectors;
  const Vector *__restrict__ from = source + blockIdx.x * SLICE;
  Vector *__restrict__ to = target + blockIdx.x * SLICE;
  for (long long done = 0; done < all; done += PIECE) {{
    const long long end = min(done + PIECE, all);
    #pragma unroll 4
    for (long long at = done + threadIdx.x; at < end; at += THREADS) to[at % SLICE] = from[at % SLICE];
    __syncthreads();
    if (threadIdx.x == 0) {{
      const unsigned long long due = (unsigned long long)(nanoseconds * end / all);
      while (now_ns() - begin < due) {{}}
    }}
    __syncthreads();
  }}
}}
"""
"""The kernel: each block copies ``vectors`` of 16 bytes within ``nanoseconds``, at a constant rate."""


@dataclass(frozen=True, slots=True)
class Move:
    """One launch.

    Attributes:
        blocks: Thread blocks.
        vectors: Vectors of 16 bytes that each of them copies; at least one, so that each waits.
        seconds: How long it lasts.
    """

    blocks: int
    vectors: int
    seconds: float

    @classmethod
    def of(cls, link: Link, sent: int, received: int) -> Move:
        """The launch of an all-to-all in which a rank sends and receives so many bytes to and from others."""
        assert link.blocks is not None
        vectors = -(-(sent + received) // (link.blocks * _VECTOR_BYTES))
        return cls(link.blocks, max(vectors, 1), link.transfer_s(max(sent, received)))


def device_mover(blocks: int) -> Callable[[Move], object]:
    """A function that launches a move of so many blocks on the current stream.

    Raises:
        EnvironmentMissing: The kernel cannot be compiled here, or does not last as long as it should.
    """
    try:
        kernel = _kernel()
    except (RuntimeError, AttributeError, ImportError, OSError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise _unusable(f"its kernel cannot be compiled ({why})") from error
    launch = launcher(kernel, blocks)
    trial = Move(blocks, 1, _TRIAL_S)
    launch(trial)
    clock = Clock(on_cuda=True)
    launch(trial)
    measured_s = clock.passed_s()
    if abs(measured_s / _TRIAL_S - 1) > _ALLOWED_ERROR:
        raise _unusable(f"its timer let {measured_s * 1e3:.2f} ms pass for {_TRIAL_S * 1e3:.2f} ms")
    return launch


def launcher(kernel: Callable[..., object], blocks: int) -> Callable[[Move], object]:
    """A function that launches a kernel of :data:`MOVE_SOURCE` between two buffers of the device."""
    source, target = (torch.zeros(blocks * _SLICE_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))

    def launch(move: Move) -> object:
        assert move.blocks == blocks, "buffers have a slice for each block"
        numbers = [float(move.vectors), float(round(move.seconds * 1e9))]
        return kernel(
            grid=(blocks, 1, 1),
            block=(THREADS, 1, 1),
            args=[source, target, *numbers],
            shared_mem=SHARED_BYTES,
        )

    return launch


def host_mover() -> Callable[[Move], object]:
    """A function that makes this thread copy what all blocks would, at the same rate."""
    source, target = (torch.zeros(_SLICE_BYTES, dtype=torch.uint8) for _ in range(2))

    def move_here(move: Move) -> None:
        begin_s, size = time.monotonic(), move.blocks * move.vectors * _VECTOR_BYTES
        for done in range(0, size, _SLICE_BYTES):
            end = min(done + _SLICE_BYTES, size)
            target[: end - done].copy_(source[: end - done])
            left_s = begin_s + move.seconds * end / size - time.monotonic()
            time.sleep(max(left_s, 0.0))

    return move_here


def _unusable(why: str) -> EnvironmentMissing:
    return EnvironmentMissing(f"a link with :nccl cannot be emulated: {why}. Leave :nccl out of --link.")


def _kernel() -> Callable[..., object]:
    from torch.cuda._utils import _cuda_load_module

    major, minor = torch.cuda.get_device_capability()
    by_name = _cuda_load_module(compiled(f"sm_{major}{minor}"), [_NAME])
    assert isinstance(by_name, dict), "it is one if names are given"
    return by_name[_NAME]


def compiled(architecture: str) -> bytes:
    """The device code of :data:`MOVE_SOURCE`, from torch's run-time compiler; needs no GPU and no headers.

    Raises:
        RuntimeError: It does not compile; the text is the compiler's.
    """
    assert torch.version.cuda is not None, "this torch is built without CUDA"
    nvrtc = ctypes.CDLL(f"libnvrtc.so.{torch.version.cuda.partition('.')[0]}")
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    words = (f"--gpu-architecture={architecture}".encode(), b"-std=c++17")
    nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), MOVE_SOURCE.encode(), f"{_NAME}.cu".encode(), 0, None, None
    )
    failed = nvrtc.nvrtcCompileProgram(program, len(words), (ctypes.c_char_p * len(words))(*words))
    ask_size, ask = (
        (nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        if failed
        else (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    )
    ask_size(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    ask(program, text)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise RuntimeError(text.value.decode())
    return text.raw
