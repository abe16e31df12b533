"""What is measured of a pass besides its time, without ranks and GPU; and the clock of an emulated link."""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import threading
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist

from megatron_ampipe.launch.host import all_to_all
from megatron_ampipe.runtime.executors import ThreadExecutor
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.tape import Tape
from megatron_ampipe.schedule import Direction, Stage, kinds
from megatron_ampipe.tools.measuring import emulation, meters, network
from megatron_ampipe.tools.measuring.link import SPIN_KERNELS, parse_link

# Stages alone


@pytest.mark.parametrize("saved_bytes", [0, 32_768])
def test_only_the_first_collective_of_a_direction_gets_what_a_link_saved(
    saved_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    monkeypatch.setattr(meters.dist, "barrier", lambda: happened.append("barrier"))
    monkeypatch.setattr(meters, "_spend", lambda size: happened.append(f"spend {size}"))
    stages = [Stage(kinds.DISPATCH, 0), Stage(kinds.EXPERT, 0), Stage(kinds.COMBINE, 0)]
    order = [("comm" if stage.is_communication else "compute", stage) for stage in stages]
    timer = meters.StageTimer(saved_bytes=saved_bytes)
    for _ in Direction:
        happened.clear()
        tape = Tape.of(order, dict.fromkeys(stages, ()))
        timer.execute(tape, lambda call: happened.append(str(call.stage)), Recorder())
        spend = [f"spend {saved_bytes}"] if saved_bytes else []
        assert happened == ["barrier", "dispatch.0", "expert.0", "barrier", *spend, "combine.0"]
    assert network.burst_bytes(100e6) == 32 * 1024 > network._SEGMENT_BYTES
    assert network.burst_bytes(10e9) == 312_500


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
    timer, recorder = meters.StageTimer(), Recorder(num_iterations=9)
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


# Memory

KIB = 1024


def test_the_most_that_is_alive_at_once_is_counted() -> None:
    known, meter = torch.zeros(KIB), meters.TensorMeter()
    kept = []

    def run() -> None:
        kept.clear()
        first = torch.empty(KIB, dtype=torch.uint8)
        view, second = first[10:], torch.empty(2 * KIB, dtype=torch.uint8)
        del first, view, second
        known.add_(1)
        kept.append(torch.empty(KIB, dtype=torch.uint8))

    assert meters.peak_bytes(run, passes=2, known=[known], meter=meter) == 3 * KIB
    assert meter.now == KIB


def test_other_threads_of_an_executor_are_watched() -> None:
    meter = meters.TensorMeter()
    stages = [Stage(kinds.QKV), Stage(kinds.DISPATCH, 0)]
    order = [("compute", stages[0]), ("comm", stages[1])]
    threads, made = set(), []

    def stage(_: object) -> None:
        threads.add(threading.get_ident())
        made.append(torch.empty(KIB, dtype=torch.uint8))

    def run() -> None:
        made.clear()
        watched.execute(Tape.of(order, {each: () for each in stages}), stage, Recorder())

    watched = meters.WatchedExecutor(ThreadExecutor(), meter)
    assert meters.peak_bytes(run, passes=2, known=(), meter=meter) == 2 * KIB
    assert len(threads) > 1


# Bytes


def test_bytes_are_of_the_link_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    counters = tmp_path / "dev"
    counters.write_text("    lo: 1 2 3 4 5 6 7 8 90\nampipe0: 1 2 3 4 5 6 7 8 77 0\n")
    monkeypatch.setattr(meters, "Path", lambda _: counters)
    assert meters.sent_bytes() == 77


# The emulated link


def test_an_emulated_link_stays_when_the_host_platform_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    torchs = dist.all_to_all_single
    monkeypatch.setattr(dist, "all_to_all_single", torchs)
    monkeypatch.setattr(all_to_all, "_gloo", None)
    emulation.install(parse_link("emulated:8mbit"), on_cuda=False, pretended=False)
    slowed = dist.all_to_all_single
    all_to_all.install()
    assert dist.all_to_all_single is slowed
    # What it slows is the host platform's, for both layers.
    assert inspect.getclosurevars(slowed).nonlocals["exchange"] is all_to_all._all_to_all_single
    assert all_to_all._gloo is torchs


def _nvrtc() -> ctypes.CDLL | None:
    """torch's run-time compiler for CUDA, which needs no GPU; None if this torch is built without it."""
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    libraries = [path for folder in folders for path in sorted(Path(folder).glob("*/lib/libnvrtc.so.*"))]
    return ctypes.CDLL(str(libraries[0])) if libraries else None


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
