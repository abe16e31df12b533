"""``ampipe patch`` on the sources of all supported Megatron versions, without importing them."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_ampipe.tools.patch_command import FILE, LINES
from tests.conftest import Command
from tests.megatrons import at_hand, megatron_of

PATCH = Path(__file__).resolve().parents[2] / "patches" / "megatron-lm.patch"


@pytest.fixture
def file(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The patched file of the requested version, in a copied tree."""
    copy = tmp_path / FILE
    copy.parent.mkdir(parents=True)
    shutil.copy(megatron_of(request.param).parent / FILE, copy)
    return copy


@pytest.fixture
def patch(ampipe: Command, tmp_path: Path) -> Command:
    """``ampipe patch`` with the tree after the action."""
    return lambda action, code=0: ampipe("patch", action, tmp_path, code=code)


@pytest.mark.parametrize("file", at_hand(), indirect=True)
def test_round_trip_to_the_byte(file: Path, patch: Command, tmp_path: Path) -> None:
    released, mode = file.read_bytes(), file.stat().st_mode
    assert "the patch is not in" in patch("check").out
    assert "the patch is not in it" in patch("revert", code=2).err
    assert file.read_bytes() == released

    patch("apply")
    patched = file.read_bytes()
    assert patched == released + LINES.encode() and file.stat().st_mode == mode
    compile(patched, FILE, "exec")
    assert "the patch is in it already" in patch("apply", code=2).err
    assert file.read_bytes() == patched
    assert "the patch is in" in patch("check").out

    patch("revert")
    assert file.read_bytes() == released

    # The same for people who patch their sources with git.
    alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    subprocess.run(["git", "apply", PATCH], cwd=tmp_path, env=alone, check=True)
    assert file.read_bytes() == patched


def test_another_folder_is_refused(patch: Command) -> None:
    assert f"there is no {FILE} in" in patch("apply", code=2).err
