"""``ampipe bench`` without its processes: links, grids, variants, bounds, results, refused input."""

import argparse
import dataclasses
import functools
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

import megatron_ampipe
from megatron_ampipe.errors import BadInput, RunFailed
from megatron_ampipe.files.inputs import config_names
from megatron_ampipe.files.outputs import ReportView
from megatron_ampipe.plan.cluster import find_cluster, read_cluster
from megatron_ampipe.schedule import BlockFeatures, build
from megatron_ampipe.tools import bench_command
from megatron_ampipe.tools.measuring import machine, network, prediction, result, training
from megatron_ampipe.tools.measuring.bench_job import BenchJob, Variant
from megatron_ampipe.tools.measuring.grid import Case, find_grid, read_grid
from megatron_ampipe.tools.measuring.network import Link, parse_link
from megatron_ampipe.tools.measuring.training import Curve, TrainingJob
from tests.conftest import Command
from tests.forked import REPOSITORY

FIGURES: dict[str, Any] = {"sequence_length": 64, "batch": 1, "hidden": 32, "heads": 4, "experts": 4,
                           "topk": 1, "ffn": 64, "activation": "gelu", "dtype": "fp32"}  # fmt: skip
CASE = Case(name="one", **FIGURES)
STOCK, CONTROL = Variant("stock"), Variant("control")
JOB = BenchJob(cases=(CASE,), link=parse_link("none"), num_ranks=2, repeats=2, warmup=1)


def read_text(folder: Path, text: str) -> Path:
    path = folder / "grid.yaml"
    path.write_text(text)
    return path


# Links and arguments


@pytest.mark.parametrize(
    "link",
    [
        Link("none"),
        Link("1.5gbit", 1.5e9),
        Link("25MB/s", 200e6),
        Link("emulated:20GB/s", 160e9, emulated=True),
        Link("emulated:200mbit:50us", 200e6, emulated=True, latency_s=50 * 1e-6),
        Link("emulated:20GB/s:nccl", 160e9, emulated=True, blocks=16),
        Link("emulated:20GB/s:nccl32", 160e9, emulated=True, blocks=32),
        Link("emulated:1gbit:skew2ms", 1e9, emulated=True, skew_s=2e-3),
        Link(
            "emulated:200mbit:50us:nccl8:skew1.5ms",
            200e6,
            emulated=True,
            latency_s=50 * 1e-6,
            blocks=8,
            skew_s=1.5 * 1e-3,
        ),
        Link("inter=50mbit,intra=2.5MB/s", 50e6, within_node_bit_per_s=20e6),
    ],
)
def test_links_are_read(link: Link) -> None:
    assert parse_link(link.text) == link
    assert link.is_network is link.text.startswith(("1.5", "25", "inter"))
    if link.latency_s:
        assert link.transfer_s(1e6) == pytest.approx(50e-6 + 40e-3)


@pytest.mark.parametrize(
    "text",
    ["", "200", "0mbit", "-1mbit", "nan", "20Gbit", "1kbit", "200mbit:1ms", "emulated:1ms",
     "emulated:1gbit:1us:1us", "inter=50mbit", "intra=50mbit,inter=50mbit", "inter=1gbit,intra=1kbit",
     "inter=1kbit,intra=1gbit", "inter=1gbit,intra=1gbit:1us", "emulated:inter=1gbit,intra=1gbit",
     "1gbit:nccl", "1gbit:skew1ms", "emulated:nccl", "emulated:1gbit:NCCL", "emulated:1gbit:nccl-1",
     "emulated:1gbit:skew", "emulated:1gbit:skew2", "emulated:1gbit:nccl:10us",
     "emulated:1gbit:skew1ms:nccl"],
)  # fmt: skip
def test_bad_links_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="emulated:RATE"):
        parse_link(text)


@pytest.mark.parametrize("text", ["emulated:1gbit:nccl0", "emulated:1gbit:nccl65"])
def test_a_transfer_holds_a_sensible_number_of_blocks(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="1 to 64 thread blocks; write nccl16 or nccl32"):
        parse_link(text)


def test_a_slow_network_needs_root_and_iproute2(
    monkeypatch: pytest.MonkeyPatch, ampipe: Command, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for program, why in ((None, "this is not root"), ("tc", "tc not found")):
        monkeypatch.setattr(
            network.shutil, "which", lambda name, lacks=program: None if name == lacks else name
        )
        error = ampipe("bench", "--link", "200mbit", "--json", tmp_path / "x.json", code=1).err
        assert why in error and "--link emulated:RATE" in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("--schedules gpipe", "'gpipe' is not valid"),
        ("--degrees 4:3", "'4:3' is no whole number"),
        ("--degrees 4096", "--degrees 4096 is above the 2048 rows"),
        ("--ranks 3", "case top1: 3 ranks cannot share its 4 experts"),
        ("--grid absent", "cpu-small"),
        ("--cases top1,top3", "case top3: is not in this grid. Did you mean top"),
        ("--memory keep,forget", "--memory forget: is not one of keep, rebuild, redispatch"),
        ("--degrees 1,4 --memory keep,keep/rebuild", "--memory keep/rebuild: names strategies of 2 chunks"),
        ("--stack 3", "--stack 3 is above the number of layers"),
        ("--wire fp8 --end-to-end", "--wire fp8 changes the losses"),
        ("--exchange nodes", "--exchange nodes saves nothing in case top1"),
        ("--rows fixed --end-to-end", "--rows fixed is for blocks; leave out --end-to-end"),
        ("--rows fixed --exchange ranks", "--rows fixed with --exchange ranks"),
        (
            "--rows fixed --grid deepseek --cases deepseek-8k-grouped",
            "--rows fixed: case deepseek-8k-grouped has grouped products of experts",
        ),
        ("--rows whole", "'whole' is not valid"),
        ("--cuda-graph-impl local", "--cuda-graph-impl local needs a GPU"),
        ("--cuda-graph-impl local --memory rebuild", "local with --memory rebuild: no graph can have both"),
        ("--emulate-peers", "--emulate-peers with --link none"),
        (
            "--link inter=1gbit,intra=2gbit",
            "--link inter=1gbit,intra=2gbit needs to know the ranks of a node",
        ),
        (
            "--ranks-per-node 2",
            "--ranks-per-node 2 does not divide 2 ranks into several nodes; use --ranks 4",
        ),
        ("--ranks 4 --ranks-per-node 3", "--ranks-per-node 3 does not divide 4 ranks into several nodes"),
        ("--ranks 4 --ranks-per-node 2 --link emulated:1gbit --emulate-peers", "with emulated peers"),
        ("--from /absent.json", "--from /absent.json: cannot be read"),
        ("--rounds 3", "--rounds 3 is for trainings; add --end-to-end"),
        ("--imbalance 0.5", "--imbalance 0.5: the busiest of 2 expert-parallel ranks has 1 to "),
        ("--imbalance 3", "--imbalance 3: the busiest of 2 expert-parallel ranks has 1 to "),
        ("--imbalance 1.5 --end-to-end", "a training changes the bias of its routers"),
        ("--imbalance 1.5 --link emulated:1gbit --emulate-peers", "emulated peers send what they get"),
        ("--routing /absent", "--routing /absent: has no file of a recorded routing"),
        ("--end-to-end --link emulated:1gbit --emulate-peers", "--emulate-peers: a training needs"),
    ],
)
def test_bad_arguments_end_with_2_before_anything_starts(
    words: str, shown: str, ampipe: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (bench_command, training):
        monkeypatch.setattr(module, "run_ranks", None)
    assert shown in ampipe("bench", *words.split(), code=2).err


# Grids


@pytest.mark.parametrize("name", sorted(config_names("bench")))
def test_our_grids_are_sound(name: str) -> None:
    cases = {case.name: case for case in read_grid(find_grid(name))}
    assert cases
    if name in ("paper", "cpu-paper"):
        assert len(cases) == 56 and "xl-32k-b2-c4" not in cases
    if name == "cpu-paper":
        for case in read_grid(find_grid("paper")):
            small = cases[case.name]
            sizes = (small.sequence_length, small.hidden, small.ffn)
            assert [8 * size for size in sizes] == [case.sequence_length, case.hidden, case.ffn]
            assert (small.batch, small.topk) == (case.batch, case.topk)
    if name == "fsmoe":
        # Six sizes of three values each, and two kinds of experts.
        assert len(cases) == 3**6 * 2
    if name == "mpipemoe":
        tokens = {case.sequence_length * case.batch for case in cases.values()}
        assert tokens == {4096, 8192, 16384, 32768}
    if name == "paper":
        last = cases["xl-24k-b1-c4"]
        assert (last.hidden, last.sequence_length, last.batch, last.topk) == (1600, 24576, 1, 4)
    if name == "cpu-small":
        # Of the second one the default.
        assert (cases["many-top8"].ffn, cases["top2"].ffn) == (128, 1024)


@pytest.mark.parametrize(
    ("text", "line", "rule"),
    [
        ("cases:\n  - {name: a, speed: 3}\n", 3, "speed: is not a known key. Use one of"),
        ("cases:\n  - name: a\n    dtype: fp8\n", 4, "dtype 'fp8': must be one of fp32"),
        ("cases:\n  - name: a\n    heads: 5\n", 4, "does not divide hidden 32"),
        ("cases: [{name: a}, {name: a}]\n", 1, "two have one name"),
        ("cases: [{name: a}]\naxes: [[{name: a}]]\n", 1, "exactly one of cases and axes"),
    ],
)
def test_bad_grids_are_refused_by_file_and_line(tmp_path: Path, text: str, line: int, rule: str) -> None:
    path = read_text(tmp_path, f"defaults: {json.dumps(FIGURES)}\n{text}")
    with pytest.raises(BadInput) as error:
        read_grid(path)
    assert f"{path}:{line}:" in str(error.value)
    assert rule in str(error.value)


# What is compared


def test_fixed_rows_and_graphs_are_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "num_gpus", lambda: 2)
    words = "--grid mixtral --degrees 1,2 --rows exact,fixed --cuda-graph-impl none,local"
    found = compared(words, case="mixtral-8k")
    assert list(map(str, found)) == [
        "stock-graphs", "degree 1, schedule ampipe", "degree 2, schedule ampipe",
        "degree 2, schedule ampipe, CUDA graphs", "degree 2, schedule ampipe, rows fixed",
        "degree 2, schedule ampipe, rows fixed, CUDA graphs",
    ]  # fmt: skip
    assert [variant.prepares for variant in found] == [True, False, False, True, True, True]


def test_fixed_rows_of_a_gpu_need_16_bit(monkeypatch: pytest.MonkeyPatch, ampipe: Command) -> None:
    monkeypatch.setattr(machine, "num_gpus", lambda: 2)
    error = ampipe("bench", "--cases", "top1", "--rows", "fixed", code=2).err
    assert "--rows fixed: case top1 is in fp32, and on a GPU only experts in 16 bit" in error


def compared(words: str, *, case: str = "top2") -> list[Variant]:
    """What is compared of schedule ``ampipe`` besides stock and its control."""
    parser = argparse.ArgumentParser()
    bench_command.add_arguments(parser)
    parsed = parser.parse_args(["--cases", case, "--schedules", "ampipe", *words.split()])
    stock, control, *others = bench_command._job(parsed).variants[0]
    assert (stock, control) == (STOCK, CONTROL)
    return others


def test_every_way_is_compared() -> None:
    one, four = (functools.partial(Variant.of, "ampipe", degree) for degree in (1, 4))
    # In one chunk, layers are Megatron's: nothing is shared, kept or cast.
    assert compared("--degrees 1,4 --layers 4 --stack 1,all --memory keep,rebuild") == [
        one(),
        *(four(stack=stack, memory=memory) for stack in (1, 4) for memory in ("keep", "rebuild")),
    ]
    cast = dataclasses.replace(four(), wire="fp8")
    assert compared("--degrees 1,4 --wire none,fp8") == [one(), four(), cast]
    # Strategies of single chunks are for one degree.
    in_two = four(backward_degree=2, memory="rebuild/keep")
    assert compared("--degrees 1,4:2 --memory rebuild/keep") == [one(), in_two]


def test_a_custom_order_is_compared_and_stays_in_the_result() -> None:
    name = "tests.schedules:interleaved"
    (variant,) = compared(f"--schedules {name} --degrees 2")
    row = result.described(variant, JOB)
    assert (row["schedule"], variant.pipeline.name) == (name, name)
    order = prediction.pipeline_of(row).order
    assert order is not None and order == variant.pipeline.order
    assert order == build(name, degree=2, features=BlockFeatures(chunked_qkv=True))
    # A training gets the flag.
    (trained,) = compared(f"--schedules {name} --degrees 2 --stack all --end-to-end")
    assert trained.pipeline.flags[2:4] == ["--ampipe-schedule", name]


def test_the_exchanges_of_a_case_are_those_that_save_something() -> None:
    nodes = "--ranks 4 --ranks-per-node 2"
    for words, case, exchanges in (
        ("", "top1", ["rows"]),
        ("", "top2", ["rows", "ranks"]),
        (nodes, "top1", ["rows", "2dh"]),
        (nodes, "many-top8", ["rows", "ranks", "nodes", "2dh"]),
    ):
        found = compared(f"--degrees 4 --exchange auto {words}", case=case)
        assert [each.pipeline.exchange for each in found] == exchanges


# The document

MEASURED = REPOSITORY / "docs" / "measured" / "results"


def stored(name: str) -> dict[str, Any]:
    """A document of an earlier measurement."""
    document: dict[str, Any] = json.loads((MEASURED / f"{name}.json").read_text())
    return document


def reports(case: ReportView) -> list[dict[str, Any]]:
    """What two ranks may have reported for a case: the second one had shorter backward passes."""
    stock = {key.removeprefix("stock_"): value for key, value in case.items() if key.startswith("stock_")}
    rows = [{"difference_from_stock": 0.0} | stock, case["control"], *case["rows"]]

    def of(rank: int, row: ReportView) -> dict[str, Any]:
        wall_s, sent = [ms / 1e3 for ms in row["samples_ms_by_rank"][rank]], row["wire_bytes"]
        return {
            "wall_s": wall_s,
            "backward_s": [row["backward_ms"] / 1e3 / (1 + rank)] * len(wall_s),
            "wire_bytes": [None]
            if sent is None
            else [{"inter": count} for count in (0, 2 * sent, 1000 if rank else sent - 1000)],
            "stages": row.get("stages_us_by_rank") and row["stages_us_by_rank"][rank],
            "needs": row.get("stage_needs"),
            "difference": row["difference_from_stock"],
            "peak_bytes": row["peak_bytes"] - rank,
            "graph_bytes": 0,
        }

    same = {key: case[key] for key in ("kernel", "fused_gradients")}
    return [same | {"variants": [of(rank, row) for row in rows]} for rank in range(2)]


def changed(made: Any, kept: Any, name: str = "") -> list[str]:
    """Where a record is not as a kept one, in what versions of both have."""
    match made:
        case dict():
            return [at for key in made.keys() & kept for at in changed(made[key], kept[key], f"{name}/{key}")]
        case [dict(), *_]:
            pairs = enumerate(zip(made, kept, strict=True))
            return [at for place, pair in pairs for at in changed(*pair, f"{name}/{place}")]
    return [] if json.loads(json.dumps(made)) == kept else [name]


@pytest.mark.parametrize("name", ["cpu-small-none", "layers-200mbit-top1-evening"])
def test_figures_of_kept_results_follow_from_their_samples(name: str) -> None:
    document = stored(name)
    for kept in document["cases"]:
        variants = [Variant(row["schedule"], prediction.pipeline_of(row)) for row in kept["rows"]]
        job = dataclasses.replace(
            JOB,
            cases=(Case(**kept["block"]),),
            link=parse_link(document["link"]),
            layers=document["layers"],
            variants=((STOCK, CONTROL, *variants),),
        )
        assert changed(result.case_result(job, 0, reports(kept)), kept) == []


def test_bytes_are_summed_over_ranks_by_class_of_links(tmp_path: Path, ampipe: Command) -> None:
    document = stored("cpu-small-200mbit-top1-night-1")
    (kept,) = document["cases"]
    kept["rows"] = kept["rows"][5:6]
    of_ranks = reports(kept)
    for rank, report in enumerate(of_ranks):
        for variant in report["variants"]:
            # The median of the repeats counts.
            variant["wire_bytes"] = [
                {"inter": between * 10**6, "intra": rank * 10**6} for between in (rank, 3, 9)
            ]
    variants = (STOCK, CONTROL, Variant.of("ampipe", 4, exchange="nodes"))
    job = dataclasses.replace(JOB, cases=(CASE,), variants=(variants,), num_ranks=4, ranks_per_node=2)
    case = result.case_result(job, 0, of_ranks)
    for figures in (case["control"], *case["rows"]):
        assert figures["wire_bytes_by_class"] == {"inter": 6 * 10**6, "intra": 10**6}
        assert figures["wire_bytes"] == 7 * 10**6
    path = tmp_path / "x.json"
    result.write(document | {"cases": [case], "ranks": 4, "ranks_per_node": 2}, path)
    words = " ".join(ampipe("bench", "--from", path).out.split())
    assert "4 ranks, 2 per node" in words and "wire MB ┃ between nodes ┃" in words
    assert "│ 7.00 │ 6.00 │" in words


def test_the_table(tmp_path: Path, ampipe: Command) -> None:
    path, document = tmp_path / "x.json", stored("layers-200mbit-top1-evening")
    rows = document["cases"][0]["rows"]
    rows[1] |= {"difference_seen": False}
    rows.append(rows[0] | {"exchange": "ranks", "wire": "fp8", "difference_from_stock": 0.02})
    result.write(document, path)
    words = " ".join(ampipe("bench", "--from", path).out.split())
    assert list(tmp_path.iterdir()) == [path]
    for line in (
        "grid cpu-small, 4 layers · link 200mbit · 2 ranks",
        "top1 │ stock │ │ │ │ │ 1644.92 │ │",
        "control │ │ │ │ │ 1651.22 │ 0.998 (spread 3.4%) │ 0.967-1.022 │",
        "ampipe │ 4 │ │ │ 2 │ 1090.64 │ 1.497 │ 1.484-1.528 │ 93.0% │ 191.8 │ 191.7 │ 33.68 │",
        "ampipe │ 4 │ │ │ 4 │ 1096.24 │ 1.493 no difference seen │",
        "ampipe │ 4 │ ranks │ fp8 │ 2 │",
    ):
        assert line in words
    assert "memory" not in words.split("ms:")[0]


@pytest.mark.parametrize("name", ["nodes-50mbit-400mbit", "2dh-50mbit-400mbit", "cpu-small-none"])
def test_results_of_earlier_versions_are_shown(name: str, ampipe: Command) -> None:
    shown = " ".join(ampipe("bench", "--from", MEASURED / f"{name}.json").out.split())
    assert f"link {stored(name)['link']}" in shown
    # Their link names the ranks of a node.
    assert (
        ("4 ranks, 2 per node" in shown)
        is ("┃ between nodes ┃" in shown)
        is name.startswith(("nodes", "2dh"))
    )


# Predictions


def test_rows_are_predicted_with_exchange_and_stack() -> None:
    cluster = read_cluster(find_cluster("docs/measured/results/profile-100mbit.yaml"))

    def predicted(rows: list[dict[str, Any]], *, layers: int = 1, **block: Any) -> list[float]:
        found = stored("cpu-small-200mbit-top1-night-1") | {"layers": layers}
        (case,) = found["cases"]
        case["block"] |= {"sequence_length": 2048, "hidden": 256, "ffn": 1024} | block
        # Of degree 2.
        case["rows"] = [case["rows"][5] | {"ms": 20.0} | row for row in rows]
        prediction.predict(found, cluster)
        times = [row["predicted_ms"] for row in case["rows"]]
        assert case["choice"].items() >= (rows[times.index(min(times))] | {"loss": 0.0}).items()
        assert case["rows"][0]["error"] == pytest.approx(times[0] / 20 - 1, abs=1e-3)
        return [case["predicted_stock_ms"], *times]

    _, rows, ranks = predicted([{"exchange": "rows"}, {"exchange": "ranks"}], ffn=128, experts=32, topk=8)
    assert rows > 2.5 * ranks
    stock, one = predicted([{"stack": 1}])
    four = predicted([{"stack": 1}, {"stack": 2}, {"stack": 4}], layers=4)
    assert four[:2] == pytest.approx([4 * stock, 4 * one], rel=1e-6)
    assert four[1] > four[2] > four[3]


def test_a_cluster_of_other_nodes_is_refused(ampipe: Command) -> None:
    words = ("bench", "--from", MEASURED / "2dh-50mbit-400mbit.json", "--predict")
    ampipe(*words, MEASURED / "profile-50mbit-400mbit.yaml")
    # A node of eight ranks, for a result of two nodes of two.
    said = ampipe(*words, "dgx-h100", code=2).err
    assert "ranks_per_node: 8 is not that of the result: 4 ranks, 2 per node" in said


# Runs that end early


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        (RunFailed("no rank answered for 300 s"), 3, "ampipe: no rank answered for 300 s\n"),
        (KeyboardInterrupt(), 130, "ampipe: interrupted; "),
    ],
)
def test_finished_cases_are_kept_when_a_run_ends_early(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ampipe: Command,
    ends: BaseException,
    code: int,
    said: str,
) -> None:
    (case,) = stored("cpu-small-200mbit-top1-night-1")["cases"]
    of_ranks = reports(case | {"rows": case["rows"][5:6]})

    def run_ranks(_job: object, _work: object, *, on_message: Any) -> None:
        for rank in (1, 0):
            on_message(rank, "case", (0, of_ranks[rank]))
        raise ends

    monkeypatch.setattr(bench_command, "run_ranks", run_ranks)
    text = f"defaults: {json.dumps(FIGURES)}\ncases: [{{name: small}}, {{name: large}}]\n"
    grid, path = read_text(tmp_path, text), tmp_path / "x.json"
    words = ["--degrees", "2", "--schedules", "ampipe", "--json", path]
    output = ampipe("bench", "--grid", grid, *words, code=code)
    assert [case["name"] for case in json.loads(path.read_text())["cases"]] == ["small"]
    assert output.err.startswith(said)
    assert output.err.endswith("in the table, and in the file of --json if there is one.\n")
    assert "small" in output.out and "large" not in output.out


# Trainings


def test_figures_of_a_kept_training_follow_from_its_log() -> None:
    document = stored("layers-training-200mbit")
    (kept,) = document["cases"]
    job = dataclasses.replace(JOB, layers=document["layers"], warmup=document["warmup"])
    all_rows = (kept["stock"], kept["control"], *kept["rows"])
    curves = [[Curve(*map(tuple, each.values())) for each in row["trainings"]] for row in all_rows]
    variants = (STOCK, CONTROL, Variant.of("ampipe", 4, stack=4))
    case = Case(**kept["block"])
    assert changed(training.case_result(case, job, variants, curves), kept) == []


def test_trainings_are_run_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[TrainingJob] = []

    def run(job: TrainingJob, **_: object) -> Curve:
        jobs.append(job)
        return Curve((1.0,) * 3, (2.0,) * 3)

    monkeypatch.setattr(training, "run", run)
    variants = (STOCK, CONTROL, Variant.of("ampipe", 4))
    job = dataclasses.replace(JOB, variants=(variants,), num_ranks=4, ranks_per_node=2)
    (case,) = training.measure(job, rounds=2, on_iteration=lambda: None)
    # Stock, its control and AMPipe; then the same from the control on.
    assert [job.stock_attends_as for job in jobs] == ["fp32", "fp32", None, "fp32", None, "fp32"]
    assert {(job.num_ranks, job.ranks_per_node) for job in jobs} == {(4, 2)}
    assert len(case["rows"][0]["trainings"]) == 2


def test_results_name_the_commit_or_say_that_they_do_not(
    ampipe: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?", machine.commit()) or not (REPOSITORY / ".git").exists()
    monkeypatch.setattr(megatron_ampipe, "__file__", str(tmp_path / "megatron_ampipe/__init__.py"))
    assert machine.versions()["commit"] == machine.UNKNOWN
    monkeypatch.setenv("AMPIPE_COMMIT", "0123456789ab")
    assert machine.versions()["commit"] == "0123456789ab"
    said = {
        name: ampipe("bench", "--from", f"{MEASURED}/{name}.json", "--json", f"{tmp_path}/a.json").out
        for name in ("deepseek-te-h200", "cpu-small-200mbit-clone")
    }
    assert "a.json (emulated link); it names no commit: " in said["deepseek-te-h200"]
    assert "names no commit" not in said["cpu-small-200mbit-clone"]
