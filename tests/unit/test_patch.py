"""``ampipe patch`` on the sources of all supported Megatron versions, without importing them."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_ampipe.cli import main
from megatron_ampipe.tools.patch_command import FILE, LINES
from tests.megatrons import at_hand, megatron_of

PATCH = Path(__file__).resolve().parents[2] / "patches" / "megatron-lm.patch"


@pytest.fixture
def file(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The patched file of the requested version (default 0.18), in a copied tree."""
    copy = tmp_path / FILE
    copy.parent.mkdir(parents=True)
    shutil.copy(megatron_of(getattr(request, "param", "0.18")).parent / FILE, copy)
    return copy


def run(action: str, file: Path) -> int:
    return main(["patch", action, str(file.parents[2])])


@pytest.mark.parametrize("file", at_hand(), indirect=True)
def test_round_trip_to_the_byte(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    released, mode = file.read_bytes(), file.stat().st_mode
    assert run("check", file) == 0
    assert "the patch is not in" in capsys.readouterr().out
    assert file.read_bytes() == released

    assert run("apply", file) == 0
    patched = file.read_bytes()
    assert patched == released + LINES.encode() and file.stat().st_mode == mode
    compile(patched, FILE, "exec")
    assert run("check", file) == 0
    assert "the patch is in" in capsys.readouterr().out

    assert run("revert", file) == 0
    assert file.read_bytes() == released

    # The same for people who patch their sources with git.
    alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(file.parents[3])}
    subprocess.run(["git", "apply", PATCH], cwd=file.parents[2], env=alone, check=True)
    assert file.read_bytes() == patched


def test_what_is_done_is_not_done_twice(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("revert", file) == 2
    assert "the patch is not in it" in capsys.readouterr().err
    assert run("apply", file) == 0
    patched = file.read_bytes()
    assert run("apply", file) == 2
    assert "the patch is in it already" in capsys.readouterr().err
    assert file.read_bytes() == patched


def test_another_folder_is_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.unlink()
    assert run("apply", file) == 2
    assert f"there is no {FILE} in" in capsys.readouterr().err
