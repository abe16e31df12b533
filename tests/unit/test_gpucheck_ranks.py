"""Ranks that share a GPU, without one: their environments, restarts, dumps and tables."""

import json
import sys
import zipfile
from pathlib import Path

import gpu_checks
import pytest

from gpu_check import ranks
from gpu_check.steps import Done, Outcome
from tests.dist import one_device
from tests.unit.test_gpucheck_findings import rows


def test_each_rank_gets_the_environment_that_its_nccl_needs() -> None:
    of_gloo = ranks.environment_of(None, rank=1, num_ranks=2)
    assert of_gloo == {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    hosts, both = [], ("NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE")
    for nccl, num_ranks, is_new in (((2, 28), 2, False), ((2, 30), 2, True), ((3, 0), 4, True)):
        for rank in range(num_ranks):
            found = ranks.environment_of(nccl, rank=rank, num_ranks=num_ranks)
            assert found.items() >= {"RANK": str(rank), "LOCAL_RANK": "0"}.items()
            assert [name in found for name in both] == [not is_new, is_new]
            assert found.get("NCCL_SOCKET_IFNAME") == (None if is_new else "lo")
            assert ("NCCL_MAX_CTAS" in found) is (is_new and num_ranks > 2)
            # So that what hangs is known.
            assert int(found["TORCH_FR_BUFFER_SIZE"]) > 0
            hosts.append(found.get("NCCL_HOSTID"))
    assert len({*hosts} - {None}) == 2


_RANK = """
import json, os, sys, time
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
rank = int(os.environ["RANK"])
def write(**fields):
    with open(words["--lines"], "a") as file:
        file.write(json.dumps(fields | {"rank": rank}) + chr(10))
for name in json.loads(words["--cases"]):
    write(begins=name)
    if name == "hangs" and rank:
        open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + "1", "w").write("what it did last")
        print("waiting", flush=True)
        time.sleep(100)
    if name == "ends" and not rank:
        sys.exit("no memory")
    if name == "ends" or name == "hangs" and not rank:
        write(case=name, outcome="equal", said="")
        time.sleep(100)
    write(case=name, outcome="different" if name == "wrong" else "equal", said="1e-07")
"""


def of_ranks(tmp_path: Path) -> tuple[Path, ranks.Launch, ranks.Limits]:
    launch = ranks.Launch((sys.executable, "-c", _RANK), 2, None, tmp_path, dumps=tmp_path / "dumps.zip")
    return tmp_path / "lines", launch, ranks.Limits(case_s=3, start_s=20, grace_s=0.5)


def test_ranks_that_hang_or_end_are_started_again_for_what_is_left(tmp_path: Path) -> None:
    file, launch, limits = of_ranks(tmp_path)
    names = ["first", "hangs", "ends", "wrong", "last"]
    ranks.write(file, ranks=2, nccl=[2, 28], cases={name: f"what {name} shows" for name in [*names, "never"]})
    lines = ranks.run_cases(file, names, launch, limits)
    found = ranks.outcomes(lines)
    assert {name: [found[name][rank][0] for rank in range(2)] for name in names} == {
        "first": ["equal", "equal"],
        "hangs": ["equal", "hung"],
        "ends": ["ended", "equal"],
        "wrong": ["different", "different"],
        "last": ["equal", "equal"],
    }
    assert (found["hangs"][1][1], found["ends"][0][1]) == ("waiting", "no memory")
    assert ranks.exit_code(lines) == 4
    with zipfile.ZipFile(tmp_path / "dumps.zip") as dumps:
        assert dumps.namelist() == ["hangs/flight-recorder-1"]
    assert [ranks.exit_code(lines[:8]), ranks.exit_code(ranks.read(file)[:3])] == [3, 0]
    # Cut while it wrote.
    text = file.read_text() + '{"case": "never", "rank": 0, "out'
    table = rows(Done("ranks", "2 ranks", Outcome.DIFFERENT, 9.0, "", text))
    assert table == {
        "2 ranks over NCCL 2.28, what first shows": (Outcome.OK, "1 of 1 cases"),
        "2 ranks over NCCL 2.28, what hangs shows": (
            Outcome.DIFFERENT,
            "0 of 1 cases; first: hangs, rank 1 hung: waiting",
        ),
        "2 ranks over NCCL 2.28, what ends shows": (
            Outcome.DIFFERENT,
            "0 of 1 cases; first: ends, rank 0 ended: no memory",
        ),
        "2 ranks over NCCL 2.28, what wrong shows": (
            Outcome.DIFFERENT,
            "0 of 1 cases; first: wrong, rank 0 different: 1e-07",
        ),
        "2 ranks over NCCL 2.28, what last shows": (Outcome.OK, "1 of 1 cases"),
        "2 ranks over NCCL 2.28, what never shows": (Outcome.CUT, "0 of 0 cases; 1 did not end"),
    }


def test_nccl_writes_what_it_did_before_a_case_is_ended() -> None:
    assert one_device.TIMEOUT_S + 15 < ranks.CASE_S


def test_a_hang_is_a_finding_of_the_order_of_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, launch, limits = of_ranks(tmp_path)
    monkeypatch.setattr(ranks, "_QUEUES_S", limits)
    assert len({tuple(one.values()) for one in ranks.QUEUES}) == 6
    file = tmp_path / "queues"
    for names in (["first"], ["hangs"], ["wrong"]):
        ranks.try_queues(file, names, launch, ranks.QUEUES[:1])
    lines = ranks.read(file)
    assert [ranks.exit_code_of_queues(some) for some in (lines[:2], lines, [])] == [0, 4, 3]
    outcomes = []
    for line in lines:
        text = json.dumps(line) + "\n"
        ((outcome, said),) = rows(Done("queues", "order", Outcome.OK, 9.0, "", text)).values()
        outcomes.append((outcome, said))
    assert outcomes == [
        (Outcome.OK, "1 cases end"),
        (Outcome.OK, "hangs: equal and hung (waiting)"),
        (Outcome.DIFFERENT, "wrong: different (1e-07)"),
    ]


def test_tables_of_ranks_are_made_of_what_was_stored() -> None:
    head = {
        "ranks": 2,
        "nccl": [2, 28],
        "cases": {"one": "experts (EP2)", "two": "experts (EP2)", "lost": "CP2"},
    }
    outcomes = [("one", "equal"), ("two", "hung")]
    cases = [
        {"case": case, "rank": rank, "outcome": how, "said": ""} for case, how in outcomes for rank in (0, 1)
    ]
    queue = {"environment": ranks.QUEUES[1], "found": {"one": ["equal"], "two": ["hung"]}, "said": []}
    documents = {"gpu-check-9": {"steps": [
        {"kind": kind, "found": "".join(json.dumps(line) + "\n" for line in lines) + '{"cut'}
        for kind, lines in (("ranks", [head, *cases]), ("queues", [queue]), ("tests", []))
    ]}}  # fmt: skip
    link = "[gpu-check-9](measured/results/gpu-check-9.json)"
    assert gpu_checks.ranks_table(documents).splitlines()[2:] == [
        f"| {link} | 2 | NCCL 2.28 | experts (EP2) | 1 of 2 | hung |",
        "|  | 2 | NCCL 2.28 | CP2 | 0 of 1 |  |",
    ]
    assert gpu_checks.queues_table(documents).splitlines()[2:] == [f"| {link} | 1 | 1 | 1 of 2 | two |"]
    assert gpu_checks.ranks_table({}) == gpu_checks.queues_table({}) == "Not run on a GPU yet.\n"
