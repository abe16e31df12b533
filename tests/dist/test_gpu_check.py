"""``scripts/gpu_check.sh`` as far as it runs without a GPU, and its profiling step on a CPU."""

import dataclasses
import gzip
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from gpu_check import findings, ranks
from gpu_check.steps import Done, Outcome
from tests.dist.one_device import CASES, QUICK
from tests.dist.test_bench import GRID
from tests.forked import REPOSITORY, completed, run_workers
from tests.gpu.test_cuda import LAYERS


def without_gpu() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return kept | {"CUDA_VISIBLE_DEVICES": "", "PATH": path, "OMP_NUM_THREADS": "1"}


def with_scripts() -> dict[str, str]:
    """With the folder of the check on Python's path."""
    return without_gpu() | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "scripts")])}


def test_the_gpu_tests_pass_on_stand_ins_for_cuda() -> None:
    (found,) = run_workers("tests.cuda_standin", [], world_size=1)
    outcomes = {name.partition("::")[2]: how for name, how in found.items()}
    assert {name: how for name, how in outcomes.items() if how.startswith("failed")} == {}
    passed = {name for name, how in outcomes.items() if how == "passed"}
    layers = {name for name in outcomes if name.startswith("test_every_layer_case_in_fp32")}
    assert layers <= passed
    assert len(layers) == len(LAYERS)
    functions = {name.partition("[")[0] for name in outcomes} - {name.partition("[")[0] for name in passed}
    # Of these nothing runs here.
    assert functions == {
        "test_a_missing_wait_is_seen",
        "test_a_transfer_lasts_as_long_as_the_link_takes",
        "test_all_chunks_use_the_same_backend",
        "test_compiled_by_megatron_in_fp32",
        "test_every_block_moves_its_share",
        "test_partners_equal_stock_in_fp32",
        "test_partners_equal_the_sequence_of_stages",
        "test_steps_with_partners_equal_stock",
        "test_the_host_has_less_to_do",
        "test_transformer_engine_delays_weight_gradients",
        "test_transformer_engine_under_overlapped_reduction",
        "test_transformer_engine_in_fp8",
        "test_transformer_engine_over_fixed_rows",
        "test_transformer_engine_under_graphs",
    }


def refused_by_a_gpu() -> Iterator[tuple[str, Callable[[], object]]]:
    """What is said, and a call."""
    on_device = torch.ones(2, device="cuda")
    yield "aten::add: operands on cuda and on the CPU", lambda: on_device + torch.ones(2)
    waits = "called a synchronizing CUDA operation: "
    yield "a tensor of the device has no numpy array", on_device.numpy
    torch.cuda.set_sync_debug_mode("error")
    yield waits + "tolist", on_device.tolist
    yield waits + "aten::_local_scalar_dense", lambda: on_device.sum().item()
    yield waits + "aten::index", lambda: on_device[on_device > 0]
    yield waits + "copy from or to the host", on_device.cpu
    yield waits + "torch.tensor", lambda: torch.tensor([1.0], device="cuda")
    yield waits + "aten::copy_", lambda: on_device.copy_(torch.ones(2))


@pytest.mark.ranks(1)
def test_the_stand_ins_refuse_what_a_gpu_refuses() -> None:
    from tests.cuda_standin import stand_ins

    with stand_ins():
        for said, call in refused_by_a_gpu():
            with pytest.raises((RuntimeError, AssertionError), match=said):
                call()


def test_without_a_gpu_it_ends_with_1_and_one_line(tmp_path: Path) -> None:
    words = [REPOSITORY / "scripts/gpu_check.sh", "--output", tmp_path / "out"]
    done = completed(*words, cwd=tmp_path, env=without_gpu(), code=1)
    assert done.stderr.startswith("gpu_check: torch ")
    assert "finds no CUDA device" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_training_step_compares_losses(tmp_path: Path) -> None:
    tiny = "--num-layers 1 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --train-iters 2"
    words = [
        *(sys.executable, "-m", "gpu_check.trained", "local", "--json", tmp_path / "training.json"),
        *("--kinds", "degree 4", "--arguments", f"{tiny} --max-position-embeddings 64"),
    ]
    completed(*words, env=with_scripts())
    found = json.loads((tmp_path / "training.json").read_text())
    assert len(found["losses"]["stock"]) == 2
    assert (found["differences"].keys(), found["failed"]) == ({"degree 4"}, {})
    # Two losses and the gradient norm of every iteration.
    assert [len(of_iteration) for of_iteration in found["losses"]["stock"]] == [3, 3]
    assert len(found["allowed"]) == 4
    assert {len(of_kind) for of_kind in found["differences"].values()} == {4}
    assert max(map(max, found["differences"].values())) < 1e-6


def test_the_step_that_times_attention_runs_to_its_end(tmp_path: Path) -> None:
    """With the kernels of a CPU, on a 64th of the rows."""
    words = [*("--device", "cpu", "--shorter", "64", "--json"), tmp_path / "found.json"]
    completed(sys.executable, "-m", "gpu_check.attention_times", *words, env=with_scripts())
    found = json.loads((tmp_path / "found.json").read_text())
    assert {case["name"]: [*case["kernels"]] for case in found["cases"]} == {
        "8,192 rows": ["cpu-flash", "exact-pieces", "sdpa"],
        "the last of four chunks": ["cpu-flash", "exact-pieces", "sdpa"],
        "a window of 1,024": ["sdpa"],
        "eight documents": ["cpu-flash", "exact-pieces", "sdpa"],
        "latent attention": ["exact-pieces", "sdpa"],
    }
    measured = [of_kernel for case in found["cases"] for of_kernel in case["kernels"].values()]
    assert max(of_kernel["difference"] for of_kernel in measured) < 1e-5
    assert all(0 < of_kernel["host_us"] <= 1e3 * of_kernel["ms"] for of_kernel in measured)
    for of_kernel in [*measured, *(case["control"] for case in found["cases"])]:
        low, high = of_kernel["range_ms"]
        assert low <= of_kernel["ms"] <= high
    assert found["versions"]["commit"]


# gloo copies on its own, in some runs within torch's check for waits: that case is for a GPU.
ON_STAND_INS = {
    num_ranks: [one for one in CASES[num_ranks] if not one.name.startswith("waits")] for num_ranks in CASES
}


@pytest.mark.parametrize("num_ranks", ON_STAND_INS)
def test_ranks_that_share_a_device_equal_stock(num_ranks: int, tmp_path: Path) -> None:
    """Over gloo, on the stand-ins for CUDA; where there is no Transformer Engine, its cases are skipped."""
    file, planned = tmp_path / "lines", ON_STAND_INS[num_ranks]
    names = [one.name for one in planned]
    words = [*("--ranks", str(num_ranks), "--json"), file, *("--on", "stand-ins", "--only", ",".join(names))]
    completed(sys.executable, "-m", "gpu_check.ranks", *words, env=with_scripts(), code=None, timeout_s=600)
    lines = ranks.read(file)
    found = ranks.outcomes(lines)
    assert len(set(names)) == len(names) > 10
    for one in planned:
        expected = "equal" if one.needs is None else "skipped"
        assert found[one.name].keys() == set(range(num_ranks)), one.name
        assert {how for how, _ in found[one.name].values()} == {expected}, (one.name, found[one.name])
    # None had to be started again.
    assert sum("begins" in line for line in lines) == num_ranks * len(names)
    assert ranks.exit_code(lines) == 0
    of_table = findings.rows({"steps": [as_step("ranks", file)]})
    assert {row.outcome for row in of_table} <= {Outcome.OK, Outcome.SKIPPED}


def test_an_environment_of_the_order_of_kernels_is_tried(tmp_path: Path) -> None:
    """One of six, with one case: what no GPU is needed for."""
    file = tmp_path / "lines"
    words = [*("--ranks", "2", "--json"), file, *("--on", "stand-ins", "--queues", "1", "--only", QUICK[0])]
    completed(sys.executable, "-m", "gpu_check.ranks", *words, env=with_scripts())
    (line,) = ranks.read(file)
    assert line == {"environment": ranks.QUEUES[0], "found": {QUICK[0]: ["equal"]}, "said": []}
    (row,) = findings.rows({"steps": [as_step("queues", file)]})
    assert (row.outcome, row.finding) == (Outcome.OK, "1 cases end")


REQUIRED = {
    "experts on two ranks (EP2)", "exchange ranks", "exchange nodes", "exchange 2dh", "tensor parallel (TP2)",
    "tensor parallel (TP2 x EP2)", "context parallel (CP2)", "interleaved pipeline stages",
    "bf16, prescribed experts", "placed reductions", "partners", "CUDA graphs, 1F1B",
    "CUDA graphs of whole passes, 1F1B, one budget exceeded", "an exception halfway",
    "CUDA graphs of whole passes with partners, one budget exceeded",
    "evaluation between", "Transformer Engine", "Transformer Engine, separate weight gradients",
    "the host waits for nothing (TP2)",
}  # fmt: skip


def test_ranks_that_share_a_device_show_what_is_claimed() -> None:
    cases = [one for of_ranks in CASES.values() for one in of_ranks]
    assert {one.shows for one in cases} >= REQUIRED
    of_parity = [one.case for one in cases if one.way == "passes"]
    assert any(case.backward_degree for case in of_parity), "two degrees"
    # Transformer Engine's issue 3437: delayed products of several calls, without fusion.
    apart = [one.case for one in cases if one.shows == "Transformer Engine, separate weight gradients"]
    assert {(case.schedule, case.degree, case.model["gradient_accumulation_fusion"]) for case in apart} >= {
        ("lancet", 2, False), ("joined", 2, False),
    }  # fmt: skip


def as_step(kind: str, file: Path) -> dict[str, object]:
    done = Done(kind, kind, Outcome.OK, 1.0, "", file.read_text())
    return dataclasses.asdict(done)


def test_ranks_that_share_a_device_train(tmp_path: Path) -> None:
    """Megatron's own loop with interleaved pipeline stages, each on two expert-parallel ranks."""
    tiny = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --train-iters 2"
    words = [
        *(
            sys.executable,
            "-m",
            "gpu_check.trained",
            "four ranks, pipeline",
            "--json",
            tmp_path / "training.json",
        ),
        *("--on", "cpu", "--kinds", "partners"),
        *("--arguments", f"{tiny} --max-position-embeddings 64"),
    ]
    completed(*words, env=with_scripts())
    found = json.loads((tmp_path / "training.json").read_text())
    assert (found["differences"].keys(), found["failed"]) == ({"partners"}, {})
    assert len(found["losses"]["stock"]) == 2
    assert max(found["differences"]["partners"]) < 1e-5


def test_a_training_of_the_check_exceeds_a_budget_once(tmp_path: Path) -> None:
    """Without graphs, which are for a GPU: its step is repeated, and all losses are stock Megatron's."""
    tiny = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --train-iters 5"
    words = [
        *(sys.executable, "-m", "gpu_check.trained", "two ranks, fixed rows"),
        *("--json", tmp_path / "training.json", "--on", "cpu", "--kinds", "exceeded"),
        *("--arguments", f"{tiny} --max-position-embeddings 64 --cuda-graph-impl none"),
    ]
    completed(*words, env=with_scripts())
    found = json.loads((tmp_path / "training.json").read_text())
    (name,) = found["differences"]
    assert (found["failed"], found["repeats"]) == ({}, {name: [3, 1]})
    (row,) = findings.rows({"steps": [as_step("training", tmp_path / "training.json")]})
    assert row.outcome is Outcome.OK and row.finding.endswith("; 1 of 3 steps with budgets repeated")


def test_the_profiling_step_runs_to_its_end(tmp_path: Path) -> None:
    """A CPU has no GPU kernels; checks that it builds, runs, exports and reads a profile."""
    (tmp_path / "grid.yaml").write_text(GRID)
    words = [
        *(sys.executable, "-m", "gpu_check.profiled", "--device", "cpu"),
        *("--grid", tmp_path / "grid.yaml", "--case", "top1", "--link", "emulated:1gbit"),
        *("--trace", tmp_path / "trace.json.gz", "--json", tmp_path / "profile.json"),
    ]
    completed(*words, env=with_scripts())
    found = json.loads((tmp_path / "profile.json").read_text())
    assert found["case"] == "top1"
    of_degrees = [f"degree {degree}, schedule ampipe" for degree in (2, 4, 8)]
    assert list(found["peak_bytes"]) == ["stock", *of_degrees]
    assert (found["communication_ms"], found["host_waits"]) == (0.0, {"forward": {}, "backward": {}})
    recorded = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    assert {"ampipe:forward", "ampipe:backward"} <= {event.get("name") for event in recorded["traceEvents"]}
