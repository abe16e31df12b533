"""``scripts/gpu_check.sh`` without a GPU: wheels, steps and their time limits, several calls."""

import dataclasses
import importlib.util
import json
import os
import re
import shutil
import sys
import sysconfig
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import step_kinds

from gpu_check import __main__ as command
from gpu_check import code, steps, summary, wheels
from gpu_check import plan as planning
from gpu_check.families import FAMILIES
from gpu_check.plan import Step, calls, chosen, plan
from gpu_check.steps import Device, Done, Outcome, Surroundings, run
from megatron_ampipe.cli import build_parser
from megatron_ampipe.errors import BadInput
from megatron_ampipe.tools import bench_command
from megatron_ampipe.tools.measuring import machine
from megatron_ampipe.tools.measuring.grid import find_grid, read_grid
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


def test_the_steps_use_what_exists(monkeypatch: pytest.MonkeyPatch) -> None:
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
            monkeypatch.setattr(machine, "num_gpus", lambda: 1)
            job = bench_command._job(parsed)
            assert job.on_cuda and job.emulates_peers
            has_graphs = {variant.graphs for variants in job.variants for variant in variants}
            assert has_graphs == {False, "--cuda-graph-impl" in step.command}
    named = {word for step in STEPS for word in step.command if word.startswith("tests/gpu")}
    assert named == {
        f"tests/gpu/{path.name}" for path in (planning.REPOSITORY / "tests/gpu").glob("test_*.py")
    }


def test_what_has_never_run_comes_first_and_fifteen_minutes_are_planned() -> None:
    planned = calls(PLANNED)
    # Whole passes as graphs, then what else needs several ranks.
    assert [step.name for line in planned[:10] for step in line.steps] == [
        "bench mixtral, emulated:20GB/s", "partners, emulated:20GB/s", "training, two ranks, fixed rows",
        "bench deepseek, emulated:20GB/s", "bench paper, emulated:20GB/s", "bench mixtral, emulated:50GB/s",
        "bench deepseek, emulated:50GB/s", "2 ranks", "training, two ranks", "4 ranks",
    ]  # fmt: skip
    assert {line.call for line in planned} == {1, 2, None}
    by_call = {call: [line for line in planned if line.call == call] for call in (1, 2)}
    for lines in by_call.values():
        assert sum(max(step.limit_s for step in line.steps) for line in lines) <= planning.BUDGET_S < 600
    assert max(line.until_s for line in planned if line.call) <= planning.DEVICE_S
    # All blocks with whole passes as graphs, and real NCCL between two ranks, are in time.
    in_time = {step.name for line in planned if line.call for step in line.steps}
    with_graphs = {step.name for step in STEPS if "--cuda-graph-impl" in step.command}
    assert with_graphs - in_time == {
        "bench mixtral, emulated:20GB/s:nccl", "bench paper, emulated:20GB/s:nccl",
    }  # fmt: skip
    assert "2 ranks" in in_time
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
        "stack, degree 2, whole graphs": "needs a GPU and layers in 16 bit",
        "stack, degree 4, whole graphs": "needs a GPU and layers in 16 bit",
        "partners, megatron-1f1b, whole graphs": "needs a GPU and layers in 16 bit",
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
