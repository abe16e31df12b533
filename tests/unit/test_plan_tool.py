"""``ampipe plan``, and the plan file."""

import functools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron_ampipe.errors import BadInput
from megatron_ampipe.files.inputs import config_names
from megatron_ampipe.files.timeline import Timeline
from megatron_ampipe.plan.cluster import find_cluster, write_cluster
from megatron_ampipe.plan.model_block import block_of
from megatron_ampipe.plan.model_file import read_model
from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.plan.planner import PlanOptions, make_plan
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.sensitivity import over_host_time, over_link_rate, with_link_rate
from megatron_ampipe.schedule import check
from tests.conftest import Command
from tests.plan_cases import cluster, model_file, sized_block, with_copies
from tests.planner import PAGE, page


@pytest.fixture
def plan(ampipe: Command, tmp_path: Path) -> Command:
    """``ampipe plan`` of a plain model, on the cluster a800x8-20gbps if the arguments name no other."""
    return functools.partial(ampipe, "plan", "--model", model_file(tmp_path), "--cluster", "a800x8-20gbps")


def answer(plan: Command, *words: object) -> dict[str, Any]:
    """As scripts read it."""
    found: dict[str, Any] = json.loads(plan("--json", "-", *words).out)
    return found


def test_the_table_shows_the_choice_and_its_reason(plan: Command) -> None:
    shown = plan().out
    assert re.search(r"1 +│ stock .* 1\.00", shown)
    assert re.search(r"choice: degree \d.*, schedule \S+", shown)
    assert "times as fast" in shown.splitlines()[1] and "no GPU has run this" in shown.splitlines()[1]
    assert re.search(r"flags: --ampipe-degree \d", shown.splitlines()[2])
    assert "order was searched" not in shown
    assert re.search(r"communication hidden: .*\d+% under partner", shown)
    assert re.search(r"partners, megatron-1f1b +│.*\n│ partners +│", shown) and "GiB" not in shown


def test_dispatchers_and_grouped_products_are_compared_without_being_asked(plan: Command) -> None:
    words = shlex.split(
        "--cluster dgx-h100 --ranks 16 --degrees 2 --stack 1 --no-partner "
        "--set expert-model-parallel-size=16 --set num-experts=256 --set moe-router-topk=4"
    )
    rows = answer(plan, *words)["dispatchers"]
    # What a row says is what a plan with its flags says; golden plans hold its other figures.
    chosen = answer(plan, *words, "--set", "moe-grouped-gemm=true")["dispatchers"]
    of_exchanges = [row["predicted_ms"] for row in rows if row["flags"] == ["--moe-grouped-gemm"]]
    assert of_exchanges == [row["predicted_ms"] for row in chosen if not row["flags"]]
    assert len(of_exchanges) == 4
    hybrid = ("--set", "moe-token-dispatcher-type=flex", "--set", "moe-flex-dispatcher-backend=hybridep")
    (alone, *_) = answer(plan, *words, *hybrid)["dispatchers"]
    assert alone["predicted_ms"] == rows[-1]["predicted_ms"]
    shown = plan(*words).out
    faster = [line for line in shown.splitlines() if line.startswith("with --moe")]
    assert any(line.startswith("with --moe-grouped-gemm: layers take ") for line in faster)
    assert all("(figures estimated)" in line for line in faster)
    assert re.search(r"deepep +│ its own ", shown)


def test_an_order_of_the_user_is_predicted_next_to_the_named_ones(plan: Command, tmp_path: Path) -> None:
    name, trace = "tests.schedules:interleaved", tmp_path / "predicted.json"
    words = ["--degrees", "2,4", "--stack", "1", "--exchange", "rows", "--no-partner", "--schedule"]
    rows = answer(plan, *words, name, "--trace-of", "4", "--trace", trace)["degrees"]
    assert [row["degree"] for row in rows if row["schedule"] == name] == [2, 4]
    others = [row for row in rows if row["schedule"] != name]
    assert others == answer(plan, *words, "ampipe")["degrees"]
    timeline = Timeline.read_chrome(trace)
    assert (timeline.labels["schedule"], timeline.labels["degree"]) == (name, "4")
    refused = plan(*words, "ampip", code=2).err
    assert "--schedule ampip: is neither package" in refused and "Did you mean ampipe?" in refused


@pytest.mark.parametrize("words", [["--no-partner"], ["--no-partner", "--stack", "1"], []], ids=str)
def test_the_answer_is_drawn_over_what_is_not_sure(plan: Command, tmp_path: Path, words: list[str]) -> None:
    picture, few = tmp_path / "answer.svg", ["--degrees", "2", "--exchange", "rows"]
    shown = plan(*few, *words, "--plot", picture)
    assert f"wrote {picture}" in shown.err
    texts = re.findall(r"<!-- (.*?) -->", picture.read_text(), re.S)
    for text in ("cluster file: ", "host's time to issue a stage forward, us", "rate of an all-to-all "):
        assert any(text in found for found in texts), text
    refused = plan(*few, "--plot", tmp_path / "answer.txt", code=2).err
    assert "must end with one of .png, .svg, .pdf" in refused


@pytest.mark.parametrize("options", [{}, {"with_partner": 1.0}, {"stack": 1}], ids=str)
def test_what_is_drawn_at_the_value_of_the_cluster_file_is_the_answer(options: PlanOptions) -> None:
    predictor = Predictor(sized_block(), cluster(), num_layers=4)
    chosen = make_plan(predictor, degrees=(2, 4), full=False, **options)
    pipeline = chosen.pipeline_of(predictor.block.rows)
    assert chosen.helps
    for line in (over_host_time(predictor, pipeline), over_link_rate(predictor, pipeline)):
        assert line is not None
        at = list(line.values).index(line.given)
        assert line.speedups[at] == pytest.approx(chosen.predicted_speedup, rel=1e-9)
    # A faster link leaves less to hide, a slower host hides less.
    assert over_link_rate(predictor, pipeline).speedups[-1] < chosen.predicted_speedup
    assert over_host_time(predictor, pipeline).speedups[-1] <= chosen.predicted_speedup
    faster = with_link_rate(predictor.cluster, 2.0)
    before, after = ((each.inter or each.intra)["all_to_all"] for each in (predictor.cluster, faster))
    assert after.time_us(1e9) - after.alpha_us == pytest.approx((before.time_us(1e9) - before.alpha_us) / 2)


def test_a_long_search_says_what_it_does(plan: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--degrees", "2", "--stack", "1", "--exchange", "rows")
    assert "searching" not in plan(*words).err
    monkeypatch.setattr("megatron_ampipe.tools.plan_command._QUIET_SECONDS", -1.0)
    assert "ampipe plan: 0 s, searching alltoall, exchange rows" in plan(*words).err


@pytest.mark.parametrize(
    ("words", "others"),
    [
        ("--cluster dgx-h100 --set moe-token-dispatcher-type=allgather", {"allgather", "deepep", "hybridep"}),
        ("--cluster dgx-h100 --exchange rows", set()),
    ],
)
def test_only_dispatchers_that_a_cluster_has_are_compared(
    words: str, others: set[str], plan: Command
) -> None:
    model = "--degrees 2 --stack 1 --set num-experts=16 --set moe-grouped-gemm=true"
    rows = answer(plan, *model.split(), *words.split())["dispatchers"]
    assert {row["dispatcher"] for row in rows} - {"alltoall"} == others


def test_the_answer_says_what_the_fullest_rank_holds(plan: Command) -> None:
    small = ["--exchange", "rows", "--no-partner", "--degrees", "2"]
    words = ["--set", "vocab-size=50257", *small]
    memory = answer(plan, *words)["rank_memory"]
    shown = plan(*words).out
    assert f"memory of the fullest rank, estimated: {memory['total_gib']:.1f} of 80 GiB (weights " in shown
    assert "does not fit" not in shown
    assert "That does not fit: use more ranks" in plan(*words, "--set", "micro-batch-size=8").out
    # Without a vocabulary there is no estimate, and the reason is said.
    shown = " ".join(plan(*small).out.split())
    assert "memory of a rank is not estimated: the model file has no vocab-size" in shown


def test_equation_10_of_mpipemoe_is_shown_next_to_the_simulation(plan: Command, tmp_path: Path) -> None:
    file = tmp_path / "copies.yaml"
    write_cluster(with_copies(cluster(), alpha_us=5.0, us_per_mb=40.0), file, head="a test")
    found = answer(plan, "--cluster", file)["memory_strategies"]
    assert set(found["equation_10_ms"]) == {"S1", "S2", "S3", "S4"}
    assert found["equation_10"] == min(found["equation_10_ms"], key=found["equation_10_ms"].get)
    fastest = min(found["equation_10_ms"], key=lambda name: found["simulated_ms"][name])
    assert found["simulated"] == fastest and set(found["simulated_ms"]) == {"keep", "S1", "S2", "S3", "S4"}
    shown = " ".join(plan("--cluster", file, "--verbose").out.split())
    assert f"{found['equation_10']} by MPipeMoE's equation 10, {found['simulated']} by simulation (" in shown


def test_files_of_a_plan_agree(plan: Command, ampipe: Command, tmp_path: Path) -> None:
    """The plan, the answer, and a trace with the labels of a run with the plan."""
    names = ("predicted.json", "plan.yaml", "tape", "a.json")
    trace, file, tape, data = (tmp_path / "out" / name for name in names)
    words = ["--no-partner", "--trace", trace, "--output", file, "--tape", tape, "--json", data]
    assert "choice: " in plan(*words).out
    head = file.read_text().splitlines()[0]
    assert head.startswith("# ampipe plan --model ") and head.endswith(shlex.join(map(str, words)))
    assert "dispatch.0: Communicate(route tokens.0, route probs.0) -> " in tape.read_text()
    ampipe("draw", trace, "--output", tmp_path / "picture")
    timeline, chosen, found = Timeline.read_chrome(trace), Plan.read(file), json.loads(data.read_text())
    assert chosen.reason == found["reason"] and chosen.predicted_ms == found["predicted_ms"]
    of_plan = timeline.labels.items() - {("predicted", timeline.labels["predicted"])}
    assert of_plan == chosen.pipeline_of(16384).labels.items()
    in_trace = [timeline.length_us(direction) / 1e3 for direction in ("forward", "backward")]
    assert in_trace == pytest.approx(chosen.stages_ms)
    # The rest is overhead outside of the stages.
    assert sum(chosen.stages_ms) <= chosen.predicted_ms


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
        ("--cluster nowhere", "--cluster nowhere: is neither"),
        ("--set transformer-impl=banana", "transformer-impl banana"),
        (
            "--set moe-token-dispatcher-type=flex --set moe-flex-dispatcher-backend=ncclep",
            "moe-flex-dispatcher-backend ncclep: cannot run in chunks",
        ),
        ("--degrees 2,1", "'1' is not a whole number of at least 2"),
        ("--set fp8-format=hybrid", "fp8-recipe (default): delayed scaling, Megatron's default, takes"),
        ("--exchange 2dh", "--exchange 2dh saves nothing in this layout"),
        ("--imbalance 0.5", "--imbalance 0.5: "),
        ("--stack some", "must be a whole number of layers"),
        ("--trace-of 4", "needs --trace FILE"),
        ("--routing absent --imbalance 2", "not allowed with argument"),
        (
            "--trace-of 64 --set seq-length=32 --trace trace.json",
            "must be between 1 and the number of rows of the sequence on one rank (32)",
        ),
    ],
)
def test_errors_are_one_line(words: str, message: str, plan: Command) -> None:
    error = plan(*words.split(), code=2).err
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


def test_a_cluster_on_which_nothing_takes_time_is_refused(plan: Command, tmp_path: Path) -> None:
    file, text = tmp_path / "mine.yaml", find_cluster("a800x8-20gbps").read_text()
    file.write_text(re.sub(r"(\w+_us\w*: *)[0-9.e+-]+", r"\g<1>0.0", text))
    error = plan("--cluster", file, code=2).err
    assert "compute: has figures with which the time of a block is 0" in error
