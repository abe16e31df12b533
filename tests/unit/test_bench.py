"""``ampipe bench`` without its processes: links, grids, bounds, results, documents, refused input."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_ampipe.cli import main
from megatron_ampipe.errors import BadInput, RunFailed
from megatron_ampipe.files.shipped import config_names
from megatron_ampipe.plan.cluster import find_cluster, read_cluster
from megatron_ampipe.plan.simulate import DirectionBound, direction_bound
from megatron_ampipe.schedule import (
    MOE_BLOCK,
    BlockFeatures,
    Direction,
    Exchange,
    Pipeline,
    Stage,
    StageKind,
    build,
    dependencies,
    from_text,
    kinds,
    parse_exchanges,
)
from megatron_ampipe.tools.benchmark import plot, prediction, result, result_file, training
from megatron_ampipe.tools.benchmark.argument_values import check_gloo, stacks, wires
from megatron_ampipe.tools.benchmark.arguments import add_arguments
from megatron_ampipe.tools.benchmark.bench_job import BenchJob
from megatron_ampipe.tools.benchmark.table import show
from megatron_ampipe.tools.measuring import network, rank_processes
from megatron_ampipe.tools.measuring.grid import Case, find_grid, read_grid
from megatron_ampipe.tools.measuring.link import (
    Link,
    LinkKind,
    Nodes,
    parse_link,
    require_one_class,
    with_nodes,
)
from megatron_ampipe.tools.measuring.link_arguments import link_of, num_ranks
from megatron_ampipe.tools.measuring.variant import Cut, Variant

CASE = Case(
    name="one",
    sequence_length=64,
    batch=1,
    hidden=32,
    heads=4,
    experts=4,
    topk=1,
    ffn=64,
    activation="gelu",
    dtype="fp32",
)
FIGURES = (
    "sequence_length: 64, batch: 1, hidden: 32, heads: 4, experts: 4, topk: 1, ffn: 64, "
    "activation: gelu, dtype: fp32"
)


@pytest.mark.parametrize(
    ("text", "kind", "rate", "latency"),
    [
        ("none", LinkKind.NONE, None, 0.0),
        ("200mbit", LinkKind.NETWORK, 200e6, 0.0),
        ("1.5gbit", LinkKind.NETWORK, 1.5e9, 0.0),
        ("25MB/s", LinkKind.NETWORK, 200e6, 0.0),
        ("emulated:20GB/s", LinkKind.EMULATED, 160e9, 0.0),
        ("emulated:200mbit:50us", LinkKind.EMULATED, 200e6, 50e-6),
    ],
)
def test_links_are_read(text: str, kind: LinkKind, rate: float | None, latency: float) -> None:
    link = parse_link(text)
    assert (link.kind, link.rate_bit_per_s, link.latency_s) == (kind, rate, pytest.approx(latency))
    assert link.text == text
    assert link.emulated is (kind is LinkKind.EMULATED)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "200",
            "mbit",
            "0mbit",
            "-1mbit",
            "nan",
            "infgbit",
            "1mb",
            "20gbps",
            "20Gbit",
            "1kbit",
            "1tbit",
        ),
        *("200mbit:1ms", "200mbit; reboot", "emulated", "emulated:", "emulated:1ms", "emulated:1gbit:5"),
        *("emulated:1gbit:1us:1us", "emulated:1gbit:2s", "emulated:none", "None", "1e3mbit"),
    ],
)
def test_bad_links_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match="emulated:RATE"):
        parse_link(text)


def test_transfer_time_is_latency_and_bytes_by_rate() -> None:
    assert parse_link("emulated:8mbit:2ms").transfer_s(1_000_000) == pytest.approx(1.002)


def test_an_emulated_link_stays_when_the_host_platform_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    from megatron_ampipe.launch.host import all_to_all
    from megatron_ampipe.tools.measuring import emulation

    torchs = dist.all_to_all_single
    monkeypatch.setattr(dist, "all_to_all_single", torchs)
    monkeypatch.setattr(all_to_all, "_gloo", None)
    emulation.install(parse_link("emulated:8mbit"), on_cuda=False, pretended=False)
    slowed = dist.all_to_all_single
    all_to_all.install()
    assert dist.all_to_all_single is slowed
    # What it slows is the host platform's, for both layers.
    assert inspect.getclosurevars(slowed).nonlocals["exchange"] is all_to_all._all_to_all_single
    assert all_to_all._gloo is torchs


def test_bursts_are_small_against_a_chunk_and_hold_a_segment() -> None:
    assert network.burst_bytes(100e6) == 32 * 1024 > network._SEGMENT_BYTES
    assert network.burst_bytes(10e9) == 312_500


def test_a_slow_network_needs_root(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(network.shutil, "which", lambda program: program)
    assert main(["bench", "--link", "200mbit", "--json", str(tmp_path / "x.json")]) == 1
    assert "needs root" in (error := capsys.readouterr().err)
    assert "--link emulated:RATE" in error
    assert not list(tmp_path.iterdir())


def test_a_slow_network_needs_iproute2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(network.shutil, "which", lambda program: None if program == "tc" else program)
    assert main(["bench", "--link", "200mbit"]) == 1
    assert "needs tc. Install iproute2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--link", "fast"], "--link fast"),
        (["--degrees", "0"], "--degrees 0"),
        (["--degrees", "1,,2"], "--degrees 1,,2"),
        (["--degrees", "4:2:1"], "--degrees 4:2:1"),
        (["--degrees", "4:3"], "--degrees 4:3"),
        (["--chunks", "0.5,x"], "--chunks 0.5,x"),
        (["--chunks", "0.5,0.6"], "--chunks 0.5,0.6"),
        (["--chunks", "0.99999,0.00001"], "--chunks 0.99999,1e-05"),
        (["--degrees", "4096"], "--degrees 4096"),
        (["--schedules", "best"], "--schedules best"),
        (["--ranks", "3"], "--ranks 3"),
        (["--grid", "absent"], "cpu-small"),
        (["--grid", "../bench/paper"], "--grid ../bench/paper"),
        (["--json", "/absent/x.json"], "--json /absent/x.json"),
        (["--json", "/tmp"], "--json /tmp"),
        (["--plot", "/absent/x"], "--plot /absent/x"),
        (["--pretend-peers"], "--pretend-peers"),
        (["--repeats", "0"], "--repeats"),
        (["--layers", "0"], "--layers"),
        (["--memory", "keep,forget"], "--memory forget: is not one of keep, rebuild, redispatch"),
        (
            ["--degrees", "1,4", "--memory", "keep,keep/rebuild"],
            "--memory keep/rebuild: names strategies of 2 chunks, and the backward pass has 4",
        ),
        (["--stack", "3"], "--stack 3: is above the number of layers (1)"),
        (["--layers", "4", "--stack", "1,5"], "--stack 5: is above the number of layers (4)"),
        (
            ["--layers", "4", "--stack", "0"],
            "--stack 0: must be a whole number of layers, at least 1, or all",
        ),
        (["--layers", "4", "--stack", "1,x"], "--stack x: must be a whole number of layers"),
        (["--layers", "4", "--stack", "1,"], "--stack (empty): must be a whole number of layers"),
        (["--from", "/absent.json"], "--from /absent.json"),
        (["--gloo-all-to-all", "--link", "emulated:1gbit"], "--gloo-all-to-all"),
        (["--gloo-all-to-all", "--from", "x"], "--gloo-all-to-all: is for what will be measured"),
    ],
)
def test_bad_arguments_end_with_2_before_anything_starts(
    words: list[str], shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("started")

    monkeypatch.setattr("megatron_ampipe.tools.measuring.rank_processes.measure", start)
    assert main(["bench", *words]) == 2
    assert shown in capsys.readouterr().err


# Grids


def grid_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "grid.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", sorted(config_names("bench")))
def test_our_grids_are_sound(name: str) -> None:
    assert read_grid(find_grid(name)).cases


def test_the_small_grid_is_the_one_that_the_readme_measures() -> None:
    cases = read_grid(find_grid("cpu-small")).only("top1,top2").cases
    assert [(case.sequence_length, case.hidden, case.experts, case.topk) for case in cases] == [
        (2048, 256, 4, 1),
        (2048, 256, 4, 2),
    ]


def test_the_papers_grid_has_56_of_72_cases() -> None:
    cases = read_grid(find_grid("paper")).cases
    assert len(cases) == 56
    assert {case.hidden for case in cases} == {768, 1024, 1280, 1600}
    # A case that fits with more tokens or experts also fits with fewer.
    names = {case.name for case in cases}
    assert "base-16k-b1-c1" in names
    assert "xl-32k-b2-c4" not in names


def test_a_case_takes_defaults_for_what_it_does_not_give(tmp_path: Path) -> None:
    text = (
        f"defaults: {{{FIGURES}, capacity: 2}}\ncases:\n- name: a\n- {{name: b, topk: 2, capacity: null}}\n"
    )
    cases = read_grid(grid_file(tmp_path, text)).cases
    assert [(case.name, case.topk, case.capacity) for case in cases] == [("a", 1, 2.0), ("b", 2, None)]


def test_axes_are_combined(tmp_path: Path) -> None:
    text = f"defaults: {{{FIGURES}}}\naxes:\n  - [{{name: a}}, {{name: b}}]\n  - [{{name: k2, topk: 2}}]\n"
    assert [case.name for case in read_grid(grid_file(tmp_path, text)).cases] == ["a-k2", "b-k2"]


@pytest.mark.parametrize(
    ("text", "line", "rule"),
    [
        (f"cases:\n  - {{name: a, {FIGURES}, speed: 3}}\n", 2, "speed: is not a known key. Use one of"),
        (f"cases:\n  - {{name: a, {FIGURES.replace('topk: 1, ', '')}}}\n", 2, "topk: is missing"),
        (f"cases:\n  - {{{FIGURES}}}\n", 2, "name: is missing"),
        (
            f"defaults: {{{FIGURES}}}\ncases:\n  - name: a\n    topk: two\n",
            4,
            "topk 'two': must be a whole number",
        ),
        (
            f"defaults: {{{FIGURES}}}\ncases:\n  - name: a\n    topk: true\n",
            4,
            "topk True: must be a whole number",
        ),
        (
            f"defaults: {{{FIGURES}}}\ncases:\n  - name: a\n    batch: 0\n",
            4,
            "batch 0: must be a whole number",
        ),
        (
            f"defaults: {{{FIGURES}}}\ncases:\n  - name: a\n    topk: 1.5\n",
            4,
            "topk 1.5: must be a whole number",
        ),
        (f"defaults: {{{FIGURES}}}\ncases:\n  - name: a\n    capacity: .nan\n", 4, "capacity nan: must be"),
        (f"defaults: {{{FIGURES}}}\ncases:\n- name: a\n  capacity: 0\n", 4, "capacity 0: must be above 0"),
        (f"defaults: {{{FIGURES}}}\ncases:\n- name: a\n  topk:\n", 4, "topk None: must be a whole number"),
        (
            f"defaults: {{{FIGURES}}}\ncases:\n  - name: a\n    dtype: fp8\n",
            4,
            "dtype 'fp8': must be one of fp32",
        ),
        (f"defaults: {{{FIGURES}}}\ncases:\n  - name: a\n    heads: 5\n", 4, "does not divide hidden 32"),
        (f"defaults: {{{FIGURES}}}\ncases:\n  - name: a\n    topk: 8\n", 4, "is above experts 4"),
        (
            f"defaults: {{{FIGURES}}}\ncases:\n  - name: a\n    query_groups: 3\n",
            4,
            "does not divide heads 4",
        ),
        (f"defaults: {{{FIGURES}}}\ncases: [{{name: a}}, {{name: a}}]\n", 1, "two cases have it"),
        (f"defaults: {{{FIGURES}}}\ncases: [{{name: a}}]\nexpected_cases: 2\n", 3, "1 cases are left"),
        ("cases: []\n", 1, "must be a list that is not empty"),
        ("cases: 3\n", 1, "must be a list"),
        ("cases: [3]\n", 1, "cases[0]: must hold keys with values"),
        ("axes: [[]]\n", 1, "must be a list that is not empty"),
        ("axes: 3\n", 1, "must be a list"),
        ("defaults: 3\ncases: [{name: a}]\n", 1, "must hold keys with values"),
        ("cases: [{name: a}]\naxes: [[{name: a}]]\n", 1, "exactly one of cases and axes"),
        ("case: [{name: a}]\n", 1, "case: is not a known key. Did you mean cases?"),
        ("cases:\n  - name: a\n    name: b\n", 3, "'name' comes twice"),
        ("cases:\n  - 3: a\n", 2, "the key 3 is not text"),
        ("cases: [\n", 2, "YAML"),
        ("- 3\n", 1, "does not hold keys"),
        ("", 1, "does not hold keys"),
        ("cases: !!python/object/apply:os.system ['true']\n", 1, "could not determine a constructor"),
    ],
)
def test_bad_grids_are_refused_by_file_and_line(tmp_path: Path, text: str, line: int, rule: str) -> None:
    path = grid_file(tmp_path, text)
    with pytest.raises(BadInput) as error:
        read_grid(path)
    assert f"{path}:{line}:" in str(error.value)
    assert rule in str(error.value)


def test_a_grid_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="cannot be read as YAML"):
        read_grid(path)


JOB = BenchJob(
    cases=(CASE,),
    schedules=("ampipe",),
    cuts=(Cut.of(4),),
    link="none",
    num_ranks=2,
    pretended=False,
    device="cpu",
    repeats=1,
    warmup=0,
    seed=1,
    timeout_s=9.0,
    rendezvous="",
    cores=(),
)


def test_a_job_survives_the_way_to_the_ranks() -> None:
    job = BenchJob(
        cases=(CASE,),
        schedules=("ampipe", "moe-only"),
        cuts=(Cut.of(1), Cut.of(4), Cut.of(4, 2), Cut.of(2, shares=(0.75, 0.25))),
        link="200mbit",
        num_ranks=2,
        pretended=False,
        device="cpu",
        repeats=3,
        warmup=1,
        seed=1,
        timeout_s=9.0,
        rendezvous="/tmp/x",
        cores=(0, 1),
        planned=((Variant("planned", Cut.of(2, shares=(0.75, 0.25)), "schedule searched degree 2\n"),),),
        layers=4,
        stacks=(1,),
    )
    assert BenchJob.from_json(job.to_json()) == job
    assert [str(variant) for variant in job.variants_of(0)] == [
        "stock",
        "control",
        "ampipe degree 1",
        "ampipe degree 4",
        "ampipe degree 4:2",
        "ampipe chunks 0.75,0.25",
        "moe-only degree 1",
        "moe-only degree 4",
        "moe-only degree 4:2",
        "moe-only chunks 0.75,0.25",
        "planned chunks 0.75,0.25",
    ]


def test_in_one_chunk_only_a_schedule_that_overlaps_there_is_a_pipeline() -> None:
    assert not Variant("ampipe", Cut.of(1)).pipelined
    assert Variant("lancet", Cut.of(1)).pipelined
    assert Variant("lancet", Cut.of(1)).pipeline == Pipeline.of(1, schedule="lancet")
    assert not Variant("planned", Cut.of(1)).pipelined


def test_every_cut_is_measured_with_every_stack() -> None:
    assert stacks(None, layers=4) == stacks("1,all,4", layers=4) == (1, 4)
    assert stacks(None, layers=1) == stacks("all", layers=1) == (1,)
    assert stacks("3", layers=4) == (3,)
    job = BenchJob(
        cases=(CASE,),
        schedules=("ampipe",),
        cuts=(Cut.of(1), Cut.of(4)),
        link="none",
        num_ranks=2,
        pretended=False,
        device="cpu",
        repeats=1,
        warmup=0,
        seed=1,
        timeout_s=9.0,
        rendezvous="",
        cores=(),
        layers=4,
        stacks=(1, 2, 4),
    )
    restoring = dataclasses.replace(job, stacks=(4,), memories=("keep", "rebuild"))
    assert [str(variant) for variant in restoring.variants_of(0)[2:]] == [
        "ampipe degree 1",
        "ampipe degree 4, stack 4",
        "ampipe degree 4, stack 4, memory rebuild",
    ]
    assert BenchJob.from_json(restoring.to_json()) == restoring
    assert [variant.pipeline.memory for variant in restoring.variants_of(0)] == ["keep"] * 4 + ["rebuild"]
    # Strategies of single chunks are for one degree.
    mixed = dataclasses.replace(restoring, cuts=(*job.cuts, Cut.of(2)), memories=("rebuild/keep",))
    assert [str(variant) for variant in mixed.variants_of(0)[2:]] == [
        "ampipe degree 1",
        "ampipe degree 2, stack 4, memory rebuild/keep",
    ]
    # Layers of one chunk are Megatron's: nothing is shared.
    assert [str(variant) for variant in job.variants_of(0)] == [
        *(
            "stock",
            "control",
            "ampipe degree 1",
            "ampipe degree 4",
            "ampipe degree 4, stack 2",
            "ampipe degree 4, stack 4",
        )
    ]
    assert [variant.pipeline.stack for variant in job.variants_of(0)[3:]] == [1, 2, 4]


# The bound


def times_of(needs: dict[Stage, tuple[Stage, ...]], durations: dict[StageKind, float]) -> dict[Stage, float]:
    return {stage: durations[stage.kind] for stage in needs}


ONE_EACH = {kind: 1.0 for kind in MOE_BLOCK}


def test_forward_bound_counts_head_and_tail() -> None:
    needs = dependencies([BlockFeatures()], degree=4, whole_attention=False, direction=Direction.FORWARD)
    bound = direction_bound(times_of(needs, ONE_EACH | {kinds.COUNTS: 0.0, kinds.DISPATCH: 10.0}), needs)
    # qkv and four each of attention, route, expert, merge; four dispatches and combines.
    assert bound == DirectionBound(
        compute=17.0,
        # The first expert waits for qkv, attention, route and its tokens: 13, then experts and merges.
        compute_with_waits=21.0,
        communication=44.0,
        head=3.0,
        tail=1.0,
        chain=16.0,
    )
    assert bound.time == 48.0


def test_backward_bound_has_head_and_tail_the_other_way_round() -> None:
    needs = dependencies([BlockFeatures()], degree=4, whole_attention=False, direction=Direction.BACKWARD)
    bound = direction_bound(times_of(needs, ONE_EACH), needs)
    assert (bound.head, bound.tail) == (1.0, 3.0)
    assert bound.time == bound.compute_with_waits == bound.compute == 17.0


def test_the_compute_lane_waits_for_the_first_collective() -> None:
    """In backward, only merges can run before the first combine has arrived."""
    needs = dependencies([BlockFeatures()], degree=4, whole_attention=False, direction=Direction.BACKWARD)
    bound = direction_bound(times_of(needs, ONE_EACH | {kinds.COMBINE: 9.0}), needs)
    # A merge and its combine, then four each of expert, route, attention, and qkv.
    assert bound.compute_with_waits == 10.0 + 13.0


def test_something_follows_the_last_collective() -> None:
    """In forward, combine and merge of every chunk come after its expert."""
    needs = dependencies([BlockFeatures()], degree=4, whole_attention=False, direction=Direction.FORWARD)
    bound = direction_bound(times_of(needs, ONE_EACH | {kinds.COMBINE: 9.0}), needs)
    # qkv, four each of attention, route and expert, then a combine and its merge.
    assert bound.compute_with_waits == 13.0 + 10.0


def test_whole_attention_is_all_head() -> None:
    needs = dependencies([BlockFeatures()], degree=4, whole_attention=True, direction=Direction.FORWARD)
    bound = direction_bound(times_of(needs, ONE_EACH | {kinds.ATTENTION: 8.0, kinds.DISPATCH: 20.0}), needs)
    assert bound.head == 1.0 + 8.0 + 1.0
    assert bound.time == bound.head + bound.communication + bound.tail


def test_the_head_is_that_of_the_cheapest_chunk() -> None:
    needs = dependencies([BlockFeatures()], degree=2, whole_attention=False, direction=Direction.FORWARD)
    times = times_of(needs, ONE_EACH)
    times[Stage(kinds.ATTENTION, 0)], times[Stage(kinds.ATTENTION, 1)] = 5.0, 3.0
    assert direction_bound(times, needs).head == 1.0 + 3.0 + 1.0


def test_capacity_makes_earlier_chunks_part_of_a_later_head() -> None:
    features = BlockFeatures(ordered_routing=True)
    needs = dependencies([features], degree=2, whole_attention=False, direction=Direction.FORWARD)
    times = times_of(needs, ONE_EACH)
    times[Stage(kinds.ATTENTION, 0)] = 5.0
    assert direction_bound(times, needs).head == 1.0 + 5.0 + 1.0


def test_layers_that_share_a_schedule_lose_the_edges_once() -> None:
    features = BlockFeatures(chunked_qkv=True)
    times = ONE_EACH | {kinds.COUNTS: 0.0, kinds.DISPATCH: 10.0}

    def bound(layers: int) -> DirectionBound:
        needs = dependencies(
            [features] * layers, degree=4, whole_attention=False, direction=Direction.FORWARD
        )
        return direction_bound(times_of(needs, times), needs)

    one, three = bound(1), bound(3)
    # Of one block qkv, attention and route of a chunk come first, and its merge last.
    assert (one.head, one.communication, one.tail, one.time) == (3.0, 44.0, 1.0, 48.0)
    assert (three.head, three.communication, three.tail) == (3.0, 132.0, 1.0)
    # Each layer waits for the last one, chunk by chunk.
    assert three.chain == 3 * one.chain
    assert three.time == 3 * one.time - 2 * (one.head + one.tail)


def test_bounds_of_layers_are_those_of_their_stacks() -> None:
    needs, stages = {}, {}
    for direction in Direction:
        found = dependencies([BlockFeatures()] * 2, degree=2, whole_attention=False, direction=direction)
        needs[direction.value] = {str(stage): list(map(str, earlier)) for stage, earlier in found.items()}
        stages[direction.value] = {str(stage): [1000.0] for stage in found}
    together = result.bounds(stages, needs, stack=2)
    assert {len(of_stacks) for of_stacks in together.values()} == {1}
    for graph_of in needs.values():
        for name, earlier in graph_of.items():
            of_layer = name.endswith("@1")
            graph_of[name] = [needed for needed in earlier if needed.endswith("@1") is of_layer]
    first, second = result.bounds(stages, needs, stack=1)["forward"]
    assert first == second
    assert (first.compute, first.communication) == (9.0, 6.0)
    assert together["forward"][0].compute == 18.0


@pytest.mark.parametrize("name", ["ampipe", "moe-only", "sequential"])
@pytest.mark.parametrize("communication", [0.0, 0.5, 2.0, 9.0])
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("layers", [1, 3])
def test_no_schedule_beats_the_bound(
    name: str, communication: float, direction: Direction, layers: int
) -> None:
    """The lanes run like executors: in order, each stage when its lane and its dependencies are ready."""
    features = [BlockFeatures(shared=True, chunked_qkv=True)] * layers
    schedule = Pipeline.of(3, schedule=name, stack=0).schedule_of(features)
    needs = dependencies(features, degree=3, whole_attention=schedule.whole_attention, direction=direction)
    times = {
        stage: communication if stage.is_communication else 1.0 + 0.1 * (stage.chunk or 0) for stage in needs
    }
    ended: dict[Stage, float] = {}
    lanes = {order.lane: list(order.stages) for order in schedule.program(direction).lanes}
    free = dict.fromkeys(lanes, 0.0)
    while any(lanes.values()):
        for lane, stages in lanes.items():
            while stages and all(needed in ended for needed in needs[stages[0]]):
                stage = stages.pop(0)
                begin = max([free[lane], *(ended[needed] for needed in needs[stage])])
                free[lane] = ended[stage] = begin + times[stage]
    assert direction_bound(times, needs).time <= max(ended.values()) + 1e-9


def test_what_a_killed_run_put_aside_goes_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_processes.tempfile, "gettempdir", lambda: str(tmp_path))
    for name in ("ampipe-bench-999999999-x", f"ampipe-bench-{os.getpid()}-x", "ampipe-bench-notes", "other"):
        (tmp_path / name).mkdir()
    rank_processes._remove_stale_folders()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"ampipe-bench-{os.getpid()}-x",
        "ampipe-bench-notes",
        "other",
    ]


# Figures and the document


def test_percentiles_are_linear_between_values() -> None:
    assert result.percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert result.percentile([1.0, 2.0], 0.9) == pytest.approx(1.9)
    assert result.percentile([7.0], 0.1) == 7.0


def graph(variant: Variant) -> dict[str, dict[str, list[str]]] | None:
    if not variant.pipelined:
        return None
    whole = build(variant.schedule, degree=variant.cut.degree, features=BlockFeatures()).whole_attention
    return {
        direction.value: {
            str(stage): list(map(str, needed))
            for stage, needed in dependencies(
                [BlockFeatures()], degree=variant.cut.degree, whole_attention=whole, direction=direction
            ).items()
        }
        for direction in Direction
    }


def report(seconds: list[list[float]], variants: list[Variant]) -> dict[str, Any]:
    needs = [graph(variant) for variant in variants]
    stages = [
        found
        and {direction: {name: [1000.0, 1000.0, 9000.0] for name in of} for direction, of in found.items()}
        for found in needs
    ]
    difference = [0.0] * len(variants)
    return {
        "samples_s": seconds,
        "backward_s": [[one / 2, two / 4, three / 2] for one, two, three in seconds],
        # In the second repeat half of the time is idle.
        "processor_s": [[one, two / 2, three] for one, two, three in seconds],
        "stages": stages,
        "needs": needs,
        "starved": [None if found is None else {} for found in needs],
        "difference": difference,
        "peak_bytes": [1_048_576 * (1 + place) for place in range(len(variants))],
        "wire_bytes": [[{"inter": sent} for sent in (1_020_000, 1_010_000, 1_050_000)]] * len(variants),
        "expected_wire_bytes": [{"inter": 1_000_000}] * len(variants),
        "kernel": "sdpa",
        "attention": "sdpa (torch chooses)",
        "fused_gradients": True,
        "clock": "host",
    }


VARIANTS = [
    Variant("stock", Cut.of(1)),
    Variant("control", Cut.of(1)),
    Variant("ampipe", Cut.of(1)),
    Variant("ampipe", Cut.of(2)),
    Variant("sequential", Cut.of(2)),
]


def document() -> dict[str, Any]:
    reports = [
        report(
            [
                [0.04, 0.08, 0.04],
                [0.05, 0.08, 0.04],
                [0.04, 0.08, 0.04],
                [0.02, 0.02, 0.02],
                [0.05, 0.05, 0.05],
            ],
            VARIANTS,
        ),
        report(
            [
                [0.01, 0.01, 0.06],
                [0.01, 0.01, 0.05],
                [0.01, 0.01, 0.06],
                [0.02, 0.02, 0.03],
                [0.01, 0.01, 0.01],
            ],
            VARIANTS,
        ),
    ]
    case = result.case_result(CASE, VARIANTS, reports, link=parse_link("emulated:1gbit"), layers=1)
    return {
        "format": result_file.FORMAT,
        "command": "ampipe bench",
        "grid": "tiny",
        "link": "emulated:1gbit",
        "emulated": True,
        "ranks": 2,
        "cases": [case],
    }


def test_a_case_holds_what_scripts_read() -> None:
    case = document()["cases"][0]
    assert (case["name"], case["link"], case["stock_ms"]) == ("one", "emulated:1gbit", 60.0)
    assert case["stock_samples_ms"] == [40.0, 80.0, 60.0]
    again, ampipe, sequential = case["rows"]
    assert {"schedule", "degree", "ms", "speedup", "bound_share"} <= ampipe.keys()
    assert (case["layers"], ampipe["layers"], ampipe["stack"]) == (1, 1, 1)
    assert (again["degree"], again["speedup"], again["bound_share"]) == (1, 1.0, None)
    # Ratios 0.8, 1 and 1.2: the 10th percentile is further from 1, as a factor, than the 90th.
    control = case["control"]
    assert (control["speedup"], control["speedup_p10"], control["speedup_p90"]) == (1.0, 0.84, 1.16)
    assert control["spread"] == 0.1905
    assert case["gloo_all_to_all"] is None
    assert [row["difference_seen"] for row in case["rows"]] == [False, True, True]
    # Ratios 2, 4 and 2 within the repeats; the quotient of medians would be 3.
    assert (ampipe["ms"], ampipe["speedup"], ampipe["samples_ms"]) == (20.0, 2.0, [20.0, 20.0, 30.0])
    assert (ampipe["speedup_p10"], ampipe["speedup_p90"]) == (2.0, 3.6)
    assert (case["stock_backward_ms"], ampipe["backward_ms"]) == (20.0, 10.0)
    # Medians of 1 ms a stage: forward 3 + 6 collectives + 1 against 9 of computing, backward 1 + 4 + 3.
    assert ampipe["bound_ms"] == 10.0 + 9.0
    assert ampipe["bound_share"] == 0.95
    assert ampipe["bound"]["forward"] == {
        "compute_ms": 9.0,
        "compute_with_waits_ms": 9.0,
        "communication_ms": 6.0,
        "head_ms": 3.0,
        "tail_ms": 1.0,
        "chain_ms": 8.0,
    }
    # 60 ms over the smallest bound, that of two chunks in either order.
    assert case["possible_speedup"] == 3.1579
    assert case["stock_busy_cores"] == ampipe["busy_cores"] == 1.0
    assert ampipe["processor_ms_by_rank"] == [[20.0, 10.0, 20.0], [20.0, 10.0, 30.0]]
    assert (case["stock_peak_bytes"], again["peak_bytes"]) == (2**20, 3 * 2**20)
    # Of both ranks together, the median of the repeats.
    assert (ampipe["exchange"], ampipe["wire_bytes"], ampipe["expected_wire_bytes"]) == (
        "rows", 2_040_000, 2_000_000,
    )  # fmt: skip
    assert sequential["samples_ms_by_rank"] == [[50.0, 50.0, 50.0], [10.0, 10.0, 10.0]]


def test_busy_cores_are_those_of_the_slowest_rank() -> None:
    wall, processor = [[10.0, 10.0, 10.0], [20.0, 5.0, 20.0]], [[1.0, 9.0, 1.0], [12.0, 5.0, 16.0]]
    assert result.busy_cores(wall, processor) == 0.8


def shown(found: dict[str, Any], path: Path) -> list[str]:
    """The printed words for a document that was read back."""
    result_file.write(found, path)
    console = Console(width=200, record=True)
    show(result_file.read(path), console)
    return console.export_text().split()


def test_a_document_without_rows_or_busy_cores_is_shown(tmp_path: Path) -> None:
    older, empty = document(), document()
    words = shown(document(), tmp_path / "x.json")
    assert {"busy", "MiB"} <= set(words)
    assert "1.0" in words
    assert words[words.index("most") + 1] == "3.16"
    case = older["cases"][0]
    for key in ("busy_cores", "peak_bytes", "wire_bytes", "expected_wire_bytes"):
        del case[f"stock_{key}"]
        for row in case["rows"]:
            del row[key]
    for row in case["rows"]:
        del row["layers"], row["stack"], row["exchange"], row["difference_seen"]
    del case["control"], case["gloo_all_to_all"]
    assert not {"busy", "MiB", "wire"} & set(shown(older, tmp_path / "x.json"))
    empty["cases"][0] |= {"rows": [], "stock_busy_cores": None}
    assert "60.00" in shown(empty, tmp_path / "x.json")


def test_the_control_is_shown_and_what_is_below_its_spread_is_marked(tmp_path: Path) -> None:
    found = document()
    lines = " ".join(shown(found, tmp_path / "x.json"))
    assert "control │ │ 50.00 │ 1.000 (spread 19.1%) │ 0.840-1.160" in lines
    assert "ampipe │ 1 │ 60.00 │ 1.000 no difference seen │" in lines
    assert "ampipe │ 2 │ 20.00 │ 2.000 │" in lines
    assert "stock-gloo" not in lines
    (case,) = found["cases"]
    case["gloo_all_to_all"] = case["control"] | {"schedule": "stock-gloo", "difference_seen": True}
    del case["gloo_all_to_all"]["spread"]
    lines = " ".join(shown(found, tmp_path / "x.json"))
    assert "stock-gloo │ │ 50.00 │ 1.000 │" in lines
    assert "stock-gloo: stock with gloo's own all-to-all" in lines


def test_gloos_all_to_all_is_measured_on_request() -> None:
    job = dataclasses.replace(JOB, gloo_all_to_all=True)
    assert [str(variant) for variant in job.variants_of(0)[:3]] == ["stock", "control", "stock-gloo"]
    assert not any(variant.pipelined for variant in job.variants_of(0)[:3])
    assert BenchJob.from_json(job.to_json()) == job
    check_gloo(link=parse_link("200mbit"), on_cuda=False, pretended=False)
    for settings, rule in (
        ({"link": "none", "on_cuda": True}, "call NCCL's all-to-all"),
        ({"link": "none", "pretended": True}, "has no effect"),
        ({"link": "emulated:1gbit"}, "has no effect with --link emulated:1gbit"),
    ):
        given = {"on_cuda": False, "pretended": False} | settings | {"link": parse_link(settings["link"])}
        with pytest.raises(BadInput, match=rule):
            check_gloo(**given)


@pytest.mark.parametrize(
    ("p10", "p90", "spread"), [(0.98, 1.01, 0.0204), (1.01, 1.05, 0.05), (0.8, 0.9, 0.25), (1.0, 1.0, 0.0)]
)
def test_the_spread_of_a_control(p10: float, p90: float, spread: float) -> None:
    assert result.spread_of({"speedup_p10": p10, "speedup_p90": p90}) == spread
    for factor, seen in ((1 + 2 * spread + 0.001, True), (1 + spread / 2, False)):
        assert result.is_seen({"speedup": factor}, spread) is seen
        assert result.is_seen({"speedup": 1 / factor}, spread) is seen


def test_stacks_have_a_column_and_figures_of_their_own(tmp_path: Path) -> None:
    assert "stack" not in shown(document(), tmp_path / "x.json")
    several = document() | {"layers": 4}
    several["cases"][0]["rows"][2] |= {"stack": 4}
    several["cases"][0]["rows"].append(several["cases"][0]["rows"][2] | {"stack": 1, "ms": 30.0})
    words = shown(several, tmp_path / "x.json")
    assert "stack" in words
    assert words[words.index("tiny,") + 1] == "4"
    assert plot._series(several) == ["ampipe", "sequential, 4 layers together", "sequential"]


def test_bytes_of_two_classes_of_links_are_summed_by_class() -> None:
    sent = {"inter": 1000, "intra": 4000}
    of_rank = {"wire_bytes": [[sent, {"inter": 1200, "intra": 4200}, sent]], "expected_wire_bytes": [sent]}
    assert result._wire([of_rank, of_rank], 0) == {
        "wire_bytes": 10_000,
        "expected_wire_bytes": 10_000,
        "wire_bytes_by_class": {"inter": 2000, "intra": 8000},
        "expected_wire_bytes_by_class": {"inter": 2000, "intra": 8000},
    }
    of_rank["wire_bytes"] = [[None] * 3]
    assert result._wire([of_rank], 0)["wire_bytes"] is None


def test_two_classes_of_links() -> None:
    def parsed(*words: str) -> tuple[Link, int]:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        found = parser.parse_args(list(words))
        return link_of(found), num_ranks(found)

    classes = ("--link", "inter=50mbit,intra=400mbit")
    link, count = parsed(*classes, "--nodes", "3", "--ranks-per-node", "2")
    assert count == 6
    assert (link.kind, link.rate_bit_per_s, link.nodes) == (LinkKind.NETWORK, 50e6, Nodes(2, 400e6))
    assert link.nodes is not None and [link.nodes.node_of(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert parse_link(link.text) == link
    assert parsed("--link", "50mbit") == (parse_link("50mbit"), 2)
    with pytest.raises(BadInput, match="which ampipe bench and ampipe profile make"):
        require_one_class(link)
    for words, rule in (
        (classes, "has two classes of links, and needs --nodes"),
        ((*classes, "--nodes", "2"), "has two classes of links, and needs --ranks-per-node"),
        (("--nodes", "2"), "--nodes 2: has no effect with --link none"),
        ((*classes, "--nodes", "2", "--ranks-per-node", "2", "--ranks", "2"), "is not 2 nodes of 2 ranks"),
        (("--link", "inter=50mbit", "--nodes", "2", "--ranks-per-node", "2"), "two classes of links are"),
        (("--link", "inter=50,intra=1gbit", "--nodes", "2", "--ranks-per-node", "2"), "is not a rate"),
    ):
        with pytest.raises(BadInput, match=rule):
            parsed(*words)


def test_exchanges_have_a_column_and_an_own_series(tmp_path: Path) -> None:
    found = document()
    assert "exchange" not in shown(found, tmp_path / "x.json")
    found["cases"][0]["rows"].append(found["cases"][0]["rows"][1] | {"exchange": "ranks"})
    words = shown(found, tmp_path / "x.json")
    assert {"exchange", "ranks"} <= set(words)
    assert words[words.index("2.04") + 1] == "(+2.0%)"
    assert plot._series(found) == ["ampipe", "sequential", "ampipe, exchange ranks"]


def test_an_exchange_is_measured_where_it_saves_something() -> None:
    assert parse_exchanges("rows,ranks,rows,nodes,2dh", flag="--exchange") == tuple(Exchange)
    assert parse_exchanges("auto", flag="--exchange") == tuple(Exchange)
    for text in ("once", "", "rows,"):
        with pytest.raises(BadInput, match="is not auto, or a list of rows, ranks"):
            parse_exchanges(text, flag="--exchange")
    cases = tuple(dataclasses.replace(CASE, experts=8, topk=topk) for topk in (1, 4))
    job = BenchJob(
        cases=cases,
        schedules=("ampipe",),
        cuts=(Cut.of(1), Cut.of(4)),
        link="none",
        num_ranks=2,
        pretended=False,
        device="cpu",
        repeats=1,
        warmup=0,
        seed=1,
        timeout_s=9.0,
        rendezvous="",
        cores=(),
        exchanges=tuple(Exchange),
    )
    assert BenchJob.from_json(job.to_json()) == job
    assert [str(variant) for variant in job.variants_of(0)[2:]] == ["ampipe degree 1", "ampipe degree 4"]
    assert [str(variant) for variant in job.variants_of(1)[2:]] == [
        "ampipe degree 1",
        "ampipe degree 1, exchange ranks",
        "ampipe degree 4",
        "ampipe degree 4, exchange ranks",
    ]
    two_nodes = with_nodes("inter=50mbit,intra=400mbit", ranks_per_node=2)
    of_nodes = dataclasses.replace(job, link=two_nodes, num_ranks=4, cuts=(Cut.of(4),))
    assert [variant.exchange for variant in of_nodes.variants_of(1)[2:]] == list(Exchange)
    assert [variant.pipelined for variant in job.variants_of(1)] == [False, False, False, True, True, True]


def test_a_wire_is_measured_where_tokens_travel_in_chunks(tmp_path: Path) -> None:
    assert wires("none,fp8,none") == (None, "fp8")
    with pytest.raises(BadInput, match=r"--wire fp9: .*Did you mean fp8"):
        wires("none,fp9")
    job = BenchJob(
        cases=(CASE,),
        schedules=("ampipe",),
        cuts=(Cut.of(1), Cut.of(4)),
        link="none",
        num_ranks=2,
        pretended=False,
        device="cpu",
        repeats=1,
        warmup=0,
        seed=1,
        timeout_s=9.0,
        rendezvous="",
        cores=(),
        wires=(None, "fp8"),
    )
    assert BenchJob.from_json(job.to_json()) == job
    names = ["stock", "control", "ampipe degree 1", "ampipe degree 4", "ampipe degree 4, wire fp8"]
    assert [str(variant) for variant in job.variants_of(0)] == names
    found = document()
    assert "fp8" not in shown(found, tmp_path / "x.json")
    found["cases"][0]["rows"][1]["wire"] = "fp8"
    assert {"wire", "fp8", "difference"} <= set(shown(found, tmp_path / "x.json"))


def test_predictions_are_made_with_the_exchange_of_a_row() -> None:
    cluster = read_cluster(find_cluster("docs/measured/profile-100mbit.yaml"))
    found = document()
    (case,) = found["cases"]
    case["block"] |= {"sequence_length": 2048, "hidden": 256, "ffn": 128, "experts": 32, "topk": 8}
    case["rows"] = [case["rows"][1] | {"exchange": exchange} for exchange in ("rows", "ranks")]
    prediction.predict(found, cluster)
    rows, ranks = (row["predicted_ms"] for row in case["rows"])
    assert rows > 2.5 * ranks
    assert case["choice"]["exchange"] == "ranks"
    block = Case(**case["block"])
    settings = {"stacks": (1,), "num_ranks": 2, "fused_gradients": False}
    for exchange in (Exchange.ROWS, Exchange.RANKS):
        (planned,) = prediction.planned(block, cluster, exchanges=(exchange,), **settings)
        assert planned.exchange is exchange
    (planned,) = prediction.planned(block, cluster, exchanges=tuple(Exchange), **settings)
    assert planned.exchange is Exchange.RANKS


def test_layers_are_predicted_stack_by_stack() -> None:
    cluster = read_cluster(find_cluster("docs/measured/profile-100mbit.yaml"))

    def predicted(layers: int, stack: int) -> tuple[float, float]:
        found = document() | {"layers": layers}
        (case,) = found["cases"]
        # A block of real size: in the others, the overhead of a stage is all.
        case["block"] |= {"sequence_length": 2048, "hidden": 256, "ffn": 1024}
        case["rows"] = [case["rows"][1] | {"stack": stack}]
        prediction.predict(found, cluster)
        assert case["choice"]["stack"] == stack
        return case["predicted_stock_ms"], case["rows"][0]["predicted_ms"]

    stock, one = predicted(1, 1)
    assert predicted(4, 1) == pytest.approx((4 * stock, 4 * one), rel=1e-6)
    (_, two), (_, four), (_, mixed) = predicted(4, 2), predicted(4, 4), predicted(4, 3)
    assert 4 * one > two > four
    assert predicted(3, 3)[1] + one == pytest.approx(mixed, rel=1e-6)


def test_a_plan_is_made_for_every_stack() -> None:
    cluster = read_cluster(find_cluster("docs/measured/profile-100mbit.yaml"))
    case = dataclasses.replace(CASE, sequence_length=2048, hidden=256, ffn=1024)
    settings = {"exchanges": (Exchange.ROWS,), "num_ranks": 2, "fused_gradients": False}
    block, stack = prediction.planned(case, cluster, stacks=(1, 3), **settings)
    assert (block.stack, stack.stack) == (1, 3)
    assert stack.order is not None
    assert from_text(stack.order).repeats
    schedule = stack.pipeline.schedule_of([BlockFeatures(chunked_qkv=True)] * 3)
    assert {stage.layer for stage in schedule.forward.stages} == {0, 1, 2}
    assert stack.pipeline.num_chunks == len(stack.pipeline.chunks(case.sequence_length))
    # On one rank nothing is sent.
    alone = prediction.planned(case, cluster, stacks=(1, 3), **settings | {"num_ranks": 1})
    assert [variant.pipelined for variant in alone] == [False]


def test_a_document_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    result_file.write(document(), path)
    assert result_file.read(path) == json.loads(path.read_text()) == json.loads(json.dumps(document()))
    assert list(tmp_path.iterdir()) == [path]


def test_a_document_that_cannot_be_written_leaves_the_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("earlier")
    with pytest.raises(TypeError):
        result_file.write({"cases": object()}, path)
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]


TWO_CASES = f"defaults: {{{FIGURES}}}\ncases: [{{name: small}}, {{name: large}}]\n"


def run_that_ends_after_the_first_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, *words: str
) -> int:
    """Of two cases; ``error`` ends the ranks."""

    def measure(job: BenchJob, *, on_case: Any, **_: Any) -> None:
        variants = list(job.variants_of(0))
        reports = rank_processes.RankReports([[report([[0.02] * 3] * len(variants), variants)] * 2, [{}, {}]])
        on_case(0, reports)
        raise error

    def train(case: Case, *_: Any, **__: Any) -> training.Curve:
        if case.name == "large":
            raise error
        return training.Curve((9.0, 8.0, 8.0), (2.0, 1.0, 0.5))

    monkeypatch.setattr(rank_processes, "measure", measure)
    monkeypatch.setattr(training, "_train", train)
    grid = grid_file(tmp_path, TWO_CASES)
    return main(["bench", "--grid", str(grid), "--degrees", "2", "--schedules", "ampipe", *words])


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (lambda: RunFailed("no rank answered for 300 s"), 3, "ampipe: no rank answered for 300 s\n"),
        (KeyboardInterrupt, 130, "ampipe: interrupted; "),
    ],
)
@pytest.mark.parametrize("words", [(), ("--end-to-end", "--repeats", "2", "--warmup", "1")])
def test_finished_cases_are_kept_when_a_run_ends_early(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Callable[[], BaseException],
    code: int,
    said: str,
    words: tuple[str, ...],
) -> None:
    path = tmp_path / "x.json"
    words = (*words, "--json", str(path))
    assert run_that_ends_after_the_first_case(tmp_path, monkeypatch, error(), *words) == code
    found = json.loads(path.read_text())
    assert ([case["name"] for case in found["cases"]], found["missing_cases"]) == (["small"], ["large"])
    output = capsys.readouterr()
    assert output.err.startswith(said + f"1 of 2 cases are finished, and in the table; {path} has 1 of them")
    assert output.err.endswith(". Measure the others with --cases large and another --json file.\n")
    assert "unfinished, without large" in " ".join(output.out.split())
    if "--end-to-end" not in words:
        assert f"(ampipe bench --from {path})" in output.err
        assert main(["bench", "--from", str(path)]) == 0
        assert "unfinished, without large" in capsys.readouterr().out


def test_a_run_without_a_file_that_ends_early_shows_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_that_ends_after_the_first_case(tmp_path, monkeypatch, RunFailed("rank 1 failed")) == 3
    output = capsys.readouterr()
    assert "small" in output.out
    assert output.err == (
        "ampipe: rank 1 failed\n"
        "1 of 2 cases are finished, and in the table. Measure the others with --cases large.\n"
    )


def test_a_file_that_cannot_be_written_any_more_is_not_said_to_have_a_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(*_: object) -> None:
        raise RunFailed("x.json cannot be written (No space left on device)")

    monkeypatch.setattr(result_file, "write", write)
    words = ("--json", str(tmp_path / "x.json"))
    assert run_that_ends_after_the_first_case(tmp_path, monkeypatch, RunFailed("not reached"), *words) == 3
    output = capsys.readouterr()
    assert "small" in output.out
    assert "No space left on device" in output.err
    assert "has 1 of them" not in output.err


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": "x"}', "[" * 100_000])
def test_foreign_results_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(BadInput, match="not a result of ampipe bench"):
        result_file.read(path)


@pytest.mark.parametrize("value", ["fast", None, 0, -1, True])
def test_results_with_wrong_figures_are_refused(tmp_path: Path, value: object) -> None:
    wrong = document()
    wrong["cases"][0]["rows"][0]["speedup"] = value
    path = tmp_path / "x.json"
    path.write_text(json.dumps(wrong))
    with pytest.raises(BadInput, match="not a result of ampipe bench"):
        result_file.read(path)


def test_an_earlier_result_is_shown_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "x.json"
    result_file.write(document(), path)
    assert main(["bench", "--from", str(path), "--plot", str(tmp_path / "picture")]) == 0
    shown = capsys.readouterr().out
    assert "(emulated)" in shown
    assert "95.0%" in shown
    names = ("bound", "by-case", "by-degree", "overhead")
    assert sorted(file.name for file in tmp_path.glob("picture*")) == sorted(
        f"picture-{name}.{kind}" for name in names for kind in ("svg", "png")
    )
    for name in names:
        assert "(emulated)" in (tmp_path / f"picture-{name}.svg").read_text()


def test_figures_without_data_are_left_out_with_a_reason(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    control_only = document()
    control_only["cases"][0]["rows"] = control_only["cases"][0]["rows"][:1]
    written, left_out = plot.draw(control_only, tmp_path / "x")
    assert (written, len(left_out)) == ([], 4)


def test_cases_are_chosen_in_the_order_of_the_grid() -> None:
    grid = read_grid(find_grid("cpu-small"))
    assert [case.name for case in grid.only("top2,top1").cases] == ["top1", "top2"]
    assert grid.only(None) is grid


@pytest.mark.parametrize("names", ["top3", "", "top1,", "top1 ,top2"])
def test_cases_that_are_not_there_are_refused(names: str) -> None:
    with pytest.raises(BadInput, match=r"is not a case of .*cpu-small"):
        read_grid(find_grid("cpu-small")).only(names)


# What an idle link saves up


@pytest.mark.parametrize("saved_bytes", [0, 32_768])
def test_only_the_first_collective_of_a_direction_gets_what_a_link_saved(
    saved_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_ampipe.runtime.recorder import Recorder
    from megatron_ampipe.runtime.tape import Tape
    from megatron_ampipe.tools.measuring import stage_times

    happened: list[str] = []
    monkeypatch.setattr(stage_times.dist, "barrier", lambda: happened.append("barrier"))
    monkeypatch.setattr(stage_times, "_spend", lambda size, *, on_cuda: happened.append(f"spend {size}"))
    stages = [
        Stage(kinds.DISPATCH, 0),
        Stage(kinds.EXPERT, 0),
        Stage(kinds.COMBINE, 0),
        Stage(kinds.DISPATCH, 1),
    ]
    order = [("comm" if stage.is_communication else "compute", stage) for stage in stages]
    timer = stage_times.StageTimer(saved_bytes=saved_bytes)
    for _ in Direction:
        happened.clear()
        tape = Tape.of(order, dict.fromkeys(stages, ()))
        timer.execute(tape, lambda call: happened.append(str(call.stage)), Recorder())
        spend = [f"spend {saved_bytes}"] if saved_bytes else []
        assert happened == [
            *("barrier", "dispatch.0", "expert.0"),
            *("barrier", *spend, "combine.0", "barrier", *spend, "dispatch.1"),
        ]


class _Device:
    """A GPU with the host's clock: stays busy for the given time, and records its work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from megatron_ampipe.tools.measuring import stage_times

        self.now_s, self.busy_until_s = 0.0, 0.0
        self.happened: list[str] = []
        device = self

        class Event:
            def __init__(self, **_: object) -> None:
                self.over_s = 0.0

            def record(self, _stream: object = None) -> None:
                self.over_s = device.busy_until_s
                device.happened.append("event")

            def query(self) -> bool:
                return self.over_s <= device.now_s

        monkeypatch.setattr(stage_times.torch.cuda, "Event", Event)
        monkeypatch.setattr(stage_times.torch.cuda, "_sleep", self.spin)
        monkeypatch.setattr(stage_times.torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(stage_times.torch.cuda, "current_stream", lambda: None)
        monkeypatch.setattr(stage_times.time, "perf_counter", lambda: self.now_s)

    def spin(self, cycles: int) -> None:
        self.busy_until_s = max(self.busy_until_s, self.now_s) + cycles / 2e9
        self.happened.append("spin")


def test_a_stage_on_a_gpu_is_timed_from_when_all_of_it_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_ampipe.runtime.recorder import Recorder
    from megatron_ampipe.runtime.tape import Tape
    from megatron_ampipe.tools.measuring import stage_times

    device = _Device(monkeypatch)
    timer, recorder = stage_times.StageTimer(), Recorder(num_iterations=9)
    recorder.start_iteration(1)
    stage = Stage(kinds.EXPERT, 0)
    issue_s = 1e-3

    def issue(_: object) -> None:
        device.happened.append("stage")
        device.now_s += issue_s

    def run() -> float:
        begin_s = device.now_s
        device.busy_until_s = 0.0
        timer.execute(Tape.of([("compute", stage)], {stage: ()}), issue, recorder)
        return device.busy_until_s - begin_s

    run()
    # Twice as long as the host took the last time.
    assert run() == pytest.approx(2e-3)
    # What is said of a stage is between the last two events: after the spin, around the stage.
    assert device.happened[-5:] == ["spin", "event", "event", "stage", "event"]
    assert not timer.queue.starved
    assert timer.queue.issued_us() == {"forward": {"expert": 1000.0}}
    issue_s = 3e-3
    run()
    assert timer.queue.starved == {"expert": 1}
    assert run() == pytest.approx(6e-3)
    # A host that waits for the device is not waited for in turn.
    issue_s = 1.0
    run()
    assert run() == pytest.approx(1e-2)
    assert timer.queue.starved == {"expert": 3}
    # A host that waited for the device has not only issued.
    assert timer.queue.issued_us() == {"forward": {"expert": 1000.0}}
