"""The environment script, with a fake Python: what it searches for, installs and repairs.

The fake answers the script's questions, creates an environment with a copy of itself, and writes all pip
commands to a log. So nothing is downloaded, and each run takes a tenth of a second.
"""

import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.forked import REPOSITORY, completed

TOOLS = (
    *("awk", "bash", "cat", "chmod", "cksum", "df", "dirname", "env", "find", "flock", "grep"),
    *("mkdir", "mv", "readlink", "rm", "sed", "sort", "tail"),
)

# $VERSION is filled in when it is written; $CALLS and $PIP_DOES are set when it runs.
STAND_IN = """#!/usr/bin/env bash
case "$*" in
    *"has_venv"*)
        case $VERSION in
            3.11.*) echo "no $VERSION is older than 3.12" ;;
            *) echo "ok $VERSION $0" ;;
        esac ;;
    *"-m venv "*)
        mkdir -p "${@: -1}/bin" && cat "$0" >"${@: -1}/bin/python" && : >"${@: -1}/pyvenv.cfg"
        chmod +x "${@: -1}/bin/python" ;;
    *"print(\\"python"*) echo "python ${VERSION%.*}" ;;
    *"-m pip install"*) echo "pip $*" >>"$CALLS"; eval "$PIP_DOES" ;;
    *) echo "$*" >>"$CALLS" ;;
esac
"""


@dataclass(frozen=True, slots=True)
class Checkout:
    """A copy of the scripts with a separate PATH that has the necessary tools but no Python."""

    root: Path
    bin: Path
    calls: Path
    home: Path

    def add_python(self, name: str, version: str, *, folder: Path | None = None) -> Path:
        path = (folder or self.bin) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(STAND_IN.replace("$VERSION", version).replace("${VERSION%.*}", version[:4]))
        path.chmod(0o755)
        return path

    def run(
        self, *args: str, script: Path | None = None, code: int = 0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the tests; fails the test if that ends with another code."""
        self.calls.write_text("")
        of_run = {"PATH": str(self.bin), "HOME": str(self.home), "CALLS": str(self.calls), "PIP_DOES": ":"}
        words = [script or self.root / "scripts/test.sh", *(args or ("-q",))]
        return completed(*words, cwd=Path("/"), env=of_run | environment, code=code, timeout_s=60)

    @property
    def installs(self) -> list[str]:
        return [line for line in self.calls.read_text().splitlines() if line.startswith("pip ")]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    made = Checkout(tmp_path / "a checkout", tmp_path / "bin", tmp_path / "calls", tmp_path / "home")
    made.bin.mkdir()
    made.home.mkdir()
    shutil.copytree(REPOSITORY / "scripts", made.root / "scripts")
    for name in ("setup.py", "constraints.txt"):
        shutil.copy(REPOSITORY / name, made.root)
    for tool in TOOLS:
        found = shutil.which(tool, path="/usr/bin:/bin:/usr/local/bin:/opt/homebrew/bin")
        if found:
            (made.bin / tool).symlink_to(found)
    return made


def add_command(path: Path, body: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def test_without_a_usable_python_it_says_how_to_get_one(checkout: Checkout) -> None:
    old = checkout.add_python("python3", "3.11.7")
    result = checkout.run(code=1)
    assert "no Python 3.12 or newer was found" in result.stderr
    assert "uv python install 3.12" in result.stderr
    assert result.stderr.count(f"not usable: {old}, 3.11.7 is older than 3.12") == 1


def test_first_run_installs_and_the_second_installs_nothing(checkout: Checkout) -> None:
    checkout.add_python("python3.12", "3.12.4")
    outside = {path for path in checkout.root.parent.rglob("*") if checkout.root not in path.parents}
    settings = dict.fromkeys(("PYTHONPATH", "VIRTUAL_ENV", "PIP_TARGET"), "/elsewhere")
    told = 'echo "[$PYTHONPATH][$VIRTUAL_ENV][$PIP_TARGET][$PIP_FIND_LINKS]" >>"$CALLS"'
    checkout.run("-k", "two words", **settings, PIP_FIND_LINKS="/wheels", PIP_DOES=told)
    after = {path for path in checkout.root.parent.rglob("*") if checkout.root not in path.parents}
    assert after - outside == {checkout.calls}, "nothing is written outside the checkout"
    assert len(checkout.installs) == 1
    assert "-c constraints.txt -e .[test,tools]" in checkout.installs[0]
    assert "[][][][/wheels]\n" in checkout.calls.read_text(), "only pip's settings of the machine are kept"

    second = checkout.run("-k", "two words")
    assert checkout.calls.read_text() == "-m pytest -k two words\n"
    assert second.stdout == ""


def test_older_megatrons_are_installed_once_each_in_a_separate_folder(checkout: Checkout) -> None:
    checkout.add_python("python3.12", "3.12.4")
    (checkout.root / "tests").mkdir()
    (checkout.root / "tests/older_megatron.txt").write_text("# which\nmegatron-core==0.18.2\n")
    checkout.run()
    older = checkout.installs[1:]
    assert len(older) == 1
    assert "--no-deps --target" in older[0]
    assert older[0].endswith(" megatron-core==0.18.2")
    assert (checkout.root / ".venv/megatron-core-0.18/.ampipe-requirement").is_file()

    checkout.run()
    assert checkout.installs == []

    shutil.rmtree(checkout.root / ".venv/megatron-core-0.18")
    failed = checkout.run(PIP_DOES="echo no such wheel; exit 1", code=1)
    assert "megatron-core==0.18.2 cannot be installed:" in failed.stderr
    assert "no such wheel" in failed.stderr
    assert not (checkout.root / ".venv/megatron-core-0.18").exists()


def test_a_python_of_pyenv_or_uv_is_found_without_being_activated(checkout: Checkout) -> None:
    uv = checkout.add_python("python3.12", "3.12.9", folder=checkout.home / "elsewhere")
    add_command(checkout.bin / "uv", f'case "$*" in *3.12) echo "{uv}" ;; *) exit 2 ;; esac')
    assert str(uv) in checkout.run().stdout
    for root, settings in (
        (checkout.home / ".pyenv", {}),
        (checkout.home / "pyenv", {"PYENV_ROOT": str(checkout.home / "pyenv"), "HOME": "/nonexistent"}),
    ):
        shutil.rmtree(checkout.root / ".venv")
        (checkout.bin / "uv").unlink(missing_ok=True)
        python = checkout.add_python("python3.13", "3.13.2", folder=root / "versions/3.13.2/bin")
        assert str(python) in checkout.run(**settings).stdout


@pytest.mark.parametrize("changed", ["setup.py", "constraints.txt"])
def test_changed_requirements_are_installed_into_the_same_environment(
    checkout: Checkout, changed: str
) -> None:
    checkout.add_python("python3.12", "3.12.4")
    checkout.run()
    kept = checkout.root / ".venv/kept"
    kept.touch()
    with (checkout.root / changed).open("a") as file:
        file.write("# changed\n")
    result = checkout.run()
    assert "the requirements have changed" in result.stdout
    assert len(checkout.installs) == 1
    assert kept.exists()


def test_a_moved_checkout_gets_a_new_environment(checkout: Checkout) -> None:
    checkout.add_python("python3.12", "3.12.4")
    checkout.run()
    (checkout.root / ".venv/old").touch()
    moved = checkout.root.rename(checkout.root.with_name("moved"))
    result = checkout.run(script=moved / "scripts/test.sh")
    assert "the checkout has moved" in result.stdout
    assert len(checkout.installs) == 1
    assert not (moved / ".venv/old").exists()
    (moved / ".venv/bin/python").unlink()
    checkout.run(script=moved / "scripts/test.sh")
    assert len(checkout.installs) == 1, "without its Python it is made again"


def test_an_environment_of_another_folder_is_not_removed(checkout: Checkout) -> None:
    checkout.add_python("python3.12", "3.12.4")
    other = checkout.root.with_name("other-venv")
    other.mkdir()
    for name in ("kept", ".ampipe-stamp"):
        (other / name).touch()
    (checkout.root / ".venv").symlink_to(other)
    result = checkout.run(code=1)
    assert "is a link to an environment of another folder" in result.stderr + result.stdout
    assert (other / "kept").exists() and not checkout.installs


def test_an_interrupted_installation_is_repeated(checkout: Checkout) -> None:
    checkout.add_python("python3.12", "3.12.4")
    kills = "mkdir -p .venv/half .venv/cache/pip/wheel; kill -9 $PPID"
    checkout.run(PIP_DOES=kills, code=-signal.SIGKILL)
    result = checkout.run()
    assert "was interrupted" in result.stdout
    assert len(checkout.installs) == 1
    assert not (checkout.root / ".venv/half").exists()
    checkout.run()
    assert checkout.installs == []


@pytest.mark.parametrize(
    ("complaint", "remedy"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("NewConnectionError: Temporary failure in name resolution", "could not be reached"),
        ("ERROR: No matching distribution found for torch>=2.6", "Python 3.12 on Linux"),
        ("ERROR: something new", "something new"),
    ],
)
def test_a_failed_installation_is_explained_and_leaves_no_stamp(
    checkout: Checkout, complaint: str, remedy: str
) -> None:
    checkout.add_python("python3.12", "3.12.4")
    result = checkout.run(PIP_DOES=f"echo '{complaint}'; exit 1", code=1)
    assert remedy in result.stderr
    assert not (checkout.root / ".venv/.ampipe-stamp").exists()


def test_an_environment_made_by_hand_is_completed_or_refused_and_not_cleared(checkout: Checkout) -> None:
    python = checkout.add_python("python3.12", "3.12.4")
    (checkout.root / ".venv").mkdir()
    (checkout.root / ".venv/pyvenv.cfg").touch()
    (checkout.root / ".venv/mine").touch()
    assert "Remove or rename it" in checkout.run(code=1).stderr
    checkout.add_python("python", "3.12.4", folder=checkout.root / ".venv/bin")
    result = checkout.run()
    assert (checkout.root / ".venv/mine").exists()
    assert len(checkout.installs) == 1
    assert str(python) not in result.stdout
    # The fake says that it has torch, which stays also when requirements change.
    for _ in range(2):
        assert f"-c {checkout.root}/.venv/cache/constraints.txt -e .[test,tools]" in checkout.installs[0]
        used = (checkout.root / ".venv/cache/constraints.txt").read_text()
        assert "numpy==" in used and "\ntorch==" not in used
        with (checkout.root / "constraints.txt").open("a") as file:
            file.write("# changed\n")
        checkout.run()


def test_ci_runs_the_test_command(checkout: Checkout) -> None:
    shutil.copytree(REPOSITORY / ".ci", checkout.root / ".ci")
    checkout.add_python("python3.12", "3.12.4")
    checkout.run()
    for tool in ("ruff", "lint-imports", "codespell", "shellcheck"):
        add_command(checkout.root / ".venv/bin" / tool, "exit 0")
    add_command(checkout.root / ".venv/bin/mypy", "echo a type error; exit 3")
    result = checkout.run(script=checkout.root / ".ci/run", code=3)
    assert "a type error" in result.stdout
    together, alone = checkout.calls.read_text().splitlines()
    assert together.startswith("-m pytest ") and together.endswith(" -m not alone tests")
    assert alone.startswith("-m pytest ") and alone.endswith(" -m alone tests")
    assert result.stdout.splitlines()[-1] == "test.sh: FAILED: mypy (details above)"
