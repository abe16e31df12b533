"""What ``scripts/gpu_check.sh`` makes of the results of its steps: profiles, rows of the table."""

import dataclasses
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from gpu_check import __main__ as command
from gpu_check import code, findings, summary, trained
from gpu_check import plan as planning
from gpu_check.families import FAMILIES
from gpu_check.plan import Step
from gpu_check.steps import Device, Done, Outcome
from gpu_check.torch_trace import read_profile
from tests.forked import completed

GPU = Device(gpu="NVIDIA Test", torch="2.11.0", cuda="13.0", python="3.12.3")


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

STORED = {
    step["name"]: Done(**step)
    for name in ("gpu-check-h200", "gpu-check-te-h200")
    for step in json.loads((planning.REPOSITORY / f"docs/measured/results/{name}.json").read_text())["steps"]
}
"""By name, the steps of two checks of an H200."""


def changed(name: str, **changes: object) -> Done:
    """A step that has found something else."""
    found = json.loads(STORED[name].found or "") | changes
    return dataclasses.replace(STORED[name], found=json.dumps(found))


def with_difference(name: str, difference: float) -> Done:
    """A bench in which the last row of the last case differs from stock."""
    found = json.loads(STORED[name].found or "")
    found["cases"][-1]["rows"][-1]["difference_from_stock"] = difference
    return dataclasses.replace(STORED[name], found=json.dumps(found))


def without_result(outcome: Outcome) -> Done:
    return Done("bench", "the bench", outcome, 12.3, "why", None)


def rows(*done: Done) -> dict[str, tuple[Outcome, str]]:
    found = findings.rows({"steps": [dataclasses.asdict(one) for one in done]})
    return {row.check: (row.outcome, row.finding) for row in found}


def test_every_test_of_a_gpu_has_a_name_in_the_table() -> None:
    modules = (planning.REPOSITORY / "tests/gpu").glob("test_*.py")
    tests = {name for path in modules for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)}
    assert tests == findings._TESTS.keys()


def test_findings_of_runs_on_a_gpu() -> None:
    found = rows(*STORED.values())
    outcome, said = found.pop("CUDA graphs, layers of Transformer Engine")
    assert outcome is Outcome.DIFFERENT
    assert said.startswith("0 of 1 cases; first: test_transformer_engine_under_graphs: RuntimeError: CUDAGen")
    for check, expected in {
        "parity fp32": "10 of 10 cases",
        "CUDA graphs, host time": "1 of 1 cases; host ms of a pass, with graphs: 44.47, 17.78",
        "overlap": "70% of 24.00 ms of communication under 46.68 ms of computation, at least 38% required "
        "(mixtral-8k, emulated:20GB/s, degree 4, cudnn attention)",
        "host waits, forward": "4 for split sizes (4 allowed), others: none",
        "host waits, backward": "0 for split sizes (0 allowed), others: none",
        "peak memory": "stock 6482 MiB; of that: degree 2, schedule ampipe 0.82, degree 4, schedule ampipe "
        "0.71, degree 8, schedule ampipe 0.66",
        "host time per stage, forward": "microseconds: qkv 504, attention 764, route 700, counts 207, "
        "dispatch 280, expert 477, combine 171, merge 153",
        "mixtral-8k, emulated:20GB/s": "stock 64.04 ms; moe-only 1.19x at degree 4 (88% of bound); ampipe "
        "1.18x at degree 2 (91% of bound)",
        "training, FP8, partners": "8 iterations differ at most by: losses 2e-04 (1e-03 allowed), losses of "
        "balance 4e-03 (1e-02 allowed)",
    }.items():
        assert found[check] == (Outcome.OK, expected)
    # That version of docs/measured/partners.py did not prescribe experts in bf16: its numbers show nothing.
    outcome, said = found["partners, mixtral-4k, emulated:20GB/s"]
    assert outcome is Outcome.DIFFERENT
    assert said == (
        "stock 128.0 ms a micro-batch; control 1.00x, stack, degree 2 1.23x, stack, degree 4 0.92x, "
        "partners, megatron-1f1b 1.39x, partners, cut in two 1.29x, partners, searched 1.39x; "
        "stack, degree 2 differs from stock by 7e-01, 0e+00 allowed"
    )
    held = found["memory that torch's allocator held"][1]
    assert held.startswith("stock 8164 MiB, 1439 in pieces, 0 retries; degree 2, ")


def test_every_outcome_is_written_when_it_is_known_and_has_a_row(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import os, pytest\n"
        "@pytest.mark.skip('no flash-attn')\n"
        "def test_the_chosen_kernel_runs(): pass\n"
        "@pytest.mark.parametrize('kernel', ['flash-attn', 'sdpa'])\n"
        "def test_attention_kernel_in_bf16(kernel): kernel == 'sdpa' or pytest.skip('no flash-attn')\n"
        "def test_equals_stock_in_fp32(record_property): record_property('warning', 'none')\n"
        "def test_equals_stock_in_bf16(): assert 1 == 2, 'off by 1'\n"
        "def test_ends_the_process(): os._exit(1)\n"
    )
    file = tmp_path / "lines"
    words = ["-p", "gpu_check.case_lines", "--case-lines", file, "-p", "no:cacheprovider", tmp_path]
    environment = os.environ | {"PYTHONPATH": str(planning.REPOSITORY / "scripts")}
    completed(sys.executable, "-m", "pytest", *words, env=environment, code=1)
    # Cut while it wrote.
    text = file.read_text() + '{"test": "test_equals'
    found = rows(Done("tests", "attention", Outcome.CUT, 9.0, "did not end within 9 s", text))
    outcome, said = found.pop("parity bf16")
    assert outcome is Outcome.DIFFERENT
    assert said.startswith("0 of 1 cases; first: test_equals_stock_in_bf16: ") and "off by 1" in said
    skipped = "1 skipped (Skipped: no flash-attn)"
    assert found == {
        "parity fp32": (Outcome.OK, "1 of 1 cases; warning: none"),
        "attention kernels": (Outcome.OK, f"1 of 1 cases, {skipped}"),
        "the chosen kernel": (Outcome.SKIPPED, f"0 of 0 cases, {skipped}"),
        "tests that did not end": (Outcome.CUT, "1 of 6"),
    }
    failed = rows(changed("training, FP8", failed={"degree 4": "ended with 1: no kernel"}))
    assert failed["training, FP8, degree 4"] == (Outcome.FAILED, "ended with 1: no kernel")


@pytest.mark.parametrize(
    ("step", "changes", "checks"),
    [
        ("profile", {"hidden_share": 0.0}, ["overlap"]),
        ("profile", {"hidden_share": 0.0, "communication_ms": 0.0}, ["overlap"]),
        # 0.375 of the communication must be hidden; less if there is less computation.
        ("profile", {"hidden_share": 0.37}, ["overlap"]),
        ("profile", {"hidden_share": 0.09, "compute_ms": 6.0}, ["overlap"]),
        ("profile", {"hidden_share": 0.1, "compute_ms": 6.0}, []),
        *(
            ("profile", {"host_waits": {"forward": forward, "backward": backward}}, [f"host waits, {wrong}"])
            for forward, backward, wrong in (
                ({"cudaEventSynchronize": 5}, {}, "forward"),
                ({"cudaStreamSynchronize": 1}, {}, "forward"),
                ({}, {"cudaEventSynchronize": 1}, "backward"),
            )
        ),
        *(
            (
                "training, FP8",
                {"differences": {"partners": differences}, "allowed": FAMILIES["FP8"].allowed},
                wrong,
            )
            for differences, wrong in (
                ([2e-5, 2e-2, 0.0, 0.0], ["training, FP8, partners"]),
                ([0.0, 0.0, 2e-5, 0.0], ["training, FP8, partners"]),
                ([0.0, 0.0, 0.0, 0.02], ["training, FP8, partners"]),
                ([math.nan, 0.0, 0.0, 0.0], ["training, FP8, partners"]),
                ([9e-4, 9e-3, 9e-6, 9e-3], []),
            )
        ),
        *(
            (
                "partners, emulated:20GB/s",
                {"differences": {"control": 0.0, "partners, cut in two": difference}, "tolerance": 1e-4},
                wrong,
            )
            for difference, wrong in (
                (9e-5, []),
                (99.0, ["partners, mixtral-4k, emulated:20GB/s"]),
                (math.nan, ["partners, mixtral-4k, emulated:20GB/s"]),
            )
        ),
    ],
)
def test_what_misses_a_requirement_is_reported_as_different(
    step: str, changes: dict[str, Any], checks: list[str]
) -> None:
    found = rows(changed(step, **changes))
    assert [name for name, (outcome, _) in found.items() if outcome is Outcome.DIFFERENT] == checks


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([[7.0, 1.0, 2.0], [6.0, 1.0, 2.0]], [0.0, 0.0, 0.0, 0.0]),
        # The last printed digit of a norm is no difference.
        ([[7.0, 1.0, 2.001], [6.0, 1.0, 2.0]], [0.0, 0.0, 0.0, 0.0]),
        ([[7.0, 1.0, 2.0], [6.0, 1.0, 4.0]], [0.0, 0.0, 0.0, 1.0]),
        ([[7.7, 1.0, 2.0], [6.0, 1.5, 2.0]], [0.1, 0.5, 0.1, 0.0]),
        ([[7.0, 1.0, 2.0], [6.6, 1.0, math.nan]], [0.1, 0.0, 0.0, math.inf]),
    ],
)
def test_trainings_are_compared_by_losses_and_gradient_norms(
    found: list[list[float]], expected: list[float]
) -> None:
    stock = [[7.0, 1.0, 2.0], [6.0, 1.0, 2.0]]
    assert trained._differences(stock, found) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("difference", "outcome"), [(2e-2, Outcome.OK), (99.0, Outcome.DIFFERENT)])
def test_a_bench_whose_numbers_differ_is_reported_as_different(difference: float, outcome: Outcome) -> None:
    (found,) = rows(with_difference("bench mixtral, emulated:20GB/s", difference)).values()
    assert found[0] is outcome
    assert ("ampipe at degree 4 differs from stock by 1e+02" in found[1]) is (outcome is Outcome.DIFFERENT)


@pytest.mark.parametrize(
    ("difference", "outcome"),
    [(0.01, Outcome.OK), (0.04, Outcome.DIFFERENT), (float("nan"), Outcome.DIFFERENT)],
)
def test_kernels_of_attention_are_timed_and_compared(difference: float, outcome: Outcome) -> None:
    case = {
        "name": "8,192 rows",
        "kernels": {
            "cudnn": {"ms": 2.5, "host_us": 91.0, "difference": 0.0},
            "torch-flash-2": {"ms": 3.25, "host_us": 60.0, "difference": difference},
        },
        "control": {"ms": 2.6, "range_ms": [2.5, 2.75], "host_us": 90.0},
        "unusable": {"flash-attn-3": "not installed"},
    }
    text = json.dumps(
        {"allowed": 0.03, "cases": [case, case | {"name": "sinks", "kernels": {}, "control": None}]}
    )
    found = rows(Done("attention", "attention times", Outcome.OK, 9.0, "", text))
    times = (
        "cudnn 2.50 ms (host 91 us); torch-flash-2 3.25 ms (host 60 us); "
        "the first again 2.60 ms, 2.50 to 2.75 (host 90 us); flash-attn-3: not installed"
    )
    said = "" if outcome is Outcome.OK else f"torch-flash-2 differs by {difference:.0e}; "
    assert found == {
        "attention, 8,192 rows": (outcome, said + times),
        "attention, sinks": (Outcome.SKIPPED, "flash-attn-3: not installed"),
    }


PROFILE = STORED["profile"]


@pytest.mark.parametrize(
    ("done", "exit_code"),
    [
        ([PROFILE, STORED["bench mixtral, emulated:20GB/s"]], 0),
        ([PROFILE, without_result(Outcome.SKIPPED)], 0),
        ([without_result(Outcome.SKIPPED)], 3),
        ([PROFILE, without_result(Outcome.NO_TIME)], 3),
        ([PROFILE, without_result(Outcome.CUT)], 3),
        ([PROFILE, without_result(Outcome.INTERRUPTED)], 3),
        ([changed("profile", hidden_share=0.0), without_result(Outcome.OK)], 4),
    ],
)
def test_the_check_prints_a_table_writes_a_summary_and_returns_a_code(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    done: list[Done],
    exit_code: int,
) -> None:
    left = iter(done)
    planned = [Step(one.kind, one.name, (), tmp_path, 1.0, needs=()) for one in done]
    monkeypatch.setattr(command, "plan", lambda *_: [[step] for step in planned])
    monkeypatch.setattr(command, "run", lambda _, around, keep: keep(next(left)))
    monkeypatch.setattr(command.Device, "ask", lambda _: GPU)
    assert command.main(["--output", str(tmp_path / "out")]) == exit_code
    shown = capsys.readouterr().out
    assert "NVIDIA Test · torch 2.11.0 · CUDA 13.0" in shown
    assert findings.rows({"steps": [dataclasses.asdict(done[0])]})[0].check in shown
    written = json.loads((tmp_path / "out/summary.json").read_text())
    assert written["format"] == summary.FORMAT
    assert written["device"]["gpu"] == "NVIDIA Test"
    assert written["steps"] == [dataclasses.asdict(one) for one in done]
    assert written["versions"]["commit"] == code.here().commit
