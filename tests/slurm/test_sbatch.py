"""``ampipe sbatch``: the shipped scripts, refused input, and that nothing is submitted without a request."""

from __future__ import annotations

import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ampipe.cli import main
from tests.slurm.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "scripts/slurm").glob("*.sbatch"))
FLAGS = ["--no-check", "--", "--lr", "1e-4"]
"""The check itself is tested in test_preflight.py."""
GPUS = ["--gpus-per-node", "8"]
IMAGE = ["--container", "./image.sqsh"]
COMMAND = [sys.executable, "-m", "megatron_ampipe.cli", "sbatch"]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model file in the working directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.yaml"
    path.write_text("num-layers: 2\nhidden-size: 64\n")
    return path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_scripts_are_the_output_of_their_commands(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To regenerate them, run the command in their header."""
    monkeypatch.chdir(ROOT)
    text = path.read_text()
    command = re.search(r"Made by:\n#   (ampipe sbatch .*)\n", text)
    assert command is not None
    words = shlex.split(command[1])[1:]
    assert words[words.index("--output") + 1] == path.relative_to(ROOT).as_posix()
    # Not written, because the script is also printed.
    monkeypatch.setattr("megatron_ampipe.files.outputs.write_text", lambda path, script, mode: None)
    # Whether Megatron takes these models and runs is tested in tests/megatron/test_settings.py.
    monkeypatch.setattr("megatron_ampipe.tools.slurm.preflight._ask_megatron", lambda words, ranks: None)
    assert main(words) == 0
    assert capsys.readouterr().out == text


def test_there_is_a_script_for_every_kind_of_job() -> None:
    assert {path.stem for path in SHIPPED} == {"one-node", "many-nodes", "container"}


@pytest.mark.skipif(
    not Path(sys.executable).with_name("shellcheck").exists(), reason="install the [test] extra"
)
@pytest.mark.parametrize("words", [[], ["--container", "/images/of us", "--mount", "/a:/b,/c:/d"]])
def test_scripts_with_special_characters_pass_shellcheck(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = ["--folder", "a folder/it's $HOME", "--sbatch-option=--qos=high", "--account", "me"]
    assert main(["sbatch", "--nodes", "2", "--gpus-per-node", "8", *words, *odd, *FLAGS, "$(x) 'y'"]) == 0
    script = capsys.readouterr().out
    shellcheck = Path(sys.executable).with_name("shellcheck")
    # SC2016 is about '$' in single quotes, which is intended here.
    command = [shellcheck, "--exclude=SC2016", "-"]
    done = subprocess.run(command, input=script, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "\n#SBATCH --qos=high\n#" in script and "\n#SBATCH --account=me\n" in script
    assert "run_dir='a folder/it'\"'\"'s $HOME'\n" in script
    assert """    --lr 1e-4 '$(x) '"'"'y'"'"''\n""" in script
    assert ("--container-mounts" in script) == bool(words)


def test_files_are_passed_to_the_training_run_in_order(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model.parent / "data.yaml").write_text("lr: 1.0e-4\nsave-interval: 50\n")
    words = ["sbatch", "--no-check", "--model", "small.yaml", "--run", "data.yaml", "--nodes", "1"]
    words += ["--gpus-per-node", "2"]
    assert main(words) == 0
    script = capsys.readouterr().out
    assert "    --ampipe-config small.yaml data.yaml\n" in script
    assert "--save-interval" not in script, "the file sets it"
    assert "#SBATCH --job-name=small\n" in script and "run_dir=runs/small/${SLURM_ARR" in script
    assert main([*words, "--save-interval", "7"]) == 0
    assert '--load "$checkpoints" --save-interval 7\n' in capsys.readouterr().out


def test_a_cluster_file_gives_the_number_of_gpus(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model.parent / "cluster.yaml").write_text("ranks_per_node: 4\nflags:\n  bf16: true\n")
    assert (
        main(["sbatch", "--no-check", "--model", "small.yaml", "--nodes", "1", "--cluster", "cluster.yaml"])
        == 0
    )
    script = capsys.readouterr().out
    assert "#SBATCH --gpus-per-node=4\n" in script and "--nproc-per-node 4 " in script
    assert "--ampipe-config small.yaml cluster.yaml\n" in script


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus-per-node", "8"], "--model (not given): there is nothing to train. Give --model"),
        (
            ["--model", "small.yaml"],
            "--gpus-per-node (not given): nothing says how many ranks a node gets. Add",
        ),
        (
            ["--model", "mixtral-8x7", "--gpus-per-node", "8"],
            "is neither a file nor a built-in model. Did you mean mixtral-8x7b?",
        ),
        (["--cluster", "four.yaml", "--gpus-per-node", "8", *FLAGS], "differs from ranks_per_node 4 of four"),
        (["--cluster", "none.yaml", *FLAGS], "none.yaml:2:"),
        ([*GPUS, "--time", "a day", *FLAGS], "--time a day: is not a duration"),
        (
            [*GPUS, "--time", "25:99:99", *FLAGS],
            "--time 25:99:99: has 99 minutes, which must be less than 60",
        ),
        (
            [*GPUS, "--time", "1:00", "--save-before-end", "600", *FLAGS],
            "--save-before-end 600: is not less than the 60 s of --time 1:00. Use --save-before-end 15",
        ),
        ([*GPUS, "--partition", "a b", *FLAGS], "--partition a b: contains a blank"),
        ([*GPUS, "--mem", "lots", *FLAGS], "--mem lots: is not an amount of memory"),
        ([*GPUS, "--gres", "gpu:8", *FLAGS], "--gres gpu:8: is not the name of a resource"),
        ([*GPUS, "--exclude", "node 1", *FLAGS], "--exclude node 1: contains a blank"),
        ([*GPUS, "--setup", "module load 'cuda", *FLAGS], "is not valid shell (line 1: unexpected EOF"),
        ([*GPUS, "--setup", "END_OF_NODE_SCRIPT", *FLAGS], "is the delimiter of the node's script"),
        ([*GPUS, "--health-check", " ", *FLAGS], "--health-check (empty): is not valid shell"),
        ([*GPUS, "--job-name", "a/b", *FLAGS], "--job-name a/b: is not valid in a file name"),
        ([*GPUS, "--folder", "", *FLAGS], "--folder (empty): is not a folder name"),
        ([*GPUS, "--chain", "3", *FLAGS], "--chain 3: needs a folder that all its jobs share"),
        (
            [*GPUS, "--chain", "3", "--folder", "x", "--sbatch-option=--array=1-3", *FLAGS],
            "--chain 3: makes each job wait for the one before",
        ),
        ([*GPUS, "--mount", "/a:/b", *FLAGS], "--mount /a:/b: has no effect without a cont"),
        ([*GPUS, *IMAGE, "--mount", "foo", *FLAGS], "--mount foo: is not FROM:TO, two absolute paths"),
        ([*GPUS, *IMAGE, "--mount", "/a:/b,/c:d", *FLAGS], "--mount /c:d: is not FROM:TO"),
        ([*GPUS, "--container", "", *FLAGS], "--container (empty): is not an image name"),
        ([*GPUS, "--container", "x.sqsh", *FLAGS], "pyxis treats a name that does not begin with / or . as"),
        ([*GPUS, "--sbatch-option=qos", *FLAGS], "does not begin with --"),
        ([*GPUS, "--sbatch-option=--mem=0", *FLAGS], "has a separate argument. Use --mem instead"),
        ([*GPUS, "--sbatch-option=--signal=9", *FLAGS], "is set by the job script, which depends on it"),
        ([*GPUS, "--model", "saves.yaml"], "saves.yaml:2: save: is set by the job script"),
        ([*GPUS, "--", "--save=x"], "flag --save=x: is set by the job script"),
        ([*GPUS, "--", "--ampipe-config", "saves.yaml"], "saves.yaml:2: save: is set by the job script"),
        ([*GPUS, "--model", "small.yaml", "--", "lr", "3"], "argument lr: does not belong to a flag"),
        (["--gpus-per-node", "8", "--output", "no/job.sbatch", *FLAGS], "/no does not exist. Create it, or"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_refused_with_a_remedy(
    words: list[str], message: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model.parent / "four.yaml").write_text("ranks_per_node: 4\n")
    (model.parent / "none.yaml").write_text("a: 1\nranks_per_node: many\n")
    (model.parent / "saves.yaml").write_text("num-layers: 2\nsave: here\n")
    assert main(["sbatch", "--nodes", "2", *words]) == 2
    assert message in capsys.readouterr().err


def test_without_a_request_the_script_is_shown_and_not_submitted(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "cluster")
    words = ["--nodes", "2", "--gpus-per-node", "1", "--output", "job.sbatch", *FLAGS]
    done = cluster.ampipe_sbatch(*words)
    assert done.returncode == 0, done.stderr
    assert (cluster.folder / "job.sbatch").read_text() == done.stdout
    unasked = cluster.ampipe_sbatch(*words[:4], *FLAGS)
    assert unasked.returncode == 0
    assert "it cannot ask. Add --submit, or --output job.sbatch.\nnot submitted\n" in unasked.stderr
    assert cluster.state == "PENDING" and cluster.events == ""
    assert not list(cluster.folder.glob("*.partial"))


@pytest.mark.parametrize(("answer", "submitted"), [("y", True), ("", False), ("no", False)])
def test_on_a_terminal_it_asks(answer: str, submitted: bool, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "cluster", fake_python="exit 0")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "--nodes", "1", "--gpus-per-node", "1", *FLAGS],
        cwd=cluster.folder, env=cluster.environment, stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while b"Submit it? [y/N] " not in shown:
        shown += os.read(ours, 65536)
    os.write(ours, answer.encode() + b"\n")
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:
        # The other end of the terminal is closed.
        pass
    os.close(ours)
    assert process.wait(timeout=30) == 0
    assert b"#SBATCH --nodes=1" in shown
    assert (b"Submitted batch job" in shown) == submitted
    if submitted:
        assert cluster.wait() == "COMPLETED"
    assert (cluster.state == "COMPLETED") == submitted


def test_a_script_that_sbatch_refuses_is_an_error(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "cluster")
    words = ["--submit", "--nodes", "2", "--gpus-per-node", "1", "--sbatch-option=--nonsense=1", *FLAGS]
    done = cluster.ampipe_sbatch(*words)
    assert done.returncode == 3
    assert "sbatch refused the script: " in done.stderr and "--nonsense=1" in done.stderr


@pytest.mark.skipif(shutil.which("sbatch") is not None, reason="needs a machine without SLURM")
def test_without_slurm_the_message_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sbatch", "--submit", "--nodes", "2", "--gpus-per-node", "1", *FLAGS]) == 1
    assert "--output job.sbatch" in capsys.readouterr().err
    assert main(["sbatch", "--nodes", "2", "--gpus-per-node", "1", *FLAGS]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("#!/usr/bin/env bash\n")
    assert "Write the script with --output job.sbatch and submit that.\nnot submitted\n" in shown.err


def test_the_template_is_in_the_package() -> None:
    """Also in a wheel: setup.py lists it as package data."""
    setup = (ROOT / "setup.py").read_text()
    assert '"megatron_ampipe.tools.slurm": ["*.j2"]' in setup
