"""``ampipe plan``, and the plan file."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ampipe.cli import main
from megatron_ampipe.errors import BadInput
from megatron_ampipe.files.inputs import config_names
from megatron_ampipe.files.timeline import Timeline
from megatron_ampipe.plan.cluster import TransferCost, find_cluster, write_cluster
from megatron_ampipe.plan.model_file import block_of, read_model
from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.plan.planner import make_plan
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.schedule import LISTED, Partner, check
from tests.plan_cases import cluster, sized_block
from tests.planner import PAGE, page
from tests.unit.test_plan_block import PLAIN


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.yaml"
    path.write_text(PLAIN)
    return path


def plan_as_json(model: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    command = ["plan", "--model", str(model), "--cluster", "a800x8-20gbps", "--json", "-", *words]
    assert main(command) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_table_shows_the_choice_and_its_reason(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(model), "--cluster", "a800x8-20gbps"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"1 +│ stock .* 1\.00", shown)
    assert re.search(r"choice: degree \d.*, schedule \S+", shown)
    assert "times as fast" in shown.splitlines()[1] and "no GPU has run this" in shown.splitlines()[1]
    assert re.search(r"flags: --ampipe-degree \d", shown.splitlines()[2])
    assert re.search(r"communication hidden: .*\d+% under partner", shown)
    assert re.search(r"partners, megatron-1f1b +│.*\n│ partners +│", shown) and "GiB" not in shown


def test_dispatchers_and_grouped_products_are_compared_without_being_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model.yaml"
    model.write_text(PLAIN.replace("num-experts: 8", "num-experts: 256").replace("topk: 1", "topk: 4"))
    words = ["--cluster", "dgx-h100", "--ranks", "16", "--degrees", "2", "--stack", "1", "--no-partner"]
    words += ["--set", "expert-model-parallel-size=16"]
    rows = plan_as_json(model, capsys, *words)["dispatchers"]
    flex = ["--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend"]
    exchanges = ["rows", "ranks", "nodes", "2dh"]
    assert [(row["dispatcher"], row["exchange"], row["flags"]) for row in rows] == [
        *(("alltoall", exchange, []) for exchange in exchanges),
        *(("alltoall", exchange, ["--moe-grouped-gemm"]) for exchange in exchanges),
        *((backend, None, [*flex, backend]) for backend in ("deepep", "hybridep")),
    ]
    assert all(row["speedup"] == pytest.approx(row["stock_ms"] / row["predicted_ms"]) for row in rows)
    assert {row["figures"] for row in rows} == {"estimated"}
    # What a row says is what a plan with its flags says.
    chosen = plan_as_json(model, capsys, *words, "--set", "moe-grouped-gemm=true")["dispatchers"]
    grouped = {
        row["exchange"]: row["predicted_ms"] for row in rows if row["flags"][:1] == ["--moe-grouped-gemm"]
    }
    assert grouped == {row["exchange"]: row["predicted_ms"] for row in chosen if not row["flags"]}
    hybrid = ("--set", "moe-token-dispatcher-type=flex", "--set", "moe-flex-dispatcher-backend=hybridep")
    (alone, *_) = plan_as_json(model, capsys, *words, *hybrid)["dispatchers"]
    assert alone["predicted_ms"] == rows[-1]["predicted_ms"]
    assert main(["plan", "--model", str(model), *words]) == 0
    shown = capsys.readouterr().out
    faster = [line for line in shown.splitlines() if line.startswith("with --moe")]
    assert any(line.startswith("with --moe-grouped-gemm: layers take ") for line in faster)
    assert all("(figures estimated)" in line for line in faster)
    assert re.search(r"deepep +│ its own ", shown)


@pytest.mark.parametrize(
    ("words", "others"),
    [
        # Between nodes with EFA there is no DeepEP; within one there is.
        (["--cluster", "aws-p5-efa", "--ranks", "16", "--set", "expert-model-parallel-size=16"], set()),
        (["--cluster", "aws-p5-efa"], {"deepep", "hybridep"}),
        (
            ["--cluster", "dgx-h100", "--set", "moe-token-dispatcher-type=allgather"],
            {"allgather", "deepep", "hybridep"},
        ),
        (["--cluster", "dgx-h100", "--exchange", "rows"], set()),
    ],
)
def test_only_dispatchers_that_a_cluster_has_are_compared(
    words: list[str], others: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model.yaml"
    model.write_text(PLAIN.replace("num-experts: 8", "num-experts: 16") + "moe-grouped-gemm: true\n")
    rows = plan_as_json(model, capsys, "--degrees", "2", "--stack", "1", *words)["dispatchers"]
    assert {row["dispatcher"] for row in rows} - {"alltoall"} == others


def test_the_answer_says_what_the_fullest_rank_holds(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--set", "vocab-size=50257", "--exchange", "rows", "--no-partner", "--degrees", "2")
    memory = plan_as_json(model, capsys, *words)["rank_memory"]
    parts = ("weights", "gradients", "optimizer", "activations", "buffers")
    assert memory["total_gib"] == pytest.approx(sum(memory[f"{part}_gib"] for part in parts))
    command = ["plan", "--model", str(model), "--cluster", "a800x8-20gbps", *words]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert f"memory of the fullest rank, estimated: {memory['total_gib']:.1f} of 80 GiB (weights " in shown
    assert "does not fit" not in shown
    assert main([*command, "--set", "micro-batch-size=8"]) == 0
    assert "That does not fit: use more ranks" in capsys.readouterr().out
    # Without a vocabulary there is no estimate, and the reason is said.
    assert main([*command[:5], *words[2:]]) == 0
    shown = capsys.readouterr().out
    assert "memory of a rank is not estimated: the model file has no vocab-size" in " ".join(shown.split())


def test_flags_name_all_of_a_plan_that_has_a_name() -> None:
    block = sized_block(topk=4)
    plan = make_plan(Predictor(block, cluster(), num_layers=4), full=False, with_partner=1.0)
    usual = ["--ampipe-degree", str(plan.pipeline.degree)]
    for partner, flags in (
        (None, []),
        (Partner(), ["--ampipe-partner"]),
        (Partner(order=LISTED), ["--ampipe-partner", "--ampipe-partner-order", "listed"]),
        (Partner(plan.pipeline.degree), ["--ampipe-partner", "--ampipe-partner-degree", usual[1]]),
    ):
        found = replace(plan, pipeline=replace(plan.pipeline_of(block.rows), partner=partner))
        assert found.pipeline.flags == usual + flags and not found.searched


def test_equation_10_of_mpipemoe_is_shown_next_to_the_simulation(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, file = cluster("a800x8-20gbps"), tmp_path / "copies.yaml"
    copy = TransferCost(alpha_us=5.0, beta_us_per_mb=40.0, basis="derived", source="this test")
    write_cluster(replace(source, compute=replace(source.compute, copy=copy)), file, head="a test")
    found = plan_as_json(model, capsys, "--cluster", str(file))["memory_strategies"]
    assert set(found["equation_10_ms"]) == {"S1", "S2", "S3", "S4"}
    assert found["equation_10"] == min(found["equation_10_ms"], key=found["equation_10_ms"].get)
    fastest = min(found["equation_10_ms"], key=lambda name: found["simulated_ms"][name])
    assert found["simulated"] == fastest and set(found["simulated_ms"]) == {"keep", "S1", "S2", "S3", "S4"}
    assert main(["plan", "--model", str(model), "--cluster", str(file), "--verbose"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{found['equation_10']} by MPipeMoE's equation 10, {found['simulated']} by simulation (" in shown


def test_plan_file(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, data = tmp_path / "out" / "plan.yaml", tmp_path / "a.json"
    words = ["plan", "--model", str(model), "--cluster", "a800x8-20gbps", "--set", "seq-length=8192"]
    words += ["--output", str(target), "--json", str(data)]
    assert main(words) == 0
    assert target.read_text().splitlines()[0] == f"# {shlex.join(['ampipe', *words])}"
    found = json.loads(data.read_text())
    plan = Plan.read(target)
    assert (plan.pipeline.degree, plan.pipeline.backward_degree) == (
        found["forward_degree"],
        found["backward_degree"],
    )
    assert plan.reason == found["reason"] and plan.predicted_ms == found["predicted_ms"]
    assert "choice: " in capsys.readouterr().out


def test_a_predicted_trace_has_the_labels_of_a_run_with_the_plan(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, file, tape = (tmp_path / name for name in ("predicted.json", "plan.yaml", "tape"))
    files = ("--trace", str(trace), "--output", str(file), "--tape", str(tape))
    plan_as_json(model, capsys, "--no-partner", *files)
    assert "dispatch.0: Communicate(route tokens.0, route probs.0) -> " in tape.read_text()
    assert main(["draw", str(trace), "--output", str(tmp_path / "picture")]) == 0
    timeline, plan = Timeline.read_chrome(trace), Plan.read(file)
    rows = int(read_model(model).values["seq-length"])
    of_plan = timeline.labels.items() - {("predicted", timeline.labels["predicted"])}
    assert of_plan == plan.pipeline_of(rows).labels.items()
    in_trace = [timeline.length_us(direction) / 1e3 for direction in ("forward", "backward")]
    assert in_trace == pytest.approx(plan.stages_ms)
    # The rest is overhead outside of the stages.
    assert sum(plan.stages_ms) <= plan.predicted_ms


@pytest.mark.parametrize("changes", [{}, {"topk": 8, "sequence_length": 4096}, {"expert": 1}], ids=str)
def test_a_written_plan_is_read_back_unchanged(changes: dict[str, Any], tmp_path: Path) -> None:
    plan = make_plan(Predictor(sized_block(**changes), cluster()))
    plan.write(tmp_path / "plan.yaml", head="a test")
    found = Plan.read(tmp_path / "plan.yaml")
    assert found == plan or found.pipeline.shares == pytest.approx(plan.pipeline.shares)
    assert found.schedule == plan.schedule
    check(found.schedule, [sized_block(**changes).features])


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("forward_degree: 2", "forward_degree: 4", r"plan\.yaml:3: forward_degree 4: must be 2\."),
        ("- 0.5\n- 0.5", "- 0.5", r"must be 2, one for each chunk"),
        ("- 0.5\n- 0.5", "- 0.5\n- 0.6", r"sum is 1.1"),
        ("expert.0 ", "expert.7 ", r"plan\.yaml:\d+: .*expert\.7"),
        ("ampipe-plan-1", "ampipe-plan-9", "must be one of ampipe-plan-1"),
        ("reason:", "raeson:", "Did you mean reason?"),
    ],
)
def test_an_error_in_a_plan_file_is_reported_with_its_line(
    old: str, new: str, part: str, tmp_path: Path
) -> None:
    plan = make_plan(Predictor(sized_block(), cluster()), degrees=(2,), full=False)
    path = tmp_path / "plan.yaml"
    plan.write(path, head="a test")
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(BadInput, match=part):
        Plan.read(path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cluster", "nowhere"], "--cluster nowhere: is neither"),
        (["--set", "seq-length"], "is not FLAG=VALUE"),
        (["--set", "transformer-impl=banana"], "transformer-impl banana"),
        (
            ["--set", "moe-token-dispatcher-type=flex", "--set", "moe-flex-dispatcher-backend=ncclep"],
            "moe-flex-dispatcher-backend ncclep: cannot run in chunks",
        ),
        (["--degrees", "2,1"], "'1' is not a whole number of at least 2"),
        (["--set", "fp8-format=hybrid"], "fp8-recipe (default): delayed scaling, Megatron's default, takes"),
        (["--exchange", "2dh"], "--exchange 2dh saves nothing in this layout"),
        (["--imbalance", "0.5"], "--imbalance 0.5: "),
        (["--stack", "some"], "must be a whole number of layers"),
        (["--trace-of", "4"], "needs --trace FILE"),
        (["--routing", "absent", "--imbalance", "2"], "not allowed with argument"),
        (
            ["--trace-of", "64", "--set", "seq-length=32", "--trace", "trace.json"],
            "must be between 1 and the number of rows of the sequence on one rank (32)",
        ),
    ],
)
def test_errors_are_one_line(
    words: list[str], message: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", "--model", str(model), "--cluster", "a800x8-20gbps", *words]
    assert main(command) in (2, 3)
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_the_page_s_table_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.planner"


@pytest.mark.parametrize("name", config_names("clusters"))
def test_every_built_in_model_can_be_planned_on_every_built_in_cluster(name: str) -> None:
    source = cluster(name)
    for path in config_names("models").values():
        block, _ = block_of(read_model(path), source)
        plan = make_plan(Predictor(block, source), full=False)
        assert plan.predicted_speedup >= 1


def test_a_cluster_on_which_nothing_takes_time_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, text = tmp_path / "mine.yaml", find_cluster("a800x8-20gbps").read_text()
    file.write_text(re.sub(r"(\w+_us\w*: *)[0-9.e+-]+", r"\g<1>0.0", text))
    assert main(["plan", "--model", str(model), "--cluster", str(file)]) == 2
    assert "compute: has figures with which the time of a block is 0" in capsys.readouterr().err
