"""From samples to a cluster file, and predictions compared with measurements. Nothing is measured."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ampipe.errors import RunFailed
from megatron_ampipe.plan.cluster import Cluster, read_cluster, write_cluster
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.stage_costs import issue_us
from megatron_ampipe.schedule import Direction, build, even_chunks, kinds
from megatron_ampipe.tools import profile_command
from megatron_ampipe.tools.measuring.bench_job import BenchJob
from megatron_ampipe.tools.measuring.cluster_fit import Sample, assemble, fit
from megatron_ampipe.tools.measuring.grid import block_of_case
from tests.conftest import Command
from tests.plan_cases import grid_case

CASE = grid_case(sequence_length=1024, topk=2)
BLOCK = block_of_case(CASE, num_ranks=2, fused_gradients=True)
SIZES = (0.1, 0.2, 0.4, 0.8, 1.6)


def transfers(family: str, times: list[float]) -> list[Sample]:
    return [
        Sample(family, {"alpha_us": 1.0, "beta_us_per_mb": size}, us)
        for size, us in zip(SIZES, times, strict=True)
    ]


# Lines


def test_lines_and_what_is_refused() -> None:
    figures, r_squared = fit(transfers("permute", [30 + 200 * size for size in SIZES]))
    assert figures == pytest.approx({"alpha_us": 30.0, "beta_us_per_mb": 200.0})
    assert r_squared == pytest.approx(1.0, abs=1e-6)
    # No figure is negative.
    figures, _ = fit(transfers("permute", [max(1.0, 200 * size - 15) for size in SIZES]))
    assert figures["alpha_us"] == 0.0 < figures["beta_us_per_mb"]
    # Times that hardly depend on the size are a line.
    figures, _ = fit(transfers("permute", [100.0, 104.0, 97.0, 103.0, 101.0]))
    assert figures["alpha_us"] == pytest.approx(100, rel=0.05)
    with pytest.raises(RunFailed, match=r"permute: no line fits .*Farthest off is .*'beta_us_per_mb': "):
        fit(transfers("permute", [20.0, 40.0, 400.0, 160.0 * 2.5, 320.0]))


# A cluster from what a known one would have measured

TRUTH = {
    "gemm": {"alpha_us": 20.0, "beta_us_per_gflop": 9000.0, "weights_us_per_million": 100.0},
    "attention.forward": {"alpha_us": 90.0, "beta_us_per_gflop": 14000.0, "merge_us_per_mb": 300.0},
    "attention.backward": {"alpha_us": 150.0, "beta_us_per_gflop": 15000.0, "merge_us_per_mb": 500.0},
    "memory": {"alpha_us": 5.0, "beta_us_per_mb": 30.0},
    "permute": {"alpha_us": 9.0, "beta_us_per_mb": 50.0},
    "copy": {"alpha_us": 40.0, "beta_us_per_mb": 120.0},
    "intra.all_to_all": {"alpha_us": 800.0, "beta_us_per_mb": 43000.0},
    "intra.all_gather": {"alpha_us": 2000.0, "beta_us_per_mb": 40000.0},
    "intra.reduce_scatter": {"alpha_us": 500.0, "beta_us_per_mb": 80000.0},
}
OVERHEADS = {"qkv": (600.0, 700.0), "attention": (400.0, 250.0), "route": (500.0, 430.0),
             "expert": (1000.0, 1500.0), "merge": (50.0, 100.0)}  # fmt: skip


def samples_of_truth() -> list[Sample]:
    found = []
    for family, figures in TRUTH.items():
        names = list(figures)
        for number in range(1, 9):
            columns = {"alpha_us": 1.0, names[1]: 0.03 * number**2}
            if len(names) == 3:
                # Not along with the second: a line needs to tell the two apart.
                columns[names[2]] = 0.2 * (number % 3)
            us = sum(figures[name] * columns[name] for name in names)
            found.append(Sample(family, columns, us))
    return found


def report_of_truth() -> dict[str, Any]:
    schedule = build("ampipe", degree=2, features=BLOCK.features)
    stages = {way: list(schedule.program(way).stages) for way in Direction}
    block: dict[str, Any] = {
        "around": {"forward": 900.0, "backward": 1200.0},
        "stock": {"forward": 1.0, "backward": 1.0},
        "stages": {"2": {way.value: {str(stage): 0.0 for stage in stages[way]} for way in Direction}},
    }
    report: dict[str, Any] = {
        "samples": samples_of_truth(),
        "slowdowns": {"compute_slowdown": 1.14, "communication_slowdown": 1.05, "latency_us": 300.0},
        "block": block,
        "issue_of": {},
        "kernel": "cpu-flash",
        "fused_gradients": True,
    }
    # Of stages that take no time, a cluster without overheads.
    model = Predictor(BLOCK, assembled([report, report]))
    # The stages of a block take what the operations take, and a known time more.
    for stage, pair in model.stages(even_chunks(CASE.sequence_length, 2)).items():
        for position, way in enumerate(Direction):
            beyond = OVERHEADS.get(stage.kind.name, (0.0, 0.0))[position]
            block["stages"]["2"][way.value][str(stage)] = pair.of(way) + beyond
    block["stock"] = {way.value: model.stock().of(way) + 77.0 for way in Direction}
    return report


def assembled(reports: list[dict[str, Any]]) -> Cluster:
    return assemble(CASE, reports, ranks_per_node=2, description="x", source="y")


def test_a_known_cluster_comes_back() -> None:
    reports = [report_of_truth(), report_of_truth()]
    # A rank that is faster changes nothing.
    reports[1]["samples"] = [replace(sample, us=sample.us / 2) for sample in reports[1]["samples"]]
    reports[1]["slowdowns"] = dict.fromkeys(reports[1]["slowdowns"], 1.0)
    cluster = assembled(reports)
    compute, attention = cluster.compute, cluster.compute.attention["fp32"]
    figures: dict[str, Any] = {
        "gemm": compute.gemm["fp32"],
        **{f"attention.{way}": getattr(attention, way) for way in Direction},
        **{name: getattr(compute, name) for name in ("memory", "permute", "copy")},
        **{f"intra.{name}": figure for name, figure in (cluster.intra or {}).items()},
    }
    for family, truth in TRUTH.items():
        assert {name: getattr(figures[family], name) for name in truth} == pytest.approx(truth, rel=1e-3)
        assert figures[family].basis == "measured"
    for kind, (forward, backward) in OVERHEADS.items():
        found = cluster.host.stage[kind]  # type: ignore[index]
        assert (found.forward_us, found.backward_us) == pytest.approx((forward, backward), abs=2.0)
    assert cluster.host.block.backward_us == 1200.0
    # What Megatron's layer takes beyond its operations is in its exchange.
    stock = Predictor(BLOCK, cluster).stock()
    measured = sum(reports[0]["block"]["stock"].values())
    assert stock.forward + stock.backward == pytest.approx(measured, rel=1e-3)
    assert cluster.overlap.compute_slowdown == 1.14
    assert cluster.overlap.latency_us == 300.0


def test_the_file_has_the_times_to_issue_a_stage_of_the_slowest_host(tmp_path: Path) -> None:
    reports = [report_of_truth(), report_of_truth()]
    for report, us in zip(reports, (50.0, 60.0), strict=True):
        report["issue_of"] = {way.value: {"qkv": us, "expert": 4 * us} for way in Direction}
        # A backward pass has no counts.
        report["issue_of"]["forward"]["counts"] = us / 2
    # Only one of the ranks did not wait for its device in this one.
    reports[1]["issue_of"]["forward"]["merge"] = 9.0
    cluster = assembled(reports)
    times = cluster.host.issue_of
    assert times is not None
    assert times.keys() == {"qkv", "counts", "expert"}
    assert (times["counts"].forward_us, times["counts"].backward_us) == (30.0, 0.0)
    assert (times["qkv"].forward_us, times["qkv"].backward_us) == (60.0, 60.0)
    for way in Direction:
        assert issue_us(kinds.EXPERT, way, BLOCK, cluster.host) == pytest.approx(240.0, rel=1e-4)
    assert issue_us(kinds.COUNTS, Direction.BACKWARD, BLOCK, cluster.host) == 0.0
    write_cluster(cluster, tmp_path / "cluster.yaml", head="test")
    assert read_cluster(tmp_path / "cluster.yaml") == cluster


# The command


def test_ranks_per_node_reach_the_ranks_and_the_file(
    ampipe: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[BenchJob] = []

    def run_ranks(job: BenchJob, _work: object, **_: object) -> list[dict[str, Any]]:
        jobs.append(job)
        report = report_of_truth() | {"device_memory_gib": None}
        # The only class that a rank of one node measures; the file of two nodes needs the other one as well.
        between = [
            replace(sample, family=sample.family.replace("intra.", "inter."))
            for sample in report["samples"]
            if sample.family.startswith("intra.")
        ]
        return [report | {"samples": report["samples"] + between}] * job.num_ranks

    monkeypatch.setattr(profile_command, "run_ranks", run_ranks)
    output = tmp_path / "cluster.yaml"
    link = "inter=50mbit,intra=400mbit"
    words = ("--ranks", 4, "--ranks-per-node", 2, "--link", link, "--output", output)
    assert "wrote" in ampipe("profile", *words).out
    (job,) = jobs
    assert (job.num_ranks, job.ranks_per_node) == (4, 2)
    assert job.link.within_node_bit_per_s == 400e6
    assert read_cluster(output).ranks_per_node == 2
    assert "needs to know the ranks of a node" in ampipe("profile", *words[4:], code=2).err


def test_bad_arguments_end_with_2_before_anything_starts(
    ampipe: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("profile", "--output", tmp_path / "x.yaml")
    assert "case top9: is not in this grid" in ampipe(*words, "--case", "top9", code=2).err
    # As under torchrun.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
    assert "torchrun has started these ranks" in ampipe(*words, "--link", "200mbit", code=2).err
    assert not list(tmp_path.iterdir())
