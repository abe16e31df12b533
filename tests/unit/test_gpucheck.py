"""``scripts/gpu_check.sh`` without a GPU: wheels, steps and their time limits, results, the table."""

import dataclasses
import importlib.util
import json
import math
import os
import re
import shutil
import sys
import sysconfig
import time
import zipfile
from pathlib import Path
from typing import Any

import gpu_checks
import pytest
import step_kinds

from gpu_check import __main__ as command
from gpu_check import code, findings, ranks, steps, summary, trained, wheels
from gpu_check import plan as planning
from gpu_check.families import FAMILIES
from gpu_check.plan import Step, calls, chosen, plan
from gpu_check.steps import Device, Done, Outcome, Surroundings, run
from gpu_check.torch_trace import read_profile
from megatron_ampipe.cli import build_parser
from megatron_ampipe.errors import BadInput
from megatron_ampipe.tools.measuring.grid import find_grid, read_grid
from tests.dist import one_device
from tests.forked import alive, completed, until

GPU = Device(gpu="NVIDIA Test", torch="2.11.0", cuda="13.0", python="3.12.3")


# Wheels


def make_wheel(folder: Path, name: str = "ampipe_probe") -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "VALUE = 3\n")
        wheel.writestr("../outside.py", "")


def test_packing_fetches_everything_but_torch_and_it_can_be_unpacked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, ...]] = []
    pack, site = tmp_path / "pack", tmp_path / "site"

    def pip(*words: str) -> None:
        calls.append(words)
        make_wheel(pack)

    monkeypatch.setattr(wheels, "_pip", pip)
    pack.mkdir()
    make_wheel(pack, "old")
    assert command.main(["--pack", str(pack)]) == 0
    assert f"1 wheels, 0.0 MiB, and the commit {code.here().commit}, in {pack}" in capsys.readouterr().out
    assert code.of(pack) == code.here()
    words, of_training = calls
    assert {"pydantic", "--only-binary=:all:"} <= set(of_training)
    assert "megatron-core" in words and not {"torch", "numpy"} & set(words)
    assert {"--no-deps", "--only-binary=:all:"} <= set(words)
    wheels.unpack(pack, site)
    assert {path.name for path in site.iterdir()} == {"ampipe_probe.py", "outside.py"}
    (pack / "half-1-py3-none-any.whl").write_bytes(b"PK")
    with pytest.raises(BadInput, match=r"holds half-1-py3-none-any.whl, which is damaged"):
        wheels.unpack(pack, site)


def test_the_check_needs_no_compiled_modules_of_its_wheels(tmp_path: Path) -> None:
    """The parts of Megatron that the check imports, without a compiled module; AMPipe's, without pydantic."""
    spec = importlib.util.find_spec("megatron")
    assert spec is not None
    for folder in spec.submodule_search_locations or []:
        leave_out = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(folder, tmp_path / "megatron", ignore=leave_out, dirs_exist_ok=True)
    code = (
        "import sys; sys.modules['pydantic'] = None\n"
        "import megatron.core\n"
        "import megatron_ampipe.tools.measuring.blocks, megatron_ampipe.tools.measuring.timed_passes\n"
        "import tests.dist.blocks, megatron_ampipe.launch.host.megatron\n"
        f"assert megatron.core.__file__.startswith({str(tmp_path)!r})\n"
        "assert 'megatron.core.datasets.helpers_cpp' not in sys.modules\n"
    )
    path = os.pathsep.join([str(tmp_path), str(planning.REPOSITORY)])
    completed(sys.executable, "-c", code, env=os.environ | {"PYTHONPATH": path})


# Steps


PLANNED = plan(Path("scratch"), Path("output"))
STEPS = [step for group in PLANNED for step in group]


def test_the_steps_use_what_exists() -> None:
    # What is timed runs alone, and so do ranks that share the GPU.
    timed = {"profile", "attention", "partners", "bench"}
    for group in PLANNED:
        assert len(group) == 1 or all(step.kind not in timed and step.ranks == 1 for step in group)
    assert len({step.name for step in STEPS}) == len({step.result for step in STEPS}) == len(STEPS)
    assert {step.kind for step in STEPS} == {"tests", "training", "ranks", "queues", *timed}
    assert {step.name for step in STEPS if step.kind == "training"} == {
        f"training, {name}" for name in FAMILIES
    }
    for step in STEPS:
        assert step.shows, step.name
        # Without a C compiler, torch's would fail.
        compiles = step.environment["TORCHDYNAMO_DISABLE"] == "0"
        assert compiles == any("compiler" in need for need in step.needs), step.name
        if step.kind == "bench":
            parsed = build_parser("bench").parse_args(step.command[3:])
            cases = read_grid(find_grid(parsed.grid), only=parsed.cases, num_ranks=parsed.ranks)
            assert len(cases) == len(parsed.cases.split(","))
            assert step.result == parsed.json
    named = {word for step in STEPS for word in step.command if word.startswith("tests/gpu")}
    assert named == {
        f"tests/gpu/{path.name}" for path in (planning.REPOSITORY / "tests/gpu").glob("test_*.py")
    }


def test_what_has_never_run_comes_first_and_fifteen_minutes_are_planned() -> None:
    planned = calls(PLANNED)
    assert [step.name for line in planned[:4] for step in line.steps] == [
        "2 ranks", "training, two ranks", "partners, emulated:20GB/s", "4 ranks",
    ]  # fmt: skip
    assert {line.call for line in planned} == {1, 2, None}
    by_call = {call: [line for line in planned if line.call == call] for call in (1, 2)}
    for lines in by_call.values():
        assert sum(max(step.limit_s for step in line.steps) for line in lines) <= planning.BUDGET_S < 600
    assert max(line.until_s for line in planned if line.call) <= planning.DEVICE_S
    # The first of the links that cost the GPU something, and Transformer Engine, are in the second call.
    in_time = [step.name for line in planned if line.call for step in line.steps]
    assert {"transformer engine", "bench mixtral, emulated:20GB/s:nccl"} <= set(in_time)
    assert planned[-1].until_s > planning.DEVICE_S + 2 * planning.START_S


def test_the_limit_of_partners_follows_from_its_kinds() -> None:
    (limit_s, other_s) = (step.limit_s for step in STEPS if step.kind == "partners")
    of_local = [kind for kind in step_kinds.KINDS if step_kinds.ENGINE not in kind.needs]
    assert limit_s == other_s == planning.partners_limit_s(len(of_local))
    assert planning.partners_limit_s(7) > 51.4, "what seven kinds took on an H200"
    assert step_kinds.left_out(on_gpu=False, in_16_bit=False, of_engine=False) == {
        "megatron, CUDA graphs": "needs a GPU",
        "megatron, overlapped": "needs layers in 16 bit",
        "megatron, overlapped, CUDA graphs": "needs a GPU and layers in 16 bit and layers of Transformer "
        "Engine",
        "stack, degree 2, CUDA graphs": "needs a GPU",
        "stack, degree 4, CUDA graphs": "needs a GPU",
    }


@pytest.mark.parametrize(
    ("only", "num_ranks", "expected"),
    [
        ("profile", None, ["profile"]),
        # A whole name is not a word.
        ("partners", None, ["partners"]),
        ("2 ranks,training, two ranks", None, ["2 ranks", "training, two ranks"]),
        ("FP8", None, ["training, FP8", "training, two ranks, FP8"]),
        ("FP8", 2, ["training, two ranks, FP8"]),
        ("", 4, ["4 ranks", "training, four ranks, pipeline"]),
        ("", None, [step.name for step in STEPS]),
    ],
)
def test_only_chooses_steps(only: str, num_ranks: int | None, expected: list[str]) -> None:
    groups = chosen(PLANNED, command._names(only), num_ranks)
    assert sorted(step.name for group in groups for step in group) == sorted(expected)


def test_a_word_that_chooses_no_step_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadInput, match=r"--only profiel: is in no step's name. Did you mean profile\?"):
        chosen(PLANNED, ["2 ranks", "profiel"], None)
    with pytest.raises(BadInput, match="is in no step's name of --ranks 2"):
        chosen(PLANNED, ["profile"], 2)


def test_help_teaches_the_steps_and_how_calls_share_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        command.main(["--help"])
    said = capsys.readouterr().out
    assert [step.name for step in STEPS if step.name not in said] == []
    assert "steps that ended are not repeated" in said and "--pack .wheels" in said


def test_what_a_machine_lacks_is_found_before_the_steps(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("")
    (tmp_path / "ampipe_broken.py").write_text("raise RuntimeError('no kernel for this GPU\\nmore')")
    (tmp_path / "ampipe_needs_another.py").write_text("import ampipe_einops")
    (tmp_path / "ampipe_ends.py").write_text("import os; os._exit(7)")
    needs = [
        "json",
        "ampipe_missing",
        "ampipe_broken",
        "ampipe_needs_another",
        planning.COMPILER,
        "ampipe_ends",
    ]
    environment = {"PYTHONPATH": str(tmp_path), "PATH": ""}
    header = (Path(sysconfig.get_path("include")) / "Python.h").is_file()
    assert steps.missing(needs, environment) == {
        "ampipe_missing": "not installed",
        "ampipe_broken": "no kernel for this GPU",
        "ampipe_needs_another": "No module named 'ampipe_einops'",
        planning.COMPILER: "no compiler" if header else "no Python.h",
        "ampipe_ends": "does not load",
    }
    if header:
        assert steps.missing([planning.COMPILER], environment | {"CC": "cc"}) == {}


def test_a_step_that_lacks_something_is_skipped_with_the_reason(tmp_path: Path) -> None:
    # At least half of the limit has to be left.
    late = run_it(tmp_path, step(tmp_path, "0/0"), budget_s=9)
    assert (late.outcome, late.seconds, late.said) == (Outcome.NO_TIME, 0.0, "9 s left, of 20")
    one = dataclasses.replace(step(tmp_path, "0/0"), needs=("json", "transformer_engine"))
    lacking = {"transformer_engine": "not installed", "rich": "not installed"}
    done = run_it(tmp_path, one, lacking=lacking)
    assert (done.outcome, done.said) == (Outcome.SKIPPED, "needs transformer_engine (not installed)")


def step(tmp_path: Path, code: str, *, limit_s: float = 20) -> Step:
    return Step("bench", "one", (sys.executable, "-c", code), tmp_path / "result", limit_s, needs=())


def run_it(
    tmp_path: Path, what: Step, *, budget_s: float = 60, lacking: dict[str, str] | None = None
) -> Done:
    return kept(tmp_path, what, budget_s=budget_s, lacking=lacking)[-1]


def kept(
    tmp_path: Path, what: Step, *, budget_s: float = 60, lacking: dict[str, str] | None = None
) -> list[Done]:
    """What was kept of a step, as it ran and when it ended."""
    (tmp_path / "log").touch()
    around = Surroundings(
        environment={},
        lacking=lacking or {},
        log=tmp_path / "log",
        deadline=time.monotonic() + budget_s,
        commit="abc",
    )
    found: list[Done] = []
    run([what], around, found.append)
    return found


def test_the_outcome_of_a_step_follows_its_exit_code(tmp_path: Path) -> None:
    for number, outcome in ((0, Outcome.OK), (3, Outcome.FAILED), (4, Outcome.DIFFERENT)):
        write = f"open('{tmp_path}/result', 'w').write('r')"
        text = f"import sys; {write}; print('last words'); sys.exit({number})"
        done = run_it(tmp_path, step(tmp_path, text))
        assert (done.outcome, done.said, done.found) == (outcome, "last words" if number else "", "r")
        assert (done.commit, len(done.begin)) == ("abc", 20)
        assert "== one\nlast words" in (tmp_path / "log").read_text()


def test_a_step_over_its_time_limit_is_ended_with_its_child_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "_SHORTEST_S", 0.1)
    monkeypatch.setattr(steps, "_GRACE_S", 0.2)
    # It also ignores SIGTERM.
    text = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); child = os.fork()\n"
        f"open('{tmp_path}/pids', 'a').write(f'{{os.getpid()}} ')\n"
        "time.sleep(100)"
    )
    done = run_it(tmp_path, step(tmp_path, text, limit_s=3))
    assert (done.outcome, done.found) == (Outcome.CUT, None)
    assert 3 <= done.seconds < 30
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    until(lambda: not any(map(alive, pids)), "the end of the step", timeout_s=5)


def test_what_a_step_has_written_is_kept_while_it_runs_and_when_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "_SHORTEST_S", 0.1)
    monkeypatch.setattr(steps, "_KEPT_EVERY_S", 0.2)
    write = f"open('{tmp_path}/result', 'w').write('half')"
    text = f"import time; {write}; print('works', flush=True); time.sleep(100)"
    found = kept(tmp_path, step(tmp_path, text, limit_s=4), budget_s=3)
    assert {one.outcome for one in found} == {Outcome.INTERRUPTED}
    assert len(found) > 3
    assert found[-1].found == "half"
    assert re.fullmatch(r"the check's time was over after 3 of 4 s", found[-1].said)
    assert (tmp_path / "log").read_text().count("works") == 1


def test_a_signal_ends_the_steps_and_keeps_what_they_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Done] = []
    sleep = time.sleep

    def interrupted(seconds: float) -> None:
        sleep(seconds)
        result = tmp_path / "result"
        if result.is_file() and result.read_text():
            # Once: what ends the steps sleeps, too.
            monkeypatch.undo()
            raise KeyboardInterrupt

    monkeypatch.setattr(steps.time, "sleep", interrupted)
    text = f"import time; open('{tmp_path}/result', 'w').write('half'); time.sleep(100)"
    (tmp_path / "log").touch()
    around = Surroundings(
        environment={}, lacking={}, log=tmp_path / "log", deadline=time.monotonic() + 60, commit=""
    )
    with pytest.raises(KeyboardInterrupt):
        run([step(tmp_path, text)], around, found.append)
    (last,) = found
    assert (last.outcome, last.said, last.found) == (Outcome.INTERRUPTED, "ended by a signal", "half")


# Several calls


def of_call(folder: Path, *, digest: str = "1", gpu: Device = GPU) -> summary.Summary:
    order = ["first", "second", "third"]
    return summary.Summary(folder, {"seed": 1}, code=code.Code("abc", digest), device=gpu, order=order)


def outcome_of(name: str, outcome: Outcome, found: str | None = None) -> Done:
    return Done("bench", name, outcome, 1.0, "", found, "", "abc")


def test_a_second_call_goes_on_where_the_first_one_ended(tmp_path: Path) -> None:
    first = of_call(tmp_path)
    first.keep(outcome_of("third", Outcome.CUT), seconds=3)
    first.keep(outcome_of("second", Outcome.INTERRUPTED, "half"), seconds=5)
    first.keep(outcome_of("first", Outcome.DIFFERENT), seconds=7)
    second = of_call(tmp_path)
    assert second.continues == 2
    ended = [second.has_ended(name) for name in ("first", "second", "third", "none")]
    assert ended == [True, False, True, False]
    # Half is more than nothing, and less than all.
    second.keep(outcome_of("second", Outcome.NO_TIME), seconds=1)
    document = json.loads((tmp_path / "summary.json").read_text())
    assert [(one["name"], one["outcome"], one["found"]) for one in document["steps"]] == [
        ("first", "DIFFERENT", None), ("second", "interrupted", "half"), ("third", "cut", None),
    ]  # fmt: skip
    assert document["seconds"] == 8
    second.keep(outcome_of("second", Outcome.OK, "all"), seconds=2)
    assert of_call(tmp_path).continues == 3


@pytest.mark.parametrize(
    "changes",
    [{"digest": "2"}, {"gpu": dataclasses.replace(GPU, gpu="another")}, {"damaged": True}],
    ids=["code", "gpu", "damaged"],
)
def test_other_code_and_another_gpu_begin_again_and_lose_nothing(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    for number in (1, 2):
        before = of_call(tmp_path)
        before.keep(outcome_of("first", Outcome.OK, "all"), seconds=1)
        if changes.get("damaged"):
            (tmp_path / "summary.json").write_text('{"form')
        text = (tmp_path / "summary.json").read_text()
        after = of_call(tmp_path, **{name: value for name, value in changes.items() if name != "damaged"})
        assert (after.continues, after.has_ended("first")) == (0, False)
        assert after.set_aside == tmp_path / f"summary-{number}.json"
        assert after.set_aside.read_text() == text


def test_without_a_repository_the_commit_is_that_of_the_pack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "scripts/one.py"
    source.parent.mkdir()
    source.write_text("1")
    monkeypatch.setattr(code, "REPOSITORY", tmp_path)
    monkeypatch.setattr(code.machine, "commit", lambda: "abc123")
    code.write(tmp_path)
    packed = code.of(tmp_path)
    monkeypatch.setattr(code.machine, "commit", lambda: code.machine.UNKNOWN)
    assert code.of(tmp_path) == packed == code.Code("abc123", code.digest(tmp_path))
    source.write_text("2")
    changed = code.of(tmp_path)
    assert changed.commit == "abc123-dirty" and changed.digest != packed.digest
    # In a repository, that says it.
    monkeypatch.setattr(code.machine, "commit", lambda: "def456")
    assert code.of(tmp_path).commit == "def456"
    assert code.of(None).commit == "def456"
    monkeypatch.setattr(code.machine, "commit", lambda: code.machine.UNKNOWN)
    (tmp_path / "commit.json").write_text("{")
    with pytest.raises(BadInput, match=r"holds a damaged commit\.json"):
        code.of(tmp_path)


# Several ranks on one device


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
    link = "[gpu-check-9](measured/gpu-check-9.json)"
    assert gpu_checks.ranks_table(documents).splitlines()[2:] == [
        f"| {link} | 2 | NCCL 2.28 | experts (EP2) | 1 of 2 | hung |",
        "|  | 2 | NCCL 2.28 | CP2 | 0 of 1 |  |",
    ]
    assert gpu_checks.queues_table(documents).splitlines()[2:] == [f"| {link} | 1 | 1 | 1 of 2 | two |"]
    assert gpu_checks.ranks_table({}) == gpu_checks.queues_table({}) == "Not run on a GPU yet.\n"


# Profiles


def on_device(name: str, stream: int, ts: float, dur: float, cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"stream": stream}}


def on_host(name: str, ts: float, cat: str = "cuda_runtime", dur: float = 1.0) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": {}}


def trace(*events: dict[str, Any]) -> dict[str, Any]:
    marks = [
        on_host("ampipe:forward", 1000.0, "user_annotation", 1000.0),
        on_host("ampipe:backward", 2000.0, "user_annotation", 1000.0),
        # The device's copy of an annotation does not count.
        {**on_device("ampipe:forward", 7, 1500.0, 10.0), "cat": "gpu_user_annotation"},
    ]
    return {"traceEvents": [{"ph": "M", "name": "process_name"}, *marks, *events]}


def test_the_overlap_of_a_trace() -> None:
    found = read_profile(
        trace(
            on_device("gemm", 7, 1000.0, 2000.0),
            on_device("ampipe_spin_vectorized2_kernel", 20, 2500.0, 1000.0),
            # A copy on the link's stream counts as communication.
            on_device("Memcpy DtoD", 20, 3500.0, 500.0, "gpu_memcpy"),
            on_device("gemm", 7, 5000.0, 500.0),
        )
    )
    assert (found.communication_ms, found.compute_ms) == (1.5, 2.5)
    assert found.hidden_share == pytest.approx(1 / 3)
    other_link = on_device("ampipe_spin_vectorized2_kernel", 7, 1500.0, 500.0)
    of_one_stream = trace(on_device("gemm", 7, 1000.0, 500.0), other_link)
    assert read_profile(of_one_stream).hidden_share == 0


def test_waits_of_the_host_are_counted_in_the_pass_only() -> None:
    found = read_profile(
        trace(
            on_host("cudaEventSynchronize", 1100.0),
            on_host("cudaEventSynchronize", 1200.0),
            on_host("cudaLaunchKernel", 1300.0),
            on_host("cudaMemcpyAsync", 1400.0),
            on_host("cudaStreamSynchronize", 2100.0),
            on_host("cuMemcpyDtoH_v2", 2200.0, "cuda_driver"),
            # A wait of the check itself, after the pass.
            on_host("cudaDeviceSynchronize", 3000.0),
        )
    )
    assert found.host_waits == {
        "forward": {"cudaEventSynchronize": 2},
        "backward": {"cudaStreamSynchronize": 1, "cuMemcpyDtoH_v2": 1},
    }
    with pytest.raises(ValueError, match="0 marks"):
        read_profile({"traceEvents": []})


# The table

STORED = {
    step["name"]: Done(**step)
    for name in ("gpu-check-h200", "gpu-check-te-h200")
    for step in json.loads((planning.REPOSITORY / f"docs/measured/{name}.json").read_text())["steps"]
}
"""By name, the steps of two checks of an H200."""


def changed(name: str, **changes: object) -> Done:
    """A step that has found something else."""
    found = json.loads(STORED[name].found or "") | changes
    return dataclasses.replace(STORED[name], found=json.dumps(found))


def with_difference(name: str, difference: float) -> Done:
    """A bench in which the last row of the last case differs from stock."""
    found = json.loads(STORED[name].found or "")
    found["cases"][-1]["rows"][-1]["difference_from_stock"] = difference
    return dataclasses.replace(STORED[name], found=json.dumps(found))


def without_result(outcome: Outcome) -> Done:
    return Done("bench", "the bench", outcome, 12.3, "why", None)


def rows(*done: Done) -> dict[str, tuple[Outcome, str]]:
    found = findings.rows({"steps": [dataclasses.asdict(one) for one in done]})
    return {row.check: (row.outcome, row.finding) for row in found}


def test_every_test_of_a_gpu_has_a_name_in_the_table() -> None:
    modules = (planning.REPOSITORY / "tests/gpu").glob("test_*.py")
    tests = {name for path in modules for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)}
    assert tests == findings._TESTS.keys()


def test_findings_of_runs_on_a_gpu() -> None:
    found = rows(*STORED.values())
    outcome, said = found.pop("CUDA graphs, layers of Transformer Engine")
    assert outcome is Outcome.DIFFERENT
    assert said.startswith("0 of 1 cases; first: test_transformer_engine_under_graphs: RuntimeError: CUDAGen")
    for check, expected in {
        "parity fp32": "10 of 10 cases",
        "CUDA graphs, host time": "1 of 1 cases; host ms of a pass, with graphs: 44.47, 17.78",
        "overlap": "70% of 24.00 ms of communication under 46.68 ms of computation, at least 38% required "
        "(mixtral-8k, emulated:20GB/s, degree 4, cudnn attention)",
        "host waits, forward": "4 for split sizes (4 allowed), others: none",
        "host waits, backward": "0 for split sizes (0 allowed), others: none",
        "peak memory": "stock 6482 MiB; of that: degree 2, schedule ampipe 0.82, degree 4, schedule ampipe "
        "0.71, degree 8, schedule ampipe 0.66",
        "host time per stage, forward": "microseconds: qkv 504, attention 764, route 700, counts 207, "
        "dispatch 280, expert 477, combine 171, merge 153",
        "mixtral-8k, emulated:20GB/s": "stock 64.04 ms; moe-only 1.19x at degree 4 (88% of bound); ampipe "
        "1.18x at degree 2 (91% of bound)",
        "training, FP8, partners": "8 iterations differ at most by: losses 2e-04 (1e-03 allowed), losses of "
        "balance 4e-03 (1e-02 allowed)",
    }.items():
        assert found[check] == (Outcome.OK, expected)
    # That version of docs/measured/partners.py did not prescribe experts in bf16: its numbers show nothing.
    outcome, said = found["partners, mixtral-4k, emulated:20GB/s"]
    assert outcome is Outcome.DIFFERENT
    assert said == (
        "stock 128.0 ms a micro-batch; control 1.00x, stack, degree 2 1.23x, stack, degree 4 0.92x, "
        "partners, megatron-1f1b 1.39x, partners, cut in two 1.29x, partners, searched 1.39x; "
        "stack, degree 2 differs from stock by 7e-01, 0e+00 allowed"
    )
    held = found["memory that torch's allocator held"][1]
    assert held.startswith("stock 8164 MiB, 1439 in pieces, 0 retries; degree 2, ")


def test_every_outcome_is_written_when_it_is_known_and_has_a_row(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import os, pytest\n"
        "@pytest.mark.skip('no flash-attn')\n"
        "def test_the_chosen_kernel_runs(): pass\n"
        "@pytest.mark.parametrize('kernel', ['flash-attn', 'sdpa'])\n"
        "def test_attention_kernel_in_bf16(kernel): kernel == 'sdpa' or pytest.skip('no flash-attn')\n"
        "def test_equals_stock_in_fp32(record_property): record_property('warning', 'none')\n"
        "def test_equals_stock_in_bf16(): assert 1 == 2, 'off by 1'\n"
        "def test_ends_the_process(): os._exit(1)\n"
    )
    file = tmp_path / "lines"
    words = ["-p", "gpu_check.case_lines", "--case-lines", file, "-p", "no:cacheprovider", tmp_path]
    environment = os.environ | {"PYTHONPATH": str(planning.REPOSITORY / "scripts")}
    completed(sys.executable, "-m", "pytest", *words, env=environment, code=1)
    # Cut while it wrote.
    text = file.read_text() + '{"test": "test_equals'
    found = rows(Done("tests", "attention", Outcome.CUT, 9.0, "did not end within 9 s", text))
    outcome, said = found.pop("parity bf16")
    assert outcome is Outcome.DIFFERENT
    assert said.startswith("0 of 1 cases; first: test_equals_stock_in_bf16: ") and "off by 1" in said
    skipped = "1 skipped (Skipped: no flash-attn)"
    assert found == {
        "parity fp32": (Outcome.OK, "1 of 1 cases; warning: none"),
        "attention kernels": (Outcome.OK, f"1 of 1 cases, {skipped}"),
        "the chosen kernel": (Outcome.SKIPPED, f"0 of 0 cases, {skipped}"),
        "tests that did not end": (Outcome.CUT, "1 of 6"),
    }
    failed = rows(changed("training, FP8", failed={"degree 4": "ended with 1: no kernel"}))
    assert failed["training, FP8, degree 4"] == (Outcome.FAILED, "ended with 1: no kernel")


@pytest.mark.parametrize(
    ("step", "changes", "checks"),
    [
        ("profile", {"hidden_share": 0.0}, ["overlap"]),
        ("profile", {"hidden_share": 0.0, "communication_ms": 0.0}, ["overlap"]),
        # 0.375 of the communication must be hidden; less if there is less computation.
        ("profile", {"hidden_share": 0.37}, ["overlap"]),
        ("profile", {"hidden_share": 0.09, "compute_ms": 6.0}, ["overlap"]),
        ("profile", {"hidden_share": 0.1, "compute_ms": 6.0}, []),
        *(
            ("profile", {"host_waits": {"forward": forward, "backward": backward}}, [f"host waits, {wrong}"])
            for forward, backward, wrong in (
                ({"cudaEventSynchronize": 5}, {}, "forward"),
                ({"cudaStreamSynchronize": 1}, {}, "forward"),
                ({}, {"cudaEventSynchronize": 1}, "backward"),
            )
        ),
        *(
            (
                "training, FP8",
                {"differences": {"partners": differences}, "allowed": FAMILIES["FP8"].allowed},
                wrong,
            )
            for differences, wrong in (
                ([2e-5, 2e-2, 0.0, 0.0], ["training, FP8, partners"]),
                ([0.0, 0.0, 2e-5, 0.0], ["training, FP8, partners"]),
                ([0.0, 0.0, 0.0, 0.02], ["training, FP8, partners"]),
                ([math.nan, 0.0, 0.0, 0.0], ["training, FP8, partners"]),
                ([9e-4, 9e-3, 9e-6, 9e-3], []),
            )
        ),
        *(
            (
                "partners, emulated:20GB/s",
                {"differences": {"control": 0.0, "partners, cut in two": difference}, "tolerance": 1e-4},
                wrong,
            )
            for difference, wrong in (
                (9e-5, []),
                (99.0, ["partners, mixtral-4k, emulated:20GB/s"]),
                (math.nan, ["partners, mixtral-4k, emulated:20GB/s"]),
            )
        ),
    ],
)
def test_what_misses_a_requirement_is_reported_as_different(
    step: str, changes: dict[str, Any], checks: list[str]
) -> None:
    found = rows(changed(step, **changes))
    assert [name for name, (outcome, _) in found.items() if outcome is Outcome.DIFFERENT] == checks


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([[7.0, 1.0, 2.0], [6.0, 1.0, 2.0]], [0.0, 0.0, 0.0, 0.0]),
        # The last printed digit of a norm is no difference.
        ([[7.0, 1.0, 2.001], [6.0, 1.0, 2.0]], [0.0, 0.0, 0.0, 0.0]),
        ([[7.0, 1.0, 2.0], [6.0, 1.0, 4.0]], [0.0, 0.0, 0.0, 1.0]),
        ([[7.7, 1.0, 2.0], [6.0, 1.5, 2.0]], [0.1, 0.5, 0.1, 0.0]),
        ([[7.0, 1.0, 2.0], [6.6, 1.0, math.nan]], [0.1, 0.0, 0.0, math.inf]),
    ],
)
def test_trainings_are_compared_by_losses_and_gradient_norms(
    found: list[list[float]], expected: list[float]
) -> None:
    stock = [[7.0, 1.0, 2.0], [6.0, 1.0, 2.0]]
    assert trained._differences(stock, found) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("difference", "outcome"), [(2e-2, Outcome.OK), (99.0, Outcome.DIFFERENT)])
def test_a_bench_whose_numbers_differ_is_reported_as_different(difference: float, outcome: Outcome) -> None:
    (found,) = rows(with_difference("bench mixtral, emulated:20GB/s", difference)).values()
    assert found[0] is outcome
    assert ("ampipe at degree 4 differs from stock by 1e+02" in found[1]) is (outcome is Outcome.DIFFERENT)


@pytest.mark.parametrize(
    ("difference", "outcome"),
    [(0.01, Outcome.OK), (0.04, Outcome.DIFFERENT), (float("nan"), Outcome.DIFFERENT)],
)
def test_kernels_of_attention_are_timed_and_compared(difference: float, outcome: Outcome) -> None:
    case = {
        "name": "8,192 rows",
        "kernels": {
            "cudnn": {"ms": 2.5, "host_us": 91.0, "difference": 0.0},
            "torch-flash-2": {"ms": 3.25, "host_us": 60.0, "difference": difference},
        },
        "control": {"ms": 2.6, "range_ms": [2.5, 2.75], "host_us": 90.0},
        "unusable": {"flash-attn-3": "not installed"},
    }
    text = json.dumps(
        {"allowed": 0.03, "cases": [case, case | {"name": "sinks", "kernels": {}, "control": None}]}
    )
    found = rows(Done("attention", "attention times", Outcome.OK, 9.0, "", text))
    times = (
        "cudnn 2.50 ms (host 91 us); torch-flash-2 3.25 ms (host 60 us); "
        "the first again 2.60 ms, 2.50 to 2.75 (host 90 us); flash-attn-3: not installed"
    )
    said = "" if outcome is Outcome.OK else f"torch-flash-2 differs by {difference:.0e}; "
    assert found == {
        "attention, 8,192 rows": (outcome, said + times),
        "attention, sinks": (Outcome.SKIPPED, "flash-attn-3: not installed"),
    }


PROFILE = STORED["profile"]


@pytest.mark.parametrize(
    ("done", "exit_code"),
    [
        ([PROFILE, STORED["bench mixtral, emulated:20GB/s"]], 0),
        ([PROFILE, without_result(Outcome.SKIPPED)], 0),
        ([without_result(Outcome.SKIPPED)], 3),
        ([PROFILE, without_result(Outcome.NO_TIME)], 3),
        ([PROFILE, without_result(Outcome.CUT)], 3),
        ([PROFILE, without_result(Outcome.INTERRUPTED)], 3),
        ([changed("profile", hidden_share=0.0), without_result(Outcome.OK)], 4),
    ],
)
def test_the_check_prints_a_table_writes_a_summary_and_returns_a_code(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    done: list[Done],
    exit_code: int,
) -> None:
    left = iter(done)
    planned = [Step(one.kind, one.name, (), tmp_path, 1.0, needs=()) for one in done]
    monkeypatch.setattr(command, "plan", lambda *_: [[step] for step in planned])
    monkeypatch.setattr(command, "run", lambda _, around, keep: keep(next(left)))
    monkeypatch.setattr(command.Device, "ask", lambda _: GPU)
    assert command.main(["--output", str(tmp_path / "out")]) == exit_code
    shown = capsys.readouterr().out
    assert "NVIDIA Test · torch 2.11.0 · CUDA 13.0" in shown
    assert findings.rows({"steps": [dataclasses.asdict(done[0])]})[0].check in shown
    written = json.loads((tmp_path / "out/summary.json").read_text())
    assert written["format"] == summary.FORMAT
    assert written["device"]["gpu"] == "NVIDIA Test"
    assert written["steps"] == [dataclasses.asdict(one) for one in done]
    assert written["versions"]["commit"] == code.here().commit
