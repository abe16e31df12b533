"""The distributions: built, versioned and installed as a user does, away from a checkout."""

import os
import re
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import megatron_ampipe
from megatron_ampipe import compat
from tests.forked import completed

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    *("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt"),
    *("configs", "patches", "docs", "megatron_ampipe"),
)
VERSION = (ROOT / "megatron_ampipe/version.txt").read_text().strip()


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """The output of a command, without this checkout on its path."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    # Where build is on the path, and not installed.
    if os.environ.get("PYTHONPATH") and command[1:3] == ("-m", "build"):
        env["PYTHONPATH"] = os.environ["PYTHONPATH"]
    return completed(*command, cwd=cwd, env=env | environment, timeout_s=300).stdout


def git(*words: str, cwd: Path) -> str:
    return run("git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.hooksPath=", *words, cwd=cwd)


def version_of(source: Path) -> str:
    return run(sys.executable, "setup.py", "--version", cwd=source).split()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of the sources."""
    folder = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.json")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder)
    (folder / ".gitignore").write_text("*.egg-info\nbuild\n__pycache__\n")
    git("init", "-q", cwd=folder)
    git("add", ".", cwd=folder)
    git("commit", "-qm", "All", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def distributions(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The source distribution and the wheel, which the command of docs/install.md makes from it."""
    command = "python -m build --no-isolation"
    assert f"\n{command}\n" in (ROOT / "docs/install.md").read_text()
    output = tmp_path_factory.mktemp("dist")
    run(sys.executable, *command.split()[1:], "--outdir", output, cwd=source)
    by_kind = {path.suffix: path for path in output.iterdir()}
    assert by_kind.keys() == {".gz", ".whl"}
    return by_kind


@pytest.fixture(scope="module")
def installed(distributions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a fresh environment, which sees the packages of this one but not this checkout."""
    folder = tmp_path_factory.mktemp("fresh") / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    site = next(folder.glob("lib/python*/site-packages"))
    # As --system-site-packages does for a Python that is itself no virtual environment. Nothing in a folder
    # that is added so is executed, so the editable installation there stays out.
    (site / "peers.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    python = folder / "bin" / "python"
    wheel = distributions[".whl"]
    install = ("--no-deps", "--no-index", "--ignore-installed", "--quiet", wheel)
    run(sys.executable, "-m", "pip", "--python", python, "install", *install, cwd=folder.parent)
    return folder / "bin"


def test_the_version_is_in_one_file(source: Path, distributions: dict[str, Path], tmp_path: Path) -> None:
    assert version_of(source) == megatron_ampipe.__version__ == VERSION
    assert Version(VERSION).release
    with tarfile.open(distributions[".gz"]) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    assert unpacked.name == f"megatron_ampipe-{VERSION}"
    (unpacked / "megatron_ampipe/version.txt").write_text("3.2.1\n")
    assert version_of(unpacked) == "3.2.1"
    heads = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert heads[0] in (f"[Unreleased]: {VERSION}", f"[{VERSION}]")


def test_a_wheel_holds_all_modules_and_data(distributions: dict[str, Path]) -> None:
    with zipfile.ZipFile(distributions[".whl"]) as wheel:
        names = set(wheel.namelist())
        metadata = wheel.read(f"megatron_ampipe-{VERSION}.dist-info/METADATA").decode()
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "megatron_ampipe").rglob("*.*")}
    package = {name for name in package if "__pycache__" not in name}
    data = {
        f"megatron_ampipe/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "configs").rglob("*.*")
    }
    assert names == package | data | {name for name in names if ".dist-info/" in name}
    assert any(name.endswith("LICENSE") for name in names)
    for line in ("License-Expression: Apache-2.0", "Requires-Python: >=3.12", "# megatron_ampipe"):
        assert line in metadata or line.replace("-Expression", "") in metadata
    with tarfile.open(distributions[".gz"]) as archive:
        members = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CHANGELOG.md", "LICENSE", "README.md", "docs/install.md", "patches/megatron-lm.patch"} <= members


def test_links_of_the_readme_lead_to_the_repository(source: Path, tmp_path: Path) -> None:
    setup = (source / "setup.py").read_text()
    changed = setup.replace("HOME: str | None = None", 'HOME = "https://example.org/ampipe"')
    assert changed != setup
    copy = tmp_path / "copy"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns(".git"))
    (copy / "setup.py").write_text(changed)
    run(sys.executable, "setup.py", "-q", "egg_info", cwd=copy)
    info = (copy / "megatron_ampipe.egg-info/PKG-INFO").read_text()
    assert "](https://example.org/ampipe/raw/main/docs/images/timeline.png)" in info
    assert "](https://example.org/ampipe/blob/main/docs/usage.md#flags)" in info
    assert "](docs/" not in info


def test_commands_run_outside_of_a_checkout(installed: Path, tmp_path: Path) -> None:
    ampipe, python = installed / "ampipe", installed / "python"
    assert run(ampipe, "--version", cwd=tmp_path) == f"megatron-ampipe {VERSION}\n"
    assert "usage: ampipe" in run(ampipe, "--help", cwd=tmp_path)
    where = run(python, "-c", "import megatron_ampipe; print(megatron_ampipe.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)
    assert "degree" in run(ampipe, "plan", "--model", "tiny", "--cluster", "dgx-h100", cwd=tmp_path)
    script = run(ampipe, "sbatch", "--nodes", "2", "--gpus-per-node", "8", "--model", "mixtral-8x7b",
                 "--run", "many-nodes", "--no-check", cwd=tmp_path)  # fmt: skip
    assert "#SBATCH --nodes=2" in script
    assert "lr" in run(ampipe, "config", "--ampipe-config", "tiny", "quickstart", cwd=tmp_path)
    told = run(python, "-m", "megatron_ampipe.pretrain_gpt", "--help", cwd=tmp_path)
    assert "--ampipe-degree" in told and "--num-experts" in told


CONTAINERS = {
    "25.01": {"torch": "2.6.0a0+ecf3bae40a.nv25.1", "numpy": "1.26.4", "packaging": "23.2"},
    "25.09": {"torch": "2.9.0a0+50eac811a6.nv25.9", "numpy": "1.26.4", "scipy": "1.16.1"},
    "25.11": {"torch": "2.10.0a0+b558c986e8.nv25.11"},
}
"""Of NVIDIA's PyTorch images, as public logs of programs that ran in them show it."""


@pytest.mark.parametrize("image", CONTAINERS)
def test_packages_of_a_container_are_not_replaced(image: str, distributions: dict[str, Path]) -> None:
    """pip keeps an installed version, also a pre-release, that satisfies what this package requires."""
    with zipfile.ZipFile(distributions[".whl"]) as wheel:
        text = wheel.read(f"megatron_ampipe-{VERSION}.dist-info/METADATA").decode()
    required = [Requirement(line) for line in re.findall(r"^Requires-Dist: (.*)$", text, re.M)]
    assert {"torch", "megatron-core"} <= {requirement.name for requirement in required}
    for requirement in required:
        version = CONTAINERS[image].get(canonicalize_name(requirement.name))
        assert version is None or requirement.specifier.contains(version, prereleases=True), requirement


def test_at_start_up_a_pre_release_counts_as_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = CONTAINERS["25.01"] | {"megatron-core": "0.17.0rc0"}
    monkeypatch.setattr(compat, "found_version", lambda name: Version(versions[name]))
    compat.require_peers()
