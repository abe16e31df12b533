"""What is measured of a pass besides its time, without ranks and GPU; and the clock of an emulated link."""

import ctypes

import pytest

pytest.importorskip("torch")
import torch

from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.tape import Tape
from megatron_ampipe.schedule import Stage, kinds
from megatron_ampipe.tools.measuring import emulation, meters
from megatron_ampipe.tools.measuring.network import SPIN_KERNELS


class _Device:
    """A GPU with the host's clock: stays busy for the given time, and records its work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.busy_until_s = 0.0, 0.0
        self.happened: list[str] = []
        device = self

        class Event:
            def __init__(self, **_: object) -> None:
                self.over_s = 0.0

            def record(self, _stream: object = None) -> None:
                self.over_s = device.busy_until_s
                device.happened.append("event")

            def query(self) -> bool:
                return self.over_s <= device.now_s

        for name, value in (
            ("Event", Event),
            ("_sleep", self.spin),
            ("is_available", lambda: True),
            ("current_stream", lambda: None),
        ):
            monkeypatch.setattr(meters.torch.cuda, name, value)
        monkeypatch.setattr(meters.time, "perf_counter", lambda: self.now_s)

    def spin(self, cycles: int) -> None:
        self.busy_until_s = max(self.busy_until_s, self.now_s) + cycles / 2e9
        self.happened.append("spin")


def test_a_stage_on_a_gpu_is_timed_from_when_all_of_it_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    device = _Device(monkeypatch)
    recorder = Recorder(num_iterations=9)
    timer = meters.StageTimer(recorder)
    recorder.start_iteration(1)
    stage = Stage(kinds.EXPERT, 0)

    def run(issue_s: float) -> float:
        def issue(_: object) -> None:
            device.happened.append("stage")
            device.now_s += issue_s

        begin_s, device.busy_until_s = device.now_s, 0.0
        timer.execute(Tape.of([("compute", stage)], {stage: ()}), issue, recorder)
        return device.busy_until_s - begin_s

    run(1e-3)
    # Twice as long as the host took the last time.
    assert run(1e-3) == pytest.approx(2e-3)
    # What is said of a stage is between the last two events: after the spin, around the stage.
    assert device.happened[-5:] == ["spin", "event", "event", "stage", "event"]
    run(3e-3)
    assert run(3e-3) == pytest.approx(6e-3)
    # A host that waits for the device is not waited for in turn.
    run(1.0)
    assert run(1.0) == pytest.approx(1e-2)
    # It has not only issued: times in which the device was out of work do not count.
    assert timer.issued_us() == {"forward": {"expert": 1000.0}}


# The emulated link


def _nvrtc() -> ctypes.CDLL | None:
    """torch's run-time compiler for CUDA, which needs no GPU; None if this torch is built without it."""
    version = torch.version.cuda
    return ctypes.CDLL(f"libnvrtc.so.{version.partition('.')[0]}") if version else None


NVRTC = _nvrtc()


def test_torch_finds_the_function_in_the_source() -> None:
    kernel = torch.cuda.jiterator._create_jit_fn(emulation.SPIN_SOURCE, nanoseconds=0)
    assert kernel.kernel_name == SPIN_KERNELS[0]


@pytest.mark.skipif(NVRTC is None, reason="this torch brings no NVRTC")
def test_the_kernel_compiles_and_reads_the_nanosecond_timer() -> None:
    assert NVRTC is not None
    # With the code that torch adds: the type, and a kernel that calls it for one element.
    source = (
        "typedef long long int int64_t;\n" + emulation.SPIN_SOURCE + 'extern "C" __global__ void '
        "probe(int64_t *data, int64_t time) { data[0] = ampipe_spin<int64_t>(data[0], time); }"
    )
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert NVRTC.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"probe.cu", 0, None, None) == 0
    words = (b"--gpu-architecture=sm_90", b"-default-device", b"-std=c++17")
    assert NVRTC.nvrtcCompileProgram(program, len(words), (ctypes.c_char_p * len(words))(*words)) == 0
    assert NVRTC.nvrtcGetPTXSize(program, ctypes.byref(size)) == 0
    ptx = ctypes.create_string_buffer(size.value)
    assert NVRTC.nvrtcGetPTX(program, ptx) == 0
    # Both reads of the timer are present: the loop was not optimised away.
    assert ptx.value.decode().count("%globaltimer") == 2


@pytest.mark.parametrize(
    ("measured_s", "why"),
    [
        (5.02e-3, None),
        (1e-3, "the timer let 1.00 ms pass for 5.00 ms"),
        (None, "the kernel cannot be compiled (libnvrtc.so is missing)"),
    ],
)
def test_a_timer_that_does_not_keep_time_is_not_taken(
    measured_s: float | None, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled() -> object:
        if measured_s is None:
            raise RuntimeError("libnvrtc.so is missing\nat ...")
        return lambda seconds: "nanoseconds"

    monkeypatch.setattr(emulation, "_by_nanoseconds", compiled)
    monkeypatch.setattr(emulation, "_by_cycles", lambda: lambda seconds: "cycles")
    monkeypatch.setattr(emulation, "_seconds", lambda launch: measured_s)
    spin, found = emulation.device_spin()
    assert found == why
    assert spin(1.0) == ("nanoseconds" if why is None else "cycles")
