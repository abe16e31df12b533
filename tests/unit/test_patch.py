"""``ampipe patch`` on the sources of all supported Megatron versions, without importing them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ampipe.cli import main
from megatron_ampipe.compat import MAIN_BRANCH, SUPPORTED_MEGATRON
from megatron_ampipe.tools.patch_command import PATCHES
from tests.megatrons import at_hand, megatron_of

PACKAGE_INFO = "megatron/core/package_info.py"
TRAINING = "megatron/training/training.py"


def _files(tree: Path) -> dict[str, bytes]:
    return {str(path.relative_to(tree)): path.read_bytes() for path in tree.rglob("*") if path.is_file()}


@pytest.fixture
def tree(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The patched files of the requested version (default 0.18), and the file with its version."""
    version = getattr(request, "param", "0.18")
    source = megatron_of(version).parent
    names = [PACKAGE_INFO, *json.loads((PATCHES / version / "files.json").read_text())]
    for name in names:
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / name, tmp_path / "tree" / name)
    return tmp_path / "tree"


def run(action: str, tree: Path) -> int:
    return main(["patch", action, str(tree)])


@pytest.mark.parametrize("tree", at_hand(), indirect=True)
def test_round_trip_to_the_byte(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    released = _files(tree)
    assert run("check", tree) == 0
    assert "fits, and is not in" in capsys.readouterr().out
    assert _files(tree) == released

    assert run("apply", tree) == 0
    patched = _files(tree)
    changed = {name for name in released if patched[name] != released[name]}
    assert changed == set(released) - {PACKAGE_INFO}
    for name in changed:
        compile(patched[name], name, "exec")
    assert run("check", tree) == 0
    assert "the patch" in (said := capsys.readouterr().out) and "is in" in said.splitlines()[-1]

    assert run("revert", tree) == 0
    assert _files(tree) == released


def test_a_patch_for_every_supported_version() -> None:
    folders = {path.name for path in PATCHES.iterdir() if path.is_dir()}
    assert folders == {*SUPPORTED_MEGATRON, MAIN_BRANCH}


@pytest.mark.parametrize("version", SUPPORTED_MEGATRON)
def test_patches_insert_and_copy_nothing(version: str) -> None:
    """Megatron's lines, as context or removed, would begin with a blank or a minus sign."""
    lines = (PATCHES / version / "ampipe.patch").read_text().splitlines()
    kinds = {line[:3] for line in lines}
    assert kinds <= {"---", "+++", "@@ ", "+  "}
    inserted = [line for line in lines if line.startswith("+  ")]
    # 0.17 has no hybrid models.
    assert len(inserted) == (10 if version == "0.17" else 12)
    assert all("ampipe" in line for line in inserted)


def _replace(name: str, old: str, new: str) -> Callable[[Path], object]:
    return lambda tree: (tree / name).write_text((tree / name).read_text().replace(old, new))


def _half(tree: Path) -> None:
    released = (tree / TRAINING).read_bytes()
    assert run("apply", tree) == 0
    (tree / TRAINING).write_bytes(released)


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (
            _replace(PACKAGE_INFO, "MINOR = 18", "MINOR = 16"),
            "holds Megatron 0.16.2, and there are patches for 0.17, 0.18, 0.19, 0.20. To launch",
        ),
        (_replace(PACKAGE_INFO, "MINOR = 18", ""), "does not contain the version of Megatron"),
        (_replace(TRAINING, "\n\n\n", "\n\n"), f"not as in the releases that were tested: {TRAINING}."),
        (lambda tree: (tree / TRAINING).unlink(), f"releases that were tested: {TRAINING}."),
        (_half, "is patched in part"),
        (lambda tree: shutil.rmtree(tree / "megatron/core"), "does not contain the version of Megatron"),
    ],
    ids=["other-version", "no-version", "changed", "missing", "half", "no-megatron"],
)
def test_another_tree_is_refused_and_left_alone(
    spoil: Callable[[Path], None], expected: str, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(tree)
    before = _files(tree)
    for action in ("apply", "check", "revert"):
        assert run(action, tree) == 2
        assert expected in capsys.readouterr().err
    assert _files(tree) == before


def test_what_is_done_is_not_done_twice(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("revert", tree) == 2
    assert "the patch is not in it" in capsys.readouterr().err
    assert run("apply", tree) == 0
    patched = _files(tree)
    assert run("apply", tree) == 2
    assert "the patch is in it already" in capsys.readouterr().err
    assert _files(tree) == patched


def test_without_git_or_the_patches_and_with_a_wrong_patch_nothing_is_written(
    tree: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = _files(tree)
    with monkeypatch.context() as without_git:
        without_git.setenv("PATH", "")
        assert run("apply", tree) == 1
    assert "git is needed" in capsys.readouterr().err
    shutil.copytree(PATCHES, tmp_path / "patches")
    diff = tmp_path / "patches/0.18/ampipe.patch"
    diff.write_text(diff.read_text().replace("@@ -113,0 +114,2", "@@ -112,0 +113,2"))
    monkeypatch.setattr("megatron_ampipe.tools.patch_command.PATCHES", tmp_path / "patches")
    with pytest.raises(AssertionError, match="do not match"):
        run("apply", tree)
    monkeypatch.setattr("megatron_ampipe.tools.patch_command.PATCHES", tmp_path / "nowhere")
    assert run("apply", tree) == 2
    assert "there are patches for none" in capsys.readouterr().err
    assert _files(tree) == before
