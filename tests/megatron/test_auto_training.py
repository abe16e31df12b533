"""Degrees that are measured, planned, or read from a plan, in Megatron's loop: the losses equal stock's."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ampipe.cli import main
from megatron_ampipe.plan.cluster import write_cluster
from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.tools.measuring.cluster_fit import assemble
from tests.megatron.launcher import MOCK_DATA, TINY_GPT, TINY_MOE, Run, pretrain, train
from tests.unit.test_profile import CASE, report_of_truth

EXACT = shlex.split("--attention-dropout 0 --hidden-dropout 0 --ffn-hidden-size 96 --adam-eps 1e-5")
EP2 = ["--expert-model-parallel-size", "2"]
SETTLED = re.compile(r"AMPipe: input of (\d+) rows x (\d+): (degree .*)")
MODEL = """\
num-layers: 2
hidden-size: 64
num-attention-heads: 4
ffn-hidden-size: 96
seq-length: 64
micro-batch-size: 1
num-experts: 4
moe-router-topk: 2
moe-token-dispatcher-type: alltoall
moe-router-load-balancing-type: aux_loss
moe-aux-loss-coeff: 0.01
expert-model-parallel-size: 2
"""


def assert_same_losses(run: Run, stock: Run) -> None:
    assert run.losses == {name: pytest.approx(values, rel=2e-4) for name, values in stock.losses.items()}


@pytest.mark.slow
def test_trying_degrees_does_not_change_losses_and_a_restart_runs_the_choice(tmp_path: Path) -> None:
    """Pipeline stages reach their training step at different times; all of them must participate."""
    words = [*EP2, "--pipeline-model-parallel-size", "2", *EXACT, "--train-iters", "26", "--lr", "5e-4"]
    stock = train(*words, num_ranks=4, timeout_s=800)
    file = tmp_path / "plan.yaml"
    choosing = [*words, "--ampipe-degree", "auto", "--ampipe-save-plan", str(file)]
    auto = train(*choosing, num_ranks=4, timeout_s=800)
    assert_same_losses(auto, stock)
    assert "auto: the first iterations try 1, 2, 4, 8" in auto.output
    found = SETTLED.findall(auto.output)
    assert [shape[:2] for shape in found] == [("64", "1")], auto.output[-3000:]
    assert "an iteration spent" in found[0][2]
    chosen = Plan.read(file)
    again = train(*choosing, "--train-iters", "1", num_ranks=4)
    assert again.says(f"read from {file}: an iteration spent")
    assert re.search(rf"degree +│ {chosen.pipeline.degree}\D", again.output)
    assert "trying degrees" not in again.output


@pytest.fixture(scope="module")
def stock() -> Run:
    return train(*EP2, *EXACT)


@pytest.fixture(scope="module")
def cluster_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cluster where AMPipe helps even this tiny model: only transfers and matrix products take time."""
    report = report_of_truth()
    report["samples"] = [
        replace(sample, us=sample.us * (1 - 0.9 * sample.columns["alpha_us"])) for sample in report["samples"]
    ]
    report["block"]["around"] = {"forward": 0.0, "backward": 0.0}
    report["block"]["stages"] = {
        degree: {way: dict.fromkeys(stages, 0.0) for way, stages in ways.items()}
        for degree, ways in report["block"]["stages"].items()
    }
    path = tmp_path_factory.mktemp("cluster") / "cluster.yaml"
    cluster = assemble(CASE, [report] * 2, ranks_per_node=2, description="of a test", source="a test")
    write_cluster(cluster, path, head="test")
    return path


def assert_log_holds_prediction(run: Run) -> None:
    """Every logged iteration has measured and predicted times of both directions."""
    lines = [line for line in run.output.splitlines() if line.startswith(" ampipe at iteration")]
    assert lines, run.output[-3000:]
    for line in lines:
        for way in ("forward", "backward"):
            found = re.search(rf"block {way} \(ms\): [\d.]+ \| block {way} predicted \(ms\): ([\d.]+)", line)
            assert found and float(found[1]) > 0, line


def test_a_plan_is_made_at_start_up_from_a_cluster_file(stock: Run, cluster_file: Path) -> None:
    run = train(*EP2, *EXACT, "--ampipe-degree", "auto", "--ampipe-cluster", str(cluster_file))
    assert_same_losses(run, stock)
    assert "planned from" in run.output
    assert_log_holds_prediction(run)
    assert "AMPipe: input of" not in run.output, "nothing is tried"


def test_partners_are_planned_at_start_up_and_read_from_the_plan(
    stock: Run, cluster_file: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.yaml"
    words = ["--ampipe-degree", "auto", "--ampipe-cluster", str(cluster_file), "--ampipe-partner"]
    for why in ("planned from", "read from"):
        run = train(*EP2, *EXACT, *words, "--ampipe-save-plan", str(plan))
        assert_same_losses(run, stock)
        assert why in run.output and "searched" in run.output
        assert run.says("run together; others as the degree says")
    assert Plan.read(plan).pipeline.partner is not None


def test_a_plan_file_is_run(stock: Run, cluster_file: Path, tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(MODEL)
    plan = tmp_path / "plan.yaml"
    words = ["--model", str(tmp_path / "model.yaml"), "--cluster", str(cluster_file), "--output", str(plan)]
    assert main(["plan", *words, "--no-partner"]) == 0
    assert Plan.read(plan).helps
    run = train(*EP2, *EXACT, "--ampipe-plan", str(plan))
    assert_same_losses(run, stock)
    assert "read from" in run.output
    assert_log_holds_prediction(run)
    assert run.says("the plan was made on: of a test")
    assert run.says("the plan was made for gradient accumulation fusion on (this run: off)")
    # With shared experts it is a different block.
    shared = ["--moe-shared-expert-intermediate-size", "32"]
    other = pretrain(*TINY_GPT, *TINY_MOE, *MOCK_DATA, *EP2, *EXACT, *shared, "--ampipe-plan", str(plan))
    assert other.exit_code != 0
    assert "is not for the blocks of this model: it was made for " in other.output
    assert "--moe-shared-expert-intermediate-size not given (this run: 32)" in other.output
    assert "--hidden-size" not in other.output.partition("error: ")[2]
