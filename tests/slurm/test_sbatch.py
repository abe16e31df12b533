"""``ampipe sbatch``: the shipped scripts, the site's file, refused input, the check of the flags."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ampipe.tools import sbatch_command
from tests.conftest import Command
from tests.slurm.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "scripts/slurm").glob("*.sbatch"))
FLAGS = ["--no-check", "--", "--lr", "1e-4"]
NODES = ["sbatch", "--nodes", "2"]
GPUS = ["--gpus-per-node", "8"]


Script = Callable[..., str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The submission folder, with files."""
    files = {
        "small.yaml": "num-layers: 2\nhidden-size: 64\n",
        "data.yaml": "lr: 1.0e-4\nsave-interval: 50\n",
        "cluster.yaml": "ranks_per_node: 4\nflags:\n  bf16: true\n",
        "saves.yaml": "num-layers: 2\nsave: here\n",
        "odd.yaml": "ranks_per_node: true\nflags:\n  bf16: true\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def script(ampipe: Command) -> Script:
    """The script for two nodes, without a check of these flags."""
    return lambda *words, flags=(): ampipe(*NODES, *words, *FLAGS, *flags).out


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_scripts_are_the_output_of_their_commands(
    path: Path, monkeypatch: pytest.MonkeyPatch, ampipe: Command
) -> None:
    """To regenerate them, run the command in their header."""
    monkeypatch.chdir(ROOT)
    text = path.read_text()
    command = re.search(r"Made by:\n#   ampipe (sbatch .*)\n", text)
    assert command is not None
    words = shlex.split(command[1])
    assert words[words.index("--output") + 1] == path.relative_to(ROOT).as_posix()
    # Not written, because the script is also printed.
    monkeypatch.setattr("megatron_ampipe.files.outputs.write_text", lambda path, script, mode: None)
    # Whether Megatron takes these models and runs is tested in tests/megatron/test_settings.py.
    monkeypatch.setattr(sbatch_command, "_check_training", lambda arguments, words: None)
    assert ampipe(*words).out == text


@pytest.mark.skipif(
    not Path(sys.executable).with_name("shellcheck").exists(), reason="install the [test] extra"
)
@pytest.mark.parametrize("words", [[], ["--container", "/images/of us", "--mount", "/a:/b,/c:/d"]])
def test_scripts_with_special_characters_pass_shellcheck(words: list[str], script: Script) -> None:
    odd = ["--folder", "a folder/it's $HOME", "--sbatch-option=--qos=high"]
    text = script(*GPUS, *words, *odd, flags=["$(x) 'y'"])
    # SC2016 is about '$' in single quotes, which is intended here.
    command = [Path(sys.executable).with_name("shellcheck"), "--exclude=SC2016", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "\n#SBATCH --qos=high\n#" in text and "run_dir='a folder/it'\"'\"'s $HOME'\n" in text
    assert """    --lr 1e-4 '$(x) '"'"'y'"'"''\n""" in text
    assert ("--container-mounts" in text) == bool(words)


ODD_TEXT = "it's\n$HOME\r#SBATCH --nodes=9 \u2028\t\"\\"
"""For every text that a user gives, if it is not refused."""


def test_no_text_of_the_user_reaches_another_line_of_the_script(folder: Path, script: Script) -> None:
    """Bash reads back each word as it was given, and SLURM the same directives."""
    (folder / ODD_TEXT).write_text("num-layers: 2\n")
    setup = ["export GREETING='hello'", 'echo "$GREETING" # a comment']
    plain = script(
        *GPUS, "--setup", setup[0], "--setup", setup[1], "--job-name", "job", "--container", "image"
    )
    words = ["--model", ODD_TEXT, "--job-name", "job", "--container", ODD_TEXT]
    text = script(*GPUS, "--setup", setup[0], "--setup", setup[1], *words, flags=["--title", ODD_TEXT])
    before = [one.partition("\nset -euo pipefail\n")[0].split("\n#\n", 1) for one in (plain, text)]
    assert [directives for _, directives in before] == [before[0][1]] * 2
    assert all(line.startswith("#") for line in before[1][0].split("\n"))
    header = re.search(r"^#   (ampipe .*)$", text, re.M)
    arrays = re.findall(r"^(\w+=\($.*?^\))$", text, re.M | re.S)
    assert header is not None and len(arrays) == 2
    shown = [f"printf '%s\\0' {header[1]}", arrays[0], "printf '%s\\0' \"${training[@]}\""]
    shown += [arrays[1].replace("$(realpath", "$(echo"), "printf '%s\\0' \"${srun_options[@]}\""]
    bash = ["bash", "-c", "checkpoints=x run_dir=y; " + "\n".join(shown)]
    done = subprocess.run(bash, capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"})
    # Not as text, which would replace line breaks.
    read = done.stdout.decode().split("\0")
    assert read.count(ODD_TEXT) == 5, "model, container and flag in the header, model and flag"
    assert f"--container-image={ODD_TEXT}" in read


def test_a_model_in_another_folder_names_no_folder(folder: Path, ampipe: Command) -> None:
    (folder / "...yaml").write_text("num-layers: 2\n")
    text = ampipe(*NODES, *GPUS, "--model", "...yaml", *FLAGS).out
    assert "#SBATCH --job-name=ampipe\n" in text and "run_dir=runs/ampipe/$" in text


def test_files_are_passed_to_the_training_run_in_order(folder: Path, script: Script) -> None:
    text = script("--model", "small.yaml", "--run", "data.yaml", "--cluster", "cluster.yaml")
    assert "    --ampipe-config small.yaml cluster.yaml data.yaml\n" in text
    assert "--save-interval" not in text, "the file sets it"
    assert "#SBATCH --gpus-per-node=4\n" in text and "--nproc-per-node 4 " in text
    # SLURM accepts only one memory option.
    assert "--mem=" not in script(*GPUS, "--sbatch-option=--mem-per-gpu=64G")


def test_a_site_sets_the_options_and_the_command_line_wins(
    folder: Path, ampipe: Command, script: Script
) -> None:
    """With the example of the docs, which explain every argument."""
    page = (ROOT / "docs/slurm.md").read_text()
    (example,) = re.findall(r"^```text\n(.*?)^```", page, re.M | re.S)
    (folder / "site.args").write_text(example)
    text = script("@site.args")
    directives = set(re.findall(r"^#SBATCH (.*)$", text, re.M))
    expected = "--account=moe --partition=gpu --gpus-per-node=8 --time=2-00:00:00 --qos=long"
    assert {*expected.split(), "--exclude=node[13,77]", "--signal=B:USR1@900"} <= directives
    assert "\nexport NCCL_SOCKET_IFNAME=ib0\ndcgmi diag -r 1\ntrap - ERR\n" in text
    words = ["--account", "you", "--time", "12:00:00", "--setup", "export X=1", "--max-restarts", "0"]
    text = script("@site.args", *words)
    assert {"--account=you", "--time=12:00:00"} <= set(re.findall(r"^#SBATCH (.*)$", text, re.M))
    assert "\ndcgmi diag -r 1\nexport X=1\n" in text and "max_restarts=0\n" in text
    names = set(re.findall(r"^  (--[\w-]+)", ampipe("sbatch", "--help").out, re.M))
    assert names and {name for name in names if f"`{name}" not in page} == set()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (GPUS, "nothing to train: give --model"),
        (["--model", "small.yaml"], "add --gpus-per-node 8, or a cluster file"),
        (["--cluster", "cluster.yaml", *GPUS, *FLAGS], "ranks_per_node 4 must be --gpus-per-node"),
        ([*GPUS, "--time", "5", *FLAGS], "--time: '5' is not valid; write for example 24:00:00"),
        ([*GPUS, "--time", "0:05:00", *FLAGS], "--save-before-end 300 s is not less than --time 0:05:00"),
        ([*GPUS, "--mount", "/a:/b", *FLAGS], "--mount has no effect without --container IMAGE"),
        ([*GPUS, "--sbatch-option=qos", *FLAGS], "write for example --sbatch-option=--qos=high"),
        ([*GPUS, "--model", "saves.yaml"], "saves.yaml: save is set by the job script"),
        ([*GPUS, "--", "--ampipe-config", "saves.yaml"], "--ampipe-config is set by the job script"),
        ([*GPUS, "--", "--save=x"], "--save is set by the job script"),
        # Text that would become other lines of the script.
        ([*GPUS, "--setup", "true\ntouch hacked", *FLAGS], "'true\\ntouch hacked' is not one line: it has a"),
        ([*GPUS, "--setup", "module load \\", *FLAGS], "ends with a backslash, which would join it with"),
        ([*GPUS, "--setup", "END_OF_NODE_SCRIPT", *FLAGS], "is the word that ends these lines in the script"),
        ([*GPUS, "--setup", "echo 'it", *FLAGS], "--setup: these lines are not complete commands of bash: "),
        ([*GPUS, "--setup", "cat <<END", *FLAGS], "--setup: these lines are not complete commands of bash: "),
        ([*GPUS, "--folder", "a\nb", *FLAGS], "--folder: 'a\\nb' is not valid; write for example runs/first"),
        ([*GPUS, "--folder=-rf", *FLAGS], "--folder: '-rf' is not valid; write for example runs/first"),
        ([*GPUS, "--job-name", "a\n#SBATCH --nodes=9", *FLAGS], "is not valid; write for example moe-1"),
        ([*GPUS, "--sbatch-option=--qos=x\nrm", *FLAGS], "write for example --sbatch-option=--qos=high"),
        (
            [*GPUS, "--sbatch-option=--nodes=9", *FLAGS],
            "--sbatch-option=--nodes=9: the job script sets --nodes",
        ),
        (
            [*GPUS, "--container", "i", "--folder", "a:b", *FLAGS],
            "--folder a:b cannot be mounted: pyxis splits",
        ),
        (["--cluster", "odd.yaml", *FLAGS], "ranks_per_node True must be --gpus-per-node, a whole number"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_refused(words: list[str], message: str, folder: Path, ampipe: Command) -> None:
    assert message in " ".join(ampipe(*NODES, *words, code=2).err.split())


def test_without_a_request_nothing_is_submitted_and_a_refusal_of_sbatch_is_an_error(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "cluster")
    done = cluster.ampipe_sbatch(*NODES[1:], *GPUS, "--output", "job.sbatch", *FLAGS)
    assert done.returncode == 0, done.stderr
    assert (cluster.folder / "job.sbatch").read_text() == done.stdout
    assert "not submitted. Run: sbatch job.sbatch\n" in done.stderr
    assert not cluster.submitted
    done = cluster.ampipe_sbatch(*NODES[1:], *GPUS, "--submit", "--sbatch-option=--nonsense=1", *FLAGS)
    assert done.returncode == 3
    assert "sbatch refused the script: " in done.stderr and "--nonsense=1" in done.stderr
    assert not cluster.submitted


@pytest.mark.skipif(shutil.which("sbatch") is not None, reason="needs a machine without SLURM")
def test_without_slurm_nothing_can_be_submitted(ampipe: Command) -> None:
    assert "--output job.sbatch" in ampipe(*NODES, "--submit", *GPUS, *FLAGS, code=1).err


def test_megatron_refuses_a_value_of_a_file_with_its_line(folder: Path, ampipe: Command) -> None:
    """With Megatron, in a separate process. How it checks is tested in tests/megatron/test_settings.py."""
    (folder / "run.yaml").write_text("train-iters: 10\nlr: abc\n")
    shown = ampipe(*NODES, *GPUS, "--model", "mixtral-8x7b", "--run", "run.yaml", code=2)
    assert shown.out == "" and shown.err.startswith("ampipe: run.yaml:2: --lr abc: is not a number. ")
    assert shown.err.endswith("To submit it anyway, add --no-check.\n")


def test_where_megatron_is_absent_a_note_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ampipe: Command
) -> None:
    (folder / "fake/torch").mkdir(parents=True)
    (folder / "fake/torch/__init__.py").write_text("raise ImportError('not on this login node')\n")
    monkeypatch.setenv("PYTHONPATH", f"{folder}/fake{os.pathsep}{ROOT}")
    notes = ampipe(*NODES, *GPUS, "--", "--lr", "1e-4").err
    assert "note: 'ampipe config' cannot check the training flags here: " in notes
    assert "not on this login node" in notes


RECIPE = """\
ENV_VARS:
  NVTE_FUSED_ATTN: '1'
  CUDA_DEVICE_MAX_CONNECTIONS: '1'
ARGS:
  num_layers: 2
  bf16: true
  overlap_p2p: true
  load: ${NOWHERE_SET}
  save: here
"""


def test_a_recipe_gives_flags_nodes_and_variables(folder: Path, ampipe: Command) -> None:
    (folder / "bf16_16GPU.yaml").write_text(RECIPE)
    words = ["--recipe", "bf16_16GPU.yaml", "--without", "overlap_p2p", *GPUS]
    said = ampipe("sbatch", *words, *FLAGS)
    assert "#SBATCH --nodes=2\n" in said.out and "#SBATCH --job-name=bf16_16GPU\n" in said.out
    assert "    --num-layers 2\n    --bf16\n    --lr 1e-4\n" in said.out
    assert "\nexport NVTE_FUSED_ATTN=1\n" in said.out and "export CUDA_DEVICE" not in said.out
    assert "--save here" not in said.out and "overlap-p2p" not in said.out
    for note in (
        "bf16_16GPU.yaml:8: --load is left out: the variable NOWHERE_SET is not set",
        "bf16_16GPU.yaml:9: --save is set by the job script",
        "CUDA_DEVICE_MAX_CONNECTIONS of the recipe is left out: one hardware queue",
    ):
        assert f"note: {note}" in said.err
    for wrong, part in (
        (["--model", "small.yaml", *GPUS], "leave out --model small.yaml"),
        (["--gpus-per-node", "5"], "16 GPUs, which 5 of a node do not divide"),
    ):
        refused = ampipe("sbatch", "--recipe", "bf16_16GPU.yaml", *wrong, *FLAGS, code=2)
        assert part in refused.err
    assert "add --nodes N" in ampipe("sbatch", "--model", "small.yaml", *GPUS, *FLAGS, code=2).err
