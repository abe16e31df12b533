"""The plans for slower hosts, and what ``ampipe plan`` says of them."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ampipe.plan.cluster import find_cluster, read_cluster
from megatron_ampipe.plan.host_times import FACTORS, by_host_time, in_words, with_host_times
from megatron_ampipe.plan.model_block import block_of, layers_of
from megatron_ampipe.plan.model_file import find_model, read_model
from megatron_ampipe.plan.planner import PlanOptions, make_plans
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.whole_passes import fastest_way, with_whole_passes
from tests.conftest import Command

DEGREES = (2, 4)
DGX = ("--cluster", "dgx-h100", "--degrees", "2", "--exchange", "rows")


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    cluster = read_cluster(find_cluster("dgx-h100"))
    model = read_model(find_model("qwen3-30b-a3b-like"), overrides={"expert-model-parallel-size": 32})
    block, _ = block_of(model, cluster, ranks=32)
    layers = layers_of(model)
    return Predictor(block, cluster, num_layers=layers.num_layers, dense=layers.dense)


def choice_at(predictor: Predictor, forward_us: float, *, with_partner: float) -> str:
    """What a host with this time gets, searched apart."""
    factor = forward_us / predictor.cluster.host.issue.forward_us
    slower = predictor.on(with_host_times(predictor.cluster, factor))
    plans = make_plans(slower, degrees=DEGREES, full=False, with_partner=with_partner)
    return in_words(plans.chosen.pipeline)


@pytest.mark.parametrize("with_partner", [0.0, 1.0])
def test_every_row_is_where_another_plan_begins(predictor: Predictor, with_partner: float) -> None:
    chosen = make_plans(predictor, degrees=DEGREES, full=False, with_partner=with_partner).chosen.pipeline
    rows = by_host_time(predictor, chosen, degrees=DEGREES, with_partner=with_partner)
    times = [row.forward_us for row in rows]
    assert times[0] == predictor.cluster.host.issue.forward_us
    assert times == sorted(times)
    if not with_partner:
        assert len(rows) > 1, "on a slow host, chunks are too many launches"
    for before, row in itertools.pairwise(rows):
        assert row.choice != before.choice
        assert choice_at(predictor, row.forward_us, with_partner=with_partner) == row.choice
        # Searched in steps of a fourth root of the distance between two factors.
        just_before = row.forward_us / 2 ** (1 / 4)
        assert choice_at(predictor, just_before, with_partner=with_partner) == before.choice
    assert len(rows) == 1 or rows[-1].speedup < rows[0].speedup


def test_all_times_of_the_host_are_longer() -> None:
    host = with_host_times(read_cluster(find_cluster("dgx-h100")), 3.0).host
    assert (host.issue.forward_us, host.issue.backward_us) == (270.0, 360.0)
    profiled = Path(__file__).resolve().parents[2] / "docs" / "measured" / "results" / "profile-100mbit.yaml"
    assert read_cluster(profiled).host.issue.forward_us == 0.0, "a CPU issues nothing"


def test_a_cpu_has_no_rows(predictor: Predictor) -> None:
    host = predictor.cluster.host
    no_time = replace(host, issue=replace(host.issue, forward_us=0.0, backward_us=0.0))
    on_cpu = predictor.on(replace(predictor.cluster, host=no_time))
    chosen = make_plans(on_cpu, degrees=(2,), full=False).chosen.pipeline
    assert by_host_time(on_cpu, chosen, degrees=(2,)) == []


def test_the_command_says_what_it_assumes(ampipe: Command) -> None:
    words = ("plan", "--model", "tiny", *DGX)
    said = ampipe(*words).out
    assert "host: takes 90 us to issue a stage forward and 120 us backward (derived: " in said
    assert "ampipe profile, then --cluster FILE" in said
    assert "with CUDA graphs of whole passes (--ampipe-" in said
    assert "--moe-grouped-gemm --ampipe-rows fixed --cuda-graph-impl local): predicted " in said
    answer = json.loads(ampipe(*words, "--json", "-").out)
    (way,) = answer["whole_passes"]["ways"]
    assert way["name"] == "whole passes, alltoall" and way["padding"] > 1.25
    host = answer["host"]
    assert host["choices"][0]["forward_us"] == host["forward_us"] == 90.0
    slowest = 90 * FACTORS[-1]
    assert all(row["forward_us"] <= slowest for row in host["choices"])


def test_weights_that_graphs_quantize_are_not_predicted(ampipe: Command, tmp_path: Path) -> None:
    flags = "fp8-format: e4m3\nfp8-recipe: blockwise\ntransformer-impl: transformer_engine\n"
    graphs = "moe-grouped-gemm: true\ncuda-graph-impl: local\nampipe:\n  rows: fixed\n"
    file = tmp_path / "model.yaml"
    for added, is_said in ((flags, False), (flags + graphs, True)):
        file.write_text(find_model("tiny").read_text() + added)
        answer = json.loads(ampipe("plan", "--model", file, *DGX, "--json", "-").out)
        assert any("quantized weights are not predicted" in one for one in answer["assumed"]) == is_said
        assert answer["whole_passes"] is None


def test_graphs_of_whole_passes_are_chosen_where_the_host_is_slow_enough() -> None:
    """Padding costs more than a fast host does."""
    model = read_model(find_model("qwen3-30b-a3b-like"))
    cluster = read_cluster(find_cluster("dgx-h100"))
    block, _ = block_of(model, cluster)
    predictor = Predictor(block, cluster, num_layers=2)
    (whole,) = with_whole_passes(predictor, other_dispatcher=False)
    assert " ".join(whole.flags) == "--ampipe-rows fixed --cuda-graph-impl local"
    assert whole.predictor.stock() == predictor.stock()
    options: PlanOptions = {"degrees": (2,), "with_partner": 0.0}
    chosen = make_plans(predictor, **options, full=False).chosen.pipeline
    rows = by_host_time(predictor, chosen, further=[whole], **options)
    assert "whole passes" not in rows[0].choice and rows[-1].choice == "2 chunks, whole passes, alltoall"
    without = by_host_time(predictor, chosen, **options)
    assert rows[-1].speedup > 1.01 > without[-1].speedup
    # Also without being chosen, it says what they would gain.
    gain = fastest_way(whole, **options)
    assert in_words(gain.pipeline) == "2 chunks" and gain.time_us > predictor.stock().total
    assert gain.padding == pytest.approx(1.42, rel=0.01)
    with_other = [each.name for each in with_whole_passes(predictor, other_dispatcher=True)]
    assert with_other == ["whole passes, alltoall", "whole passes, hybridep"]
    for changes in ({"dtype": "fp8"}, {"expert": 1}, {"condense": 0.9}, {"captures_passes": True}):
        assert not with_whole_passes(predictor.changed(**changes), other_dispatcher=True)
