"""``scripts/gpu_check.sh`` without a GPU: wheels, steps and their time limits, results, the table."""

import dataclasses
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from gpu_check import __main__ as command
from gpu_check import findings, steps, wheels
from gpu_check.steps import Device, Done, Outcome, Step, plan, run
from gpu_check.torch_trace import read_profile
from megatron_ampipe.cli import build_parser
from megatron_ampipe.errors import BadInput
from megatron_ampipe.tools.measuring.grid import find_grid, read_grid

GPU = Device(gpu="NVIDIA Test", torch="2.11.0", cuda="13.0", python="3.12.3")


# Wheels


def make_wheel(folder: Path, name: str = "ampipe_probe") -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "VALUE = 3\n")
        wheel.writestr("../outside.py", "")


def test_packing_fetches_everything_but_torch_and_it_can_be_unpacked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, ...]] = []
    pack, site = tmp_path / "pack", tmp_path / "site"

    def pip(*words: str) -> None:
        calls.append(words)
        make_wheel(pack)

    monkeypatch.setattr(wheels, "_pip", pip)
    pack.mkdir()
    make_wheel(pack, "old")
    assert command.main(["--pack", str(pack)]) == 0
    assert f"1 wheels, 0.0 MiB, in {pack}" in capsys.readouterr().out
    words, of_training = calls
    assert {"pydantic", "--only-binary=:all:"} <= set(of_training)
    assert "megatron-core" in words and not {"torch", "numpy"} & set(words)
    assert {"--no-deps", "--only-binary=:all:"} <= set(words)
    wheels.unpack(pack, site)
    assert {path.name for path in site.iterdir()} == {"ampipe_probe.py", "outside.py"}
    (pack / "half-1-py3-none-any.whl").write_bytes(b"PK")
    with pytest.raises(BadInput, match=r"holds half-1-py3-none-any.whl, which is damaged"):
        wheels.unpack(pack, site)


def test_the_check_needs_no_compiled_modules_of_its_wheels(tmp_path: Path) -> None:
    """The parts of Megatron that the check imports, without a compiled module; AMPipe's, without pydantic."""
    spec = importlib.util.find_spec("megatron")
    assert spec is not None
    for folder in spec.submodule_search_locations or []:
        leave_out = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(folder, tmp_path / "megatron", ignore=leave_out, dirs_exist_ok=True)
    code = (
        "import sys; sys.modules['pydantic'] = None\n"
        "import megatron.core\n"
        "import megatron_ampipe.tools.measuring.blocks, megatron_ampipe.tools.measuring.timed_passes\n"
        "import tests.dist.blocks, megatron_ampipe.launch.host.megatron\n"
        f"assert megatron.core.__file__.startswith({str(tmp_path)!r})\n"
        "assert 'megatron.core.datasets.helpers_cpp' not in sys.modules\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(steps.REPOSITORY)])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Steps


def test_the_steps_fit_into_nine_minutes_and_use_what_exists(tmp_path: Path) -> None:
    groups = plan(tmp_path, tmp_path)
    assert sum(max(step.limit_s for step in group) for group in groups) <= steps.BUDGET_S < 9 * 60
    # What is timed runs alone.
    timed = {"profile", "partners", "bench"}
    assert all(len(group) == 1 for group in groups for step in group if step.kind in timed)
    planned = [step for group in groups for step in group]
    assert len({step.name for step in planned}) == len({step.result for step in planned}) == len(planned)
    assert {step.kind for step in planned} == {"tests", "training", *timed}
    for step in planned:
        # Without a C compiler, torch's would fail.
        compiles = step.environment["TORCHDYNAMO_DISABLE"] == "0"
        assert compiles == any("compiler" in need for need in step.needs), step.name
        if step.kind == "bench":
            parsed = build_parser("bench").parse_args(step.command[3:])
            cases = read_grid(find_grid(parsed.grid), only=parsed.cases, num_ranks=parsed.ranks)
            assert len(cases) == len(parsed.cases.split(","))
            assert step.result == parsed.json
    named = {word for step in planned for word in step.command if word.startswith("tests/gpu")}
    assert named == {f"tests/gpu/{path.name}" for path in (steps.REPOSITORY / "tests/gpu").glob("test_*.py")}


def test_what_a_machine_lacks_is_found_before_the_steps(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("")
    (tmp_path / "ampipe_broken.py").write_text("raise RuntimeError('no kernel for this GPU\\nmore')")
    (tmp_path / "ampipe_needs_another.py").write_text("import ampipe_einops")
    (tmp_path / "ampipe_ends.py").write_text("import os; os._exit(7)")
    needs = ["json", "ampipe_missing", "ampipe_broken", "ampipe_needs_another", steps.COMPILER, "ampipe_ends"]
    environment = {"PYTHONPATH": str(tmp_path), "PATH": ""}
    header = (Path(sysconfig.get_path("include")) / "Python.h").is_file()
    assert steps.missing(needs, environment) == {
        "ampipe_missing": "not installed",
        "ampipe_broken": "no kernel for this GPU",
        "ampipe_needs_another": "No module named 'ampipe_einops'",
        steps.COMPILER: "no compiler" if header else "no Python.h",
        "ampipe_ends": "does not load",
    }
    if header:
        assert steps.missing([steps.COMPILER], environment | {"CC": "cc"}) == {}


def test_a_step_that_lacks_something_is_skipped_with_the_reason(tmp_path: Path) -> None:
    late = run_it(tmp_path, step(tmp_path, "0/0"), budget_s=2)
    assert (late.outcome, late.seconds) == (Outcome.NO_TIME, 0.0)
    one = dataclasses.replace(step(tmp_path, "0/0"), needs=("json", "transformer_engine"))
    lacking = {"transformer_engine": "not installed", "rich": "not installed"}
    done = run_it(tmp_path, one, lacking=lacking)
    assert (done.outcome, done.said) == (Outcome.SKIPPED, "needs transformer_engine (not installed)")


def step(tmp_path: Path, code: str, *, limit_s: float = 20) -> Step:
    return Step("bench", "one", (sys.executable, "-c", code), tmp_path / "result", limit_s, needs=())


def run_it(
    tmp_path: Path, what: Step, *, budget_s: float = 60, lacking: dict[str, str] | None = None
) -> Done:
    log = tmp_path / "log"
    log.touch()
    deadline = time.monotonic() + budget_s
    (done,) = run([what], environment={}, lacking=lacking or {}, log=log, deadline=deadline)
    return done


def test_the_outcome_of_a_step_follows_its_exit_code(tmp_path: Path) -> None:
    for code, outcome in ((0, Outcome.OK), (3, Outcome.FAILED), (4, Outcome.DIFFERENT)):
        text = f"import sys; open('{tmp_path}/result', 'w').write('r'); print('last words'); sys.exit({code})"
        done = run_it(tmp_path, step(tmp_path, text))
        assert (done.outcome, done.said, done.found) == (outcome, "last words" if code else "", "r")
        assert "== one\nlast words" in (tmp_path / "log").read_text()


def test_a_step_over_its_time_limit_is_ended_with_its_child_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "_SHORTEST_S", 0.1)
    monkeypatch.setattr(steps, "_GRACE_S", 0.2)
    # It also ignores SIGTERM.
    text = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); child = os.fork()\n"
        f"open('{tmp_path}/pids', 'a').write(f'{{os.getpid()}} ')\n"
        "time.sleep(100)"
    )
    done = run_it(tmp_path, step(tmp_path, text, limit_s=3))
    assert (done.outcome, done.found) == (Outcome.CUT, None)
    assert 3 <= done.seconds < 30
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    end = time.monotonic() + 5
    while any(Path(f"/proc/{pid}/stat").exists() and " Z " not in stat_of(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.05)


def stat_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return " Z "


# Profiles


def on_device(name: str, stream: int, ts: float, dur: float, cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"stream": stream}}


def on_host(name: str, ts: float, cat: str = "cuda_runtime", dur: float = 1.0) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": {}}


def trace(*events: dict[str, Any]) -> dict[str, Any]:
    marks = [
        on_host("ampipe:forward", 1000.0, "user_annotation", 1000.0),
        on_host("ampipe:backward", 2000.0, "user_annotation", 1000.0),
        # The device's copy of an annotation does not count.
        {**on_device("ampipe:forward", 7, 1500.0, 10.0), "cat": "gpu_user_annotation"},
    ]
    return {"traceEvents": [{"ph": "M", "name": "process_name"}, *marks, *events]}


def test_the_overlap_of_a_trace() -> None:
    found = read_profile(
        trace(
            on_device("gemm", 7, 1000.0, 2000.0),
            on_device("ampipe_spin_vectorized2_kernel", 20, 2500.0, 1000.0),
            # A copy on the link's stream counts as communication.
            on_device("Memcpy DtoD", 20, 3500.0, 500.0, "gpu_memcpy"),
            on_device("gemm", 7, 5000.0, 500.0),
        )
    )
    assert (found.communication_ms, found.compute_ms) == (1.5, 2.5)
    assert found.hidden_share == pytest.approx(1 / 3)
    other_link = on_device("ampipe_spin_vectorized2_kernel", 7, 1500.0, 500.0)
    of_one_stream = trace(on_device("gemm", 7, 1000.0, 500.0), other_link)
    assert read_profile(of_one_stream).hidden_share == 0


def test_waits_of_the_host_are_counted_in_the_pass_only() -> None:
    found = read_profile(
        trace(
            on_host("cudaEventSynchronize", 1100.0),
            on_host("cudaEventSynchronize", 1200.0),
            on_host("cudaLaunchKernel", 1300.0),
            on_host("cudaMemcpyAsync", 1400.0),
            on_host("cudaStreamSynchronize", 2100.0),
            on_host("cuMemcpyDtoH_v2", 2200.0, "cuda_driver"),
            # A wait of the check itself, after the pass.
            on_host("cudaDeviceSynchronize", 3000.0),
        )
    )
    assert found.host_waits == {
        "forward": {"cudaEventSynchronize": 2},
        "backward": {"cudaStreamSynchronize": 1, "cuMemcpyDtoH_v2": 1},
    }
    with pytest.raises(ValueError, match="0 marks"):
        read_profile({"traceEvents": []})


# The table


def lines(*tests: dict[str, Any], planned: int = 0) -> str:
    """What the plugin writes."""
    plain = {"outcome": "passed", "said": "", "seconds": 0.1, "notes": []}
    written = [{"tests": planned or len(tests)}, *(plain | one for one in tests)]
    return "\n".join(map(json.dumps, written)) + "\n"


FP32 = {"test": "test_equals_stock_in_fp32[ampipe-degree2]"}
BF16 = {"test": "test_equals_stock_in_bf16[2]"}
PROFILE = {
    "case": "mixtral-8k",
    "link": "emulated:20GB/s",
    "kernel": "flash",
    "degree": 4,
    "peak_bytes": {"stock": 200 * 2**20, "degree 4, schedule ampipe": 190 * 2**20},
    "allocator": {"stock": {"reserved_bytes": 300 * 2**20, "inactive_bytes": 2**20, "retries": 0}},
    "issued_us": {"forward": {"qkv": 81.2, "expert": 40.0}},
    "communication_ms": 4.0,
    "hidden_share": 0.875,
    "compute_ms": 12.0,
    "host_waits": {"forward": {"cudaEventSynchronize": 4}, "backward": {}},
}
BENCH = {
    "cases": [
        {
            "name": "mixtral-8k",
            "link": "emulated:20GB/s",
            "stock_ms": 20.0,
            "rows": [
                {"schedule": "ampipe", "degree": 1, "ms": 19.0, "speedup": 1.05, "bound_share": None},
                {"schedule": "ampipe", "degree": 2, "ms": 15.0, "speedup": 1.33, "bound_share": 0.9},
                {"schedule": "ampipe", "degree": 4, "ms": 14.0, "speedup": 1.43, "bound_share": 0.955},
            ],
        }
    ],
}


def finished(kind: str, found: object, outcome: Outcome = Outcome.OK, said: str = "") -> Done:
    text = found if isinstance(found, str) or found is None else json.dumps(found)
    return Done(kind, f"the {kind}", outcome, 12.3, said, text)


def rows(*done: Done) -> dict[str, tuple[Outcome, str]]:
    found = findings.rows({"steps": [dataclasses.asdict(one) for one in done]})
    return {row.check: (row.outcome, row.finding) for row in found}


TRAINING = {
    "family": "FP8",
    "losses": {"stock": [[7.0, 1.0]] * 8, "partners": [[7.0, 1.0]] * 8},
    "differences": {"partners": [2e-5, 3e-4]},
    "failed": {"degree 4": "ended with 1: no kernel"},
    "allowed": [1e-4, 1e-3],
}
PARTNERS = {
    "command": ["python", "partners.py", "file", "emulated:20GB/s"],
    "case": {"name": "mixtral-4k", "microbatches": 8},
    "seconds": {"megatron": [0.8, 0.8], "control": [0.8, 0.8], "partners, searched": [0.5, 0.7]},
}


def test_every_test_of_a_gpu_has_a_name_in_the_table() -> None:
    modules = (steps.REPOSITORY / "tests/gpu").glob("test_*.py")
    tests = {name for path in modules for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)}
    assert tests == findings._TESTS.keys()


def test_findings_of_trainings_and_partners() -> None:
    found = rows(finished("training", TRAINING), finished("partners", PARTNERS))
    said = "losses of 8 iterations differ by 2e-05 at most (1e-04 allowed), losses of balance by 3e-04"
    assert found["training, FP8, partners"] == (Outcome.OK, said)
    assert found["training, FP8, degree 4"] == (Outcome.FAILED, "ended with 1: no kernel")
    said = "stock 100.0 ms a micro-batch; control 1.00x, partners, searched 1.33x"
    assert found["partners, mixtral-4k, emulated:20GB/s"] == (Outcome.OK, said)
    off = TRAINING | {"differences": {"partners": [2e-5, 2e-3]}}
    assert rows(finished("training", off))["training, FP8, partners"][0] is Outcome.DIFFERENT


def test_findings_of_a_good_run() -> None:
    other = {"test": "test_equals_stock_in_fp32[ampipe-degree4]"}
    noted = BF16 | {"notes": ["AccumulateGrad stream warning: none"]}
    found = rows(
        finished("tests", lines(FP32, other, noted)), finished("profile", PROFILE), finished("bench", BENCH)
    )
    assert {outcome for outcome, _ in found.values()} == {Outcome.OK}
    assert found["parity fp32"][1] == "2 of 2 cases"
    assert found["parity bf16"][1] == "1 of 1 cases; AccumulateGrad stream warning: none"
    assert found["host time per stage, forward"][1] == "microseconds: qkv 81, expert 40"
    held = found["memory that torch's allocator held"][1]
    assert held == "stock 300 MiB, 1 in pieces, 0 retries"
    assert found["overlap"][1].startswith(
        "88% of 4.00 ms of communication under 12.00 ms of computation, at least 38% required"
    )
    assert found["host waits, forward"][1] == "4 for split sizes (4 allowed), others: none"
    assert found["peak memory"][1] == "stock 200 MiB; of that: degree 4, schedule ampipe 0.95"
    assert found["mixtral-8k, emulated:20GB/s"][1] == (
        "stock 20.00 ms; ampipe 1.43x at degree 4 (96% of bound)"
    )


def test_failed_and_skipped_cases_and_those_that_were_cut_have_rows() -> None:
    wrong = BF16 | {"outcome": "failed", "said": "off by 1"}
    skipped = {"outcome": "skipped", "said": "Skipped: flash-attn: not installed"}
    some = {"test": "test_attention_kernel_in_bf16[flash-attn]"} | skipped
    other = {"test": "test_attention_kernel_in_bf16[sdpa]"}
    # Cut while it wrote.
    text = lines(FP32, wrong, some, other, planned=210) + '{"test": "test_equals'
    found = rows(finished("tests", text, Outcome.CUT, "did not end within 9 s"))
    assert found["parity fp32"] == (Outcome.OK, "1 of 1 cases")
    said = "0 of 1 cases; first: test_equals_stock_in_bf16[2]: off by 1"
    assert found["parity bf16"] == (Outcome.DIFFERENT, said)
    assert found["attention kernels"] == (
        Outcome.OK, "1 of 1 cases, 1 skipped (Skipped: flash-attn: not installed)",
    )  # fmt: skip
    assert found["tests that did not end"] == (Outcome.CUT, "206 of 210")
    assert rows(finished("tests", lines(FP32 | skipped)))["parity fp32"][0] is Outcome.SKIPPED


def test_the_plugin_writes_every_outcome_when_it_is_known(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import os, pytest\n"
        "def test_well(record_property): record_property('warning', 'none')\n"
        "def test_wrong(): assert 1 == 2, 'off by 1'\n"
        "def test_left_out(): pytest.skip('not here')\n"
        "def test_ends_the_process(): os._exit(1)\n"
    )
    file = tmp_path / "lines"
    words = ["-p", "gpu_check.case_lines", "--case-lines", str(file), "-p", "no:cacheprovider", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(steps.REPOSITORY / "scripts")}
    subprocess.run([sys.executable, "-m", "pytest", *words], env=environment, capture_output=True)
    first, *others = map(json.loads, file.read_text().splitlines())
    assert first == {"tests": 4}
    assert [(one["test"], one["outcome"]) for one in others] == [
        ("test_well", "passed"), ("test_wrong", "failed"), ("test_left_out", "skipped"),
    ]  # fmt: skip
    assert others[0]["notes"] == ["warning: none"]
    assert "off by 1" in others[1]["said"]


@pytest.mark.parametrize(
    ("changes", "checks"),
    [
        ({"hidden_share": 0.0}, ["overlap"]),
        ({"hidden_share": 0.0, "communication_ms": 0.0}, ["overlap"]),
        # 0.375 of the communication must be hidden; less if there is less computation.
        ({"hidden_share": 0.37}, ["overlap"]),
        ({"hidden_share": 0.09, "compute_ms": 1.0}, ["overlap"]),
        ({"hidden_share": 0.1, "compute_ms": 1.0}, []),
        ({"host_waits": {"forward": {"cudaEventSynchronize": 5}, "backward": {}}}, ["host waits, forward"]),
        ({"host_waits": {"forward": {"cudaStreamSynchronize": 1}, "backward": {}}}, ["host waits, forward"]),
        ({"host_waits": {"forward": {}, "backward": {"cudaEventSynchronize": 1}}}, ["host waits, backward"]),
    ],
)
def test_a_profile_that_misses_a_requirement_is_reported_as_different(
    changes: dict[str, Any], checks: list[str]
) -> None:
    found = rows(finished("profile", PROFILE | changes))
    assert [name for name, (outcome, _) in found.items() if outcome is Outcome.DIFFERENT] == checks


@pytest.mark.parametrize(
    ("done", "code"),
    [
        ([finished("profile", PROFILE), finished("bench", BENCH)], 0),
        ([finished("profile", PROFILE), finished("bench", None, Outcome.SKIPPED, "needs a module")], 0),
        ([finished("bench", None, Outcome.SKIPPED, "needs a module")], 3),
        ([finished("profile", PROFILE), finished("bench", None, Outcome.NO_TIME, "none")], 3),
        ([finished("profile", PROFILE), finished("bench", None, Outcome.CUT, "long")], 3),
        ([finished("profile", PROFILE | {"hidden_share": 0.0}), finished("bench", None)], 4),
    ],
)
def test_the_check_prints_a_table_writes_a_summary_and_returns_a_code(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    done: list[Done],
    code: int,
) -> None:
    left = iter(done)
    planned = [Step(one.kind, one.name, (), tmp_path, 1.0, needs=()) for one in done]
    monkeypatch.setattr(command, "plan", lambda *_: [[step] for step in planned])
    monkeypatch.setattr(command, "run", lambda *_, **__: [next(left)])
    monkeypatch.setattr(command.Device, "ask", lambda _: GPU)
    assert command.main(["--output", str(tmp_path / "out")]) == code
    shown = capsys.readouterr().out
    assert "NVIDIA Test · torch 2.11.0 · CUDA 13.0" in shown
    assert findings.rows({"steps": [dataclasses.asdict(done[0])]})[0].check in shown
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["format"] == findings.FORMAT
    assert summary["device"]["gpu"] == "NVIDIA Test"
    assert summary["steps"] == [dataclasses.asdict(one) for one in done]
