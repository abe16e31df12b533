"""The script of a Megatron-LM checkout, of every supported version, with AMPipe's launcher or patch.

A run is launched once, for the first test that needs it, and shared.
"""

import functools
import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from megatron_ampipe.cli import main
from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch import script as launcher
from tests.conftest import Command
from tests.forked import REPOSITORY
from tests.megatron.checkout.layout import SCRIPTS, lay_out
from tests.megatron.launcher import (
    MOCK_DATA,
    TINY_GPT,
    TINY_MOE,
    Run,
    assert_same_digits,
    execute,
    pretrain,
    squeezed,
    torchrun_command,
)
from tests.megatrons import NEXT, folder_of, needs_checkout

pytestmark = pytest.mark.timeout(900)

CHECKOUT = Path(__file__).parent / "checkout"
FLAGS = [
    *TINY_GPT,
    *TINY_MOE,
    *MOCK_DATA,
    *shlex.split("--expert-model-parallel-size 2 --attention-dropout 0 --hidden-dropout 0"),
]
DEGREE_4 = ["--ampipe-degree", "4"]
SETTINGS = """\
train-iters: 9
ampipe:
  degree: 4
"""
# --greeting is a flag of the script.
FROM_FILE = shlex.split("--ampipe-config {folder}/settings.yaml --greeting well met")
TRACED = ["--ampipe-trace-dir", "{folder}/trace-{name}"]

LAUNCHER = ("-m", "megatron_ampipe.launch")
BY_HAND = (str(CHECKOUT / "by_hand.py"),)
LAUNCHES: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "0.19": (LAUNCHER, []),
    "0.19-degree4": (LAUNCHER, [*FROM_FILE, *TRACED]),
    "0.18": (LAUNCHER, []),
    "0.18-patched": (BY_HAND, [*DEGREE_4, *TRACED]),
    "0.18-patched-stock": (BY_HAND, []),
    "0.17": (LAUNCHER, []),
    "0.17-degree4": (LAUNCHER, [*FROM_FILE, *TRACED]),
}
"""By the version of the checkout: what runs its script, and flags."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkouts")
    (folder / "settings.yaml").write_text(SETTINGS)
    return folder


def script_of(folder: Path, version: str, *, patched: bool) -> str:
    """The script of a checkout of a version; the checkout is made if there is none."""
    checkout = folder / (f"{version}-patched" if patched else version)
    if not checkout.exists():
        lay_out(checkout, version, copy=patched)
        assert not patched or main(["patch", "apply", str(checkout)]) == 0
    return str(checkout / SCRIPTS[0])


@functools.cache
def launched(folder: Path, name: str) -> Run:
    """A launch of the table."""
    starter, flags = LAUNCHES[name]
    script = script_of(folder, name.partition("-")[0], patched=starter == BY_HAND)
    words = [*FLAGS, *(flag.format(folder=folder, name=name) for flag in flags)]
    run = execute(torchrun_command(*starter, script, *words))
    assert run.exit_code == 0, run.output[-6000:]
    return run


def test_the_script_without_ampipe_equals_the_entry_point_at_degree_1(folder: Path) -> None:
    """The checkout's script and AMPipe's train the same model on the same data, with identical losses."""
    run = launched(folder, "0.19")
    assert run.logged == pretrain(*FLAGS).logged
    assert "1: Megatron's own layers" in run.output


@pytest.mark.parametrize("name", ["0.19-degree4", "0.18-patched", "0.17-degree4"])
def test_degree_4_equals_degree_1(name: str, folder: Path) -> None:
    """Traces of every rank also show that the layers of every rank were pipelined."""
    version = name.partition("-")[0]
    run = launched(folder, name)
    assert_same_digits(launched(folder, version), run, iterations=4)
    assert run.says("chunk boundaries")
    megatron = re.search(r"Megatron(0\.\d+)\.\d+from(\S*?)megatrondegree", squeezed(run.output))
    assert megatron is not None
    assert megatron.groups() == (version, f"{folder}/{name.removesuffix('-degree4')}/")
    for rank in (0, 1):
        events = json.loads((folder / f"trace-{name}" / f"rank{rank}.trace.json").read_text())["traceEvents"]
        assert {event["args"]["layer"] for event in events if "layer" in event.get("args", {})} == {1, 2}


def test_a_prediction_is_compared_with_a_run_as_the_page_says(folder: Path, ampipe: Command) -> None:
    """The commands of docs/tuning.md, for a run with the default stack: all layers share a schedule."""
    launched(folder, "0.19-degree4")
    lines = (REPOSITORY / "docs" / "tuning.md").read_text().splitlines()
    commands = [line for line in lines if line.startswith(("ampipe plan ", "ampipe draw "))]
    plan, draw = (shlex.split(command)[1:] for command in commands)
    assert "traces/resolved.yaml" in plan and "traces/" in draw
    traces, measured = (
        folder / "trace-0.19-degree4",
        REPOSITORY / "docs/measured/results/profile-200mbit.yaml",
    )
    places = {
        "traces/resolved.yaml": traces / "resolved.yaml",
        "cluster.yaml": measured,
        "predicted.json": folder / "predicted.json",
        "traces/": traces,
        "timeline": folder / "timeline",
    }
    assert set(places) <= {*plan, *draw}
    ampipe(*(places.get(word, word) for word in plan))
    shown = ampipe(*(places.get(word, word) for word in draw)).out
    assert "2 layers with one schedule" in " ".join(shown.split())
    rows = [line for line in shown.splitlines() if "first to last" in line]
    assert len(rows) == 2
    assert (folder / "timeline.png").stat().st_size > 0


def test_a_patched_tree_without_ampipe_is_left_to_megatron(folder: Path) -> None:
    assert launched(folder, "0.18-patched-stock").logged == launched(folder, "0.18").logged


@pytest.mark.parametrize(
    ("starter", "words", "said"),
    [
        (LAUNCHER, ["--data-path", "{folder}/half"], "dataset {folder}/half: "),
        (BY_HAND, [*MOCK_DATA, "--lrr", "1"], "argument --lrr 1: there is no such flag"),
    ],
    ids=["launcher", "patched"],
)
def test_what_cannot_train_is_refused_as_by_the_entry_point(
    starter: tuple[str, ...], words: list[str], said: str, folder: Path
) -> None:
    (folder / "half.bin").write_bytes(bytes(64))
    script = script_of(folder, "0.18", patched=starter == BY_HAND)
    flags = [*TINY_GPT, *TINY_MOE, *(word.format(folder=folder) for word in words), "--ampipe-degree", "2"]
    run = execute(torchrun_command(*starter, script, *flags, num_ranks=1))
    assert f"error: {said.format(folder=folder)}" in run.output, run.output[-4000:]
    assert "exitcode  : 2" in run.output


@pytest.mark.parametrize("name", ["0.19-degree4", "0.17-degree4"])
def test_settings_of_a_file_are_used_and_recorded(name: str, folder: Path) -> None:
    """A flag of the script stays on the command line and is passed to the script."""
    run = launched(folder, name)
    lines = (folder / f"trace-{name}" / "resolved.yaml").read_text().splitlines()
    source = folder / "settings.yaml"
    version = name.removesuffix("-degree4")
    assert lines[0].startswith(f"# A run of {folder}/{version}/pretrain_gpt.py on 2 ranks with ")
    assert f"megatron-core {version}." in lines[0]
    assert "# Not below, because neither Megatron nor AMPipe has such flags: --greeting well met" in lines
    assert "train-iters: 4  # command line" in lines
    assert f"  degree: 4  # {source}:3" in lines
    if name.startswith("0.19"):
        assert "well met" in run.output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "script (not given): is not a script. Name it before all flags"),
        (["--ampipe-degree", "4"], "script --ampipe-degree: is not a script"),
    ],
)
def test_a_script_is_needed(words: list[str], expected: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert launcher.main(words) == 2
    assert f"error: {expected}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("source", "flags", "expected"),
    [
        ("print('trained')", DEGREE_4, "did not read its arguments with Megatron's parser"),
        (
            "from megatron.training.arguments import parse_and_validate_args\n"
            "raise SystemExit(0 if parse_and_validate_args() else 1)",
            [*FLAGS, *DEGREE_4, "--expert-model-parallel-size", "1"],
            "it builds no GPT or hybrid model of Megatron's",
        ),
    ],
    ids=["no-parser", "no-model"],
)
def test_a_run_that_does_not_use_ampipe_fails(
    source: str, flags: list[str], expected: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    run = execute(torchrun_command("-m", "megatron_ampipe.launch", str(script), *flags, num_ranks=1))
    assert run.exit_code == 1
    assert expected in run.output
    assert "exitcode  : 2" in run.output


def test_another_model_is_refused_before_it_trains() -> None:
    session = launcher.TrainingSession([], script="train.py")
    session.context, session.num_models = "pipelined", 1
    with pytest.raises(BadInput, match="it trains a Linear, and only GPT and hybrid models can be pipelined"):
        session.set_up(lambda: ([torch.nn.Linear(2, 2)], None, None))


NEXT_FLAGS = shlex.split(
    "--num-layers 4 --position-embedding-type rope --mamba-head-dim 16 --mamba-num-groups 2 "
    "--mamba-state-dim 16"
)
NEXT_SCRIPTS = {
    "pretrain_gpt.py": "",
    "pretrain_hybrid.py": "--hybrid-layer-pattern M*EM*-*E --normalization RMSNorm",
}


@functools.cache
def run_of_next(script: str, added: str) -> Run:
    """One run of a script of the checkout that ``AMPIPE_MEGATRON`` names, as it is: the next Megatron."""
    folder = folder_of(NEXT)
    assert folder is not None
    words = [*FLAGS, *NEXT_FLAGS, *shlex.split(NEXT_SCRIPTS[script]), *shlex.split(added)]
    run = execute(torchrun_command(*LAUNCHER, str(folder / script), *words))
    assert run.exit_code == 0, run.output[-6000:]
    return run


@needs_checkout
@pytest.mark.parametrize("script", NEXT_SCRIPTS)
@pytest.mark.parametrize(
    "added", ["--ampipe-degree 4 --ampipe-stack 1", "--ampipe-degree 2 --ampipe-stack all"]
)
def test_scripts_of_the_next_megatron_train_like_stock(script: str, added: str) -> None:
    ours = run_of_next(script, added)
    assert_same_digits(run_of_next(script, ""), ours, iterations=4)
    assert ours.says(f"Megatron {NEXT}")
