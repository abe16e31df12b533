"""``ampipe sbatch``: durations, images, site files, mounts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_ampipe.cli import main
from megatron_ampipe.errors import BadInput
from megatron_ampipe.tools.slurm import syntax
from megatron_ampipe.tools.slurm.site import OPTIONS

ROOT = Path(__file__).resolve().parents[2]
NODES = ["sbatch", "--no-check", "--nodes", "2"]
FLAGS = ["--", "--lr", "1e-4"]


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("90:00", 5400),
        ("48:00:00", 172800),
        ("2-00", 172800),
        ("1-12:30", 131400),
        ("1-00:00:01", 86401),
        ("UNLIMITED", None),
        ("infinite", None),
    ],
)
def test_durations_are_parsed_like_slurm(time: str, seconds: int | None) -> None:
    assert syntax.seconds_of("--time", time) == seconds


@pytest.mark.parametrize(
    "time",
    [
        "",
        "a day",
        "1:2:3:4",
        "-1",
        "1.5",
        "1:60",
        "1:60:00",
        "1:00:60",
        "1-24",
        "1-23:60",
        "24h",
        "0",
        "0:00",
    ],
)
def test_other_durations_are_refused(time: str) -> None:
    with pytest.raises(BadInput, match=r"--time .*Write"):
        syntax.seconds_of("--time", time)


@pytest.mark.parametrize(
    ("image", "note"),
    [
        ("nvcr.io#nvidia/pytorch:25.01-py3", None),
        ("docker://me@registry.org#team/image", None),
        ("ubuntu:24.04", None),
        ("nvidia/cuda", None),
        ("/images/x.sqsh", None),
        ("./x.sqsh", None),
        ("nvcr.io/nvidia/pytorch:25.01-py3", "nvcr.io#nvidia/pytorch:25.01-py3"),
        ("docker://localhost:5000/x", "localhost:5000#x"),
    ],
)
def test_an_image_name_that_older_enroot_misreads_gives_a_note(image: str, note: str | None) -> None:
    said = syntax.check_image(image)
    assert (said is None) == (note is None)
    assert note is None or (said is not None and said.endswith(f": {note}"))


# A file of site settings


SITE = """
# One for all jobs of the cluster.
account: me
partition: gpu
gpus-per-node: 4
gres: gpu:a100
mem: 900G
exclude: node[3,7-9]
time: 12:00:00
setup:
  - module load cuda/12.4
  - source /sw/venv/bin/activate
health-check: ampipe doctor --quick
sbatch-option: --qos=high
save-before-end: 600
max-restarts: 3
"""


def _script(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*NODES, *words, *FLAGS]) == 0
    return capsys.readouterr().out


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "site.yaml"
    path.write_text(SITE)
    return path


def test_a_site_file_sets_the_options_of_all_jobs(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = _script(capsys, "--site", "site.yaml")
    directives = re.findall(r"^#SBATCH (.*)$", script, re.M)
    assert {
        *("--account=me", "--partition=gpu", "--gres=gpu:a100:4", "--mem=900G", "--exclude=node[3,7-9]"),
        *("--time=12:00:00", "--qos=high", "--signal=B:USR1@600"),
    } <= set(directives)
    assert not [line for line in directives if line.startswith("--gpus-per-node")]
    assert "\nmodule load cuda/12.4\nsource /sw/venv/bin/activate\n" in script
    assert "bash -c 'ampipe doctor --quick'" in script and "max_restarts=3\n" in script


def test_the_command_line_overrides_and_removes_options_of_the_site(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--gpus-per-node", "8", "--gres", "none", "--mem", "none", "--account", "you", "--time", "1-00"]
    words += ["--exclude", "none", "--health-check", "none", "--setup", "export X=1", "--max-restarts", "0"]
    script = _script(capsys, "--site", "site.yaml", *words)
    directives = re.findall(r"^#SBATCH (.*)$", script, re.M)
    assert {"--gpus-per-node=8", "--account=you", "--time=1-00", "--partition=gpu"} <= set(directives)
    assert not [line for line in directives if line.startswith(("--gres", "--mem", "--exclude"))]
    assert "doctor" not in script.partition("\n\n")[2] and "max_restarts=0\n" in script
    assert "\nsource /sw/venv/bin/activate\nexport X=1\n" in script


def test_a_cluster_on_the_command_line_overrides_the_site(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "#SBATCH --gres=gpu:a100:8\n" in _script(capsys, "--site", "site.yaml", "--cluster", "dgx-h100")


def test_without_a_site_the_defaults_apply(capsys: pytest.CaptureFixture[str]) -> None:
    script = _script(capsys, "--gpus-per-node", "8")
    assert "#SBATCH --mem=0\n" in script and "#SBATCH --time=24:00:00\n" in script
    # SLURM accepts only one memory option.
    assert "--mem=0" not in _script(capsys, "--gpus-per-node", "8", "--sbatch-option=--mem-per-gpu=64G")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("partitions: gpu", "site.yaml:1: partitions: there is no such flag. Did you mean partition?"),
        ("# x\nmodel: y", "site.yaml:2: model: there is no such flag. "),
        (
            "gpus-per-node: many",
            "site.yaml:1: gpus-per-node: 'many' is not a whole number of at least 1",
        ),
        ("time: [1, 2]", "site.yaml:1: time: [1,2]: takes one value, and this is a list"),
        ("mem:", "site.yaml:1: mem: (empty): takes only numbers and text"),
        ("requeue: true", "site.yaml:1: requeue: there is no such flag"),
        ("partition: true", "site.yaml:1: partition: True: takes only numbers and text"),
        ("setup: {a: 1}", "site.yaml:1: setup: "),
        ("setup: ['']", "site.yaml:1: setup: (empty): takes only numbers and text"),
        ("time: 99-99", "--time 99-99: has 99 hours, which must be less than 24"),
        ("mount: foo\ncontainer: x", "--mount foo: is not FROM:TO"),
        ("- a", "does not hold keys with values"),
        ("!!python/name:os.system", "site.yaml:1:"),
    ],
)
def test_a_wrong_site_file_is_refused(
    text: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site.yaml").write_text(text + "\n")
    assert main([*NODES, "--gpus-per-node", "8", "--site", "site.yaml", *FLAGS]) == 2
    assert message in capsys.readouterr().err


def test_the_example_in_the_docs_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/slurm.md").read_text()
    (example,) = re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S)
    (tmp_path / "site.yaml").write_text(example)
    assert "#SBATCH --partition=gpu\n" in _script(capsys, "--site", "site.yaml")
    for name in OPTIONS:
        assert f"`--{name}" in page, f"docs/slurm.md does not explain --{name}"


# Mounts


@pytest.fixture
def lustre(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shared file system with data, a tokenizer and settings files, outside the submission folder."""
    shared = tmp_path / "lustre"
    for folder in ("data", "tokenizer", "settings", "submit"):
        (shared / folder).mkdir(parents=True)
    (shared / "data/text.bin").touch()
    (shared / "data/text.idx").touch()
    (shared / "settings/model.yaml").write_text("num-layers: 2\n")
    monkeypatch.chdir(shared / "submit")
    return shared


def _mounts(script: str) -> list[str]:
    (found,) = re.findall(r"--container-mounts=(.*)$", script, re.M)
    return found.replace("'", "").split(",")


def test_all_folders_in_flags_are_mounted(lustre: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (lustre / "settings/run.yaml").write_text(
        f"tokenizer-model: {lustre}/tokenizer\ndata-path: [0.3, {lustre}/data/text, 0.7, own/text]\n"
        f"ampipe:\n  trace-dir: {lustre}/traces\n  routing-dir: {lustre}/routing\n"
    )
    words = [
        "--model",
        f"{lustre}/settings/model.yaml",
        "--run",
        "../settings/run.yaml",
        "--gpus-per-node",
        "8",
    ]
    words += ["--container", "team#image", "--folder", f"{lustre}/runs/1"]
    assert main([*NODES, *words, "--", "--tensorboard-dir", f"{lustre}/runs/1/board"]) == 0
    shown = capsys.readouterr()
    folders = [*("runs/1", "settings"), *("tokenizer", "data"), "traces", "routing"]
    assert _mounts(shown.out) == ['"$PWD:$PWD"', *(f"{lustre}/{name}:{lustre}/{name}" for name in folders)]
    assert f"mkdir -p {lustre}/traces {lustre}/routing {lustre}/runs/1/board\n" in shown.out
    assert "there is no own/text.idx here" in shown.err


def test_folders_that_are_mounted_already_are_not_mounted_again(
    lustre: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--gpus-per-node", "8", "--container", "team#image", "--mount", f"{lustre}:/data"]
    assert main([*NODES, *words, "--", "--data-path", "/data/data/text"]) == 0
    assert _mounts(capsys.readouterr().out) == ['"$PWD:$PWD"', f"{lustre}:/data"]


def test_missing_paths_are_reported_and_not_mounted(lustre: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """pyxis refuses to start if a mounted folder does not exist; the image may contain it."""
    words = ["--gpus-per-node", "8", "--container", "team#image"]
    assert main([*NODES, *words, "--", "--tokenizer-model", "/opt/of/the/image"]) == 0
    shown = capsys.readouterr()
    assert _mounts(shown.out) == ['"$PWD:$PWD"']
    assert "note: --tokenizer-model /opt/of/the/image is not on this machine and is not mounted" in shown.err
    assert "add --mount /opt/of/the:/opt/of/the." in shown.err


def test_paths_in_a_list_of_data_are_mounted(lustre: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (lustre / "submit/list.txt").write_text(f"0.5 {lustre}/data/text\n")
    words = ["--gpus-per-node", "8", "--container", "team#image"]
    assert main([*NODES, *words, "--", "--data-args-path", "list.txt"]) == 0
    assert _mounts(capsys.readouterr().out)[1:] == [f"{lustre}/data:{lustre}/data"]


def test_a_folder_that_pyxis_cannot_mount_is_refused(
    lustre: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--gpus-per-node", "8", "--container", "team#image", "--folder", "/runs/a,b"]
    assert main([*NODES, *words, *FLAGS]) == 2
    assert "--folder /runs/a,b: contains a colon, a comma or a line break" in capsys.readouterr().err
