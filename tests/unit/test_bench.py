"""``ampipe bench`` without its processes: links, grids, variants, bounds, results, refused input."""

import argparse
import dataclasses
import functools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_ampipe.cli import main
from megatron_ampipe.errors import BadInput, RunFailed
from megatron_ampipe.files.inputs import config_names
from megatron_ampipe.plan.cluster import find_cluster, read_cluster
from megatron_ampipe.schedule import (
    BlockFeatures,
    Direction,
    build,
    needs_of,
)
from megatron_ampipe.tools import bench_command
from megatron_ampipe.tools.measuring import network, prediction, result, training
from megatron_ampipe.tools.measuring.bench_job import BenchJob, Variant
from megatron_ampipe.tools.measuring.grid import Case, find_grid, read_grid
from megatron_ampipe.tools.measuring.network import parse_link
from megatron_ampipe.tools.measuring.training import Curve, TrainingJob

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
    ("text", "is_network", "rate", "latency"),
    [
        ("none", False, None, 0.0),
        ("1.5gbit", True, 1.5e9, 0.0),
        ("25MB/s", True, 200e6, 0.0),
        ("emulated:20GB/s", False, 160e9, 0.0),
        ("emulated:200mbit:50us", False, 200e6, 50e-6),
    ],
)
def test_links_are_read(text: str, is_network: bool, rate: float | None, latency: float) -> None:
    link = parse_link(text)
    assert (link.text, link.is_network, link.rate_bit_per_s) == (text, is_network, rate)
    assert link.latency_s == pytest.approx(latency)
    if link.emulated:
        assert link.transfer_s(1e6) == pytest.approx(latency + 8e6 / (rate or 1))


@pytest.mark.parametrize(
    "text",
    ["", "200", "0mbit", "-1mbit", "nan", "20Gbit", "1kbit", "200mbit:1ms", "emulated:1ms",
     "emulated:1gbit:1us:1us", "inter=50mbit,intra=400mbit"],
)  # fmt: skip
def test_bad_links_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="emulated:RATE"):
        parse_link(text)


def test_a_slow_network_needs_root_and_iproute2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for program, why in ((None, "this is not root"), ("tc", "tc not found")):
        monkeypatch.setattr(
            network.shutil, "which", lambda name, lacks=program: None if name == lacks else name
        )
        assert main(["bench", "--link", "200mbit", "--json", str(tmp_path / "x.json")]) == 1
        error = capsys.readouterr().err
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
        ("--pretend-peers", "--pretend-peers with --link none"),
        ("--from /absent.json", "--from /absent.json: cannot be read"),
        ("--rounds 3", "--rounds 3 is for trainings; add --end-to-end"),
        ("--end-to-end --link emulated:1gbit --pretend-peers", "--pretend-peers: a training needs"),
    ],
)
def test_bad_arguments_end_with_2_before_anything_starts(
    words: str, shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (bench_command, training):
        monkeypatch.setattr(module, "run_ranks", None)
    assert main(["bench", *words.split()]) == 2
    assert shown in capsys.readouterr().err


# Grids


@pytest.mark.parametrize("name", sorted(config_names("bench")))
def test_our_grids_are_sound(name: str) -> None:
    names = {case.name for case in read_grid(find_grid(name))}
    assert names
    if name == "paper":
        assert len(names) == 56 and "base-16k-b1-c1" in names and "xl-32k-b2-c4" not in names


def test_defaults_and_axes(tmp_path: Path) -> None:
    text = f"defaults: {FIGURES | {'capacity': 2}}\n".replace("'", "")
    path = read_text(tmp_path, text + "cases:\n- name: a\n- {name: b, topk: 2, capacity: null}\n")
    assert [(case.name, case.topk, case.capacity) for case in read_grid(path)] == [
        ("a", 1, 2.0),
        ("b", 2, None),
    ]
    path = read_text(tmp_path, text + "axes:\n  - [{name: a}, {name: b}]\n  - [{name: k2, topk: 2}]\n")
    assert [case.name for case in read_grid(path)] == ["a-k2", "b-k2"]


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
    path = read_text(tmp_path, f"defaults: {FIGURES}\n{text}".replace("'", ""))
    with pytest.raises(BadInput) as error:
        read_grid(path)
    assert f"{path}:{line}:" in str(error.value)
    assert rule in str(error.value)


# What is compared


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


def test_the_exchanges_of_a_case_are_those_that_save_something() -> None:
    for case, exchanges in (("top1", ["rows"]), ("top2", ["rows", "ranks"])):
        words = "--degrees 4 --exchange auto"
        assert [each.pipeline.exchange for each in compared(words, case=case)] == exchanges


# The document

VARIANTS = (STOCK, CONTROL, Variant.of("ampipe", 1), Variant.of("ampipe", 2), Variant.of("sequential", 2))
SECONDS = (
    [[0.04, 0.08, 0.04], [0.05, 0.08, 0.04], [0.04, 0.08, 0.04], [0.02] * 3, [0.05] * 3],
    [[0.01, 0.01, 0.06], [0.01, 0.01, 0.05], [0.01, 0.01, 0.06], [0.02, 0.02, 0.03], [0.01] * 3],
)
"""By rank, variant and repeat."""


def needs_by_name(variant: Variant) -> dict[str, dict[str, list[str]]] | None:
    if not variant.pipelined:
        return None
    schedule = build(variant.schedule, degree=variant.pipeline.degree, features=BlockFeatures())
    graphs = {way: needs_of(schedule, [BlockFeatures()], way) for way in Direction}
    return {
        way.value: {str(stage): list(map(str, earlier)) for stage, earlier in graph.items()}
        for way, graph in graphs.items()
    }


def report(seconds: Any, variants: Sequence[Variant]) -> dict[str, Any]:
    found = []
    for place, (variant, (one, two, three)) in enumerate(zip(variants, seconds, strict=True)):
        needs = needs_by_name(variant)
        stages = needs and {way: {name: [1e3, 1e3, 9e3] for name in of_way} for way, of_way in needs.items()}
        found.append(
            {
                "wall_s": [one, two, three],
                "backward_s": [one / 2, two / 4, three / 2],
                "wire_bytes": [1_020_000, 1_010_000, 1_050_000],
                "stages": stages,
                "needs": needs,
                "difference": 0.0,
                "peak_bytes": 2**20 * (1 + place),
            }
        )
    return {"kernel": "sdpa", "fused_gradients": True, "variants": found}


def document() -> dict[str, Any]:
    job = dataclasses.replace(JOB, link=parse_link("emulated:1gbit"), variants=(VARIANTS,))
    case = result.case_result(job, 0, [report(seconds, VARIANTS) for seconds in SECONDS])
    head = {"format": result.FORMAT, "grid": "tiny", "link": "emulated:1gbit", "emulated": True, "ranks": 2}
    return {**head, "layers": 1, "cases": [case]}


def test_a_case_holds_what_scripts_read() -> None:
    case = document()["cases"][0]
    assert (case["name"], case["link"], case["stock_ms"]) == ("one", "emulated:1gbit", 60.0)
    assert case["stock_samples_ms"] == [40.0, 80.0, 60.0]
    again, ampipe, sequential = case["rows"]
    assert (again["degree"], again["speedup"], again["bound_share"]) == (1, 1.0, None)
    # Ratios 0.8, 1 and 1.2: the 10th percentile is further from 1, as a factor, than the 90th.
    control = case["control"]
    assert (control["speedup"], control["speedup_p10"], control["speedup_p90"]) == (1.0, 0.84, 1.16)
    assert control["spread"] == 0.1905
    assert [row["difference_seen"] for row in case["rows"]] == [False, True, True]
    # Ratios 2, 4 and 2 within the repeats; the quotient of medians would be 3.
    assert (ampipe["ms"], ampipe["speedup"], ampipe["samples_ms"]) == (20.0, 2.0, [20.0, 20.0, 30.0])
    assert (ampipe["speedup_p10"], ampipe["speedup_p90"]) == (2.0, 3.6)
    assert (case["stock_backward_ms"], ampipe["backward_ms"]) == (20.0, 10.0)
    # Medians of 1 ms a stage: forward 3 + 6 collectives + 1 against 9 of computing, backward 1 + 4 + 3.
    assert (ampipe["bound_ms"], ampipe["bound_share"]) == (10.0 + 9.0, 0.95)
    assert (case["stock_peak_bytes"], again["peak_bytes"]) == (2**20, 3 * 2**20)
    # Of both ranks together, the median of the repeats.
    assert ampipe["wire_bytes"] == 2_040_000
    assert sequential["samples_ms_by_rank"] == [[50.0, 50.0, 50.0], [10.0, 10.0, 10.0]]


def shown(found: dict[str, Any], path: Path) -> str:
    """The printed words of a document that was read back."""
    result.write(found, path)
    console = Console(width=220, record=True)
    result.show(result.read(path), console)
    return " ".join(console.export_text().split())


def test_the_table(tmp_path: Path) -> None:
    path, found = tmp_path / "x.json", document()
    words = shown(found, path)
    assert list(tmp_path.iterdir()) == [path]
    for line in (
        "grid tiny · link emulated:1gbit (emulated) · 2 ranks",
        "one │ stock │ │ 60.00 │ │",
        "control │ │ 50.00 │ 1.000 (spread 19.1%) │ 0.840-1.160",
        "ampipe │ 1 │ 60.00 │ 1.000 no difference seen │",
        "ampipe │ 2 │ 20.00 │ 2.000 │ 2.000-3.600 │ 95.0% │ 4.0 │ 2.04 │",
    ):
        assert line in words
    assert not {"stack", "exchange"} & {*words.split("ms:")[0].split()}
    (case,) = found["cases"]
    found["layers"] = 4
    case["rows"][2]["stack"] = 4
    case["rows"] += [case["rows"][2] | {"stack": 1}, case["rows"][1] | {"exchange": "ranks", "wire": "fp8"}]
    words = shown(found, path)
    assert "4 layers" in words
    assert "ampipe │ │ ranks │ fp8 │ 2 │" in words


@pytest.mark.parametrize("name", ["nodes-50mbit-400mbit", "2dh-50mbit-400mbit", "cpu-small-none"])
def test_results_of_earlier_versions_are_shown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[2] / "docs" / "measured" / f"{name}.json"
    assert main(["bench", "--from", str(path)]) == 0
    assert f"link {json.loads(path.read_text())['link']}" in " ".join(capsys.readouterr().out.split())


# Predictions


def test_rows_are_predicted_with_exchange_and_stack() -> None:
    cluster = read_cluster(find_cluster("docs/measured/profile-100mbit.yaml"))

    def predicted(rows: list[dict[str, Any]], *, layers: int = 1, **block: Any) -> list[float]:
        found = document() | {"layers": layers}
        (case,) = found["cases"]
        case["block"] |= {"sequence_length": 2048, "hidden": 256, "ffn": 1024} | block
        case["rows"] = [case["rows"][1] | row for row in rows]
        prediction.predict(found, cluster)
        times = [row["predicted_ms"] for row in case["rows"]]
        # All rows took 20 ms.
        assert case["choice"].items() >= (rows[times.index(min(times))] | {"loss": 0.0}).items()
        assert case["rows"][0]["error"] == pytest.approx(times[0] / 20 - 1, abs=1e-3)
        return [case["predicted_stock_ms"], *times]

    _, rows, ranks = predicted([{"exchange": "rows"}, {"exchange": "ranks"}], ffn=128, experts=32, topk=8)
    assert rows > 2.5 * ranks
    stock, one = predicted([{"stack": 1}])
    four = predicted([{"stack": 1}, {"stack": 2}, {"stack": 4}], layers=4)
    assert four[:2] == pytest.approx([4 * stock, 4 * one], rel=1e-6)
    assert four[1] > four[2] > four[3]


# Runs that end early


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (lambda: RunFailed("no rank answered for 300 s"), 3, "ampipe: no rank answered for 300 s\n"),
        (KeyboardInterrupt, 130, "ampipe: interrupted; "),
    ],
)
def test_finished_cases_are_kept_when_a_run_ends_early(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Callable[[], BaseException],
    code: int,
    said: str,
) -> None:
    def run_ranks(job: Any, _: object, *, on_message: Any) -> None:
        variants = job.variants[0]
        for rank in (1, 0):
            on_message(rank, "case", (0, report([[0.02] * 3] * len(variants), variants)))
        raise error()

    monkeypatch.setattr(bench_command, "run_ranks", run_ranks)
    text = f"defaults: {FIGURES}\ncases: [{{name: small}}, {{name: large}}]\n".replace("'", "")
    grid, path = read_text(tmp_path, text), tmp_path / "x.json"
    words = ["--degrees", "2", "--schedules", "ampipe", "--json", str(path)]
    assert main(["bench", "--grid", str(grid), *words]) == code
    assert [case["name"] for case in json.loads(path.read_text())["cases"]] == ["small"]
    output = capsys.readouterr()
    assert output.err.startswith(said)
    assert output.err.endswith("in the table, and in the file of --json if there is one.\n")
    assert "small" in output.out and "large" not in output.out


# Trainings


def curve(*ms: float, loss: float = 2.0) -> Curve:
    return Curve(ms, tuple(loss / (i + 1) for i in range(len(ms))))


def test_figures_of_trainings() -> None:
    variants = (STOCK, CONTROL, Variant.of("ampipe", 4, stack=3))
    job = dataclasses.replace(JOB, layers=3, variants=(variants,))
    # The first iteration of each training run does not count.
    curves = [
        [curve(900, 40, 40), curve(900, 80, 80)],
        [curve(900, 40, 50), curve(900, 80, 80)],
        [curve(900, 20, 20), curve(900, 20, 40)],
    ]
    case = training.case_result(CASE, job, variants, curves)
    assert (case["stock"]["ms"], case["stock"]["iterations_per_s"]) == (60.0, 16.6667)
    # Ratios 1, 0.8, 1 and 1: the 10th percentile is 0.86.
    assert (case["control"]["speedup"], case["control"]["spread"]) == (1.0, 0.1628)
    (row,) = case["rows"]
    assert (row["schedule"], row["stack"], row["ms"], row["iterations_per_s"]) == ("ampipe", 3, 20.0, 50.0)
    # Ratios of the same iteration in the same round: 2, 2, 4, 2. The quotient of medians would be 3.
    assert (row["speedup"], row["loss_difference"], row["difference_seen"]) == (2.0, 0.0, True)
    assert row["trainings"][1] == {"ms": (900, 20, 40), "lm_loss": (2.0, 1.0, 2.0 / 3)}


def test_trainings_are_run_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[TrainingJob] = []

    def run(job: TrainingJob, **_: object) -> Curve:
        jobs.append(job)
        return curve(1, 1, 1)

    monkeypatch.setattr(training, "run", run)
    variants = (STOCK, CONTROL, Variant.of("ampipe", 4))
    job = dataclasses.replace(JOB, variants=(variants,))
    (case,) = training.measure(job, rounds=2, on_iteration=lambda: None)
    # Stock, its control and AMPipe; then the same from the control on.
    assert [job.stock_attends_as for job in jobs] == ["fp32", "fp32", None, "fp32", None, "fp32"]
    assert len(case["rows"][0]["trainings"]) == 2
