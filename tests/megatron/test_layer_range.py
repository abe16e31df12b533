"""What ``patches/`` proposes to Megatron: the patch applies, and its tests pass."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.forked import completed
from tests.megatrons import CHECKOUT, NEXT, folder_of, installed, megatron_of

PATCH = Path(__file__).resolve().parents[2] / "patches" / "layer-range-runner.patch"
BLOCK = "megatron/core/transformer/transformer_block.py"
ITS_TESTS = "tests/unit_tests/transformer/test_layer_range_runner.py"
VERSIONS = (installed(), *([NEXT] if CHECKOUT is not None else []))
PATCHED = """
import importlib.util, sys, pytest
spec = importlib.util.spec_from_file_location("megatron.core.transformer.transformer_block", sys.argv[1])
sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
sys.exit(pytest.main([*"-q -p no:cacheprovider --noconftest --rootdir".split(), *sys.argv[2:]]))
"""
"""Runs tests with a file in place of Megatron's."""


def git_apply(folder: Path, *options: str) -> str:
    alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    return completed("git", "apply", *options, PATCH, cwd=folder, env=alone).stdout


def patched(folder: Path, version: str) -> Path:
    """A folder with the patched file of a version, and the tests of the patch."""
    copy = folder / BLOCK
    copy.parent.mkdir(parents=True)
    shutil.copy(megatron_of(version).parent / BLOCK, copy)
    git_apply(folder)
    return folder


@pytest.mark.parametrize("version", VERSIONS)
def test_the_patch_applies_and_is_taken_back(version: str, tmp_path: Path) -> None:
    changes = [line.split("\t") for line in git_apply(tmp_path, "--numstat").splitlines()]
    assert [(deleted, name) for _, deleted, name in changes] == [("1", BLOCK), ("0", ITS_TESTS)]
    patched(tmp_path, version)
    git_apply(tmp_path, "--reverse")
    assert (tmp_path / BLOCK).read_bytes() == (megatron_of(version).parent / BLOCK).read_bytes()
    assert not (tmp_path / ITS_TESTS).exists()


@pytest.mark.parametrize("version", VERSIONS)
def test_its_own_tests_pass(version: str, tmp_path: Path) -> None:
    folder = folder_of(version)
    paths = {} if folder is None else {"PYTHONPATH": str(folder)}
    patched(tmp_path, version)
    words = (sys.executable, "-c", PATCHED, BLOCK, tmp_path, ITS_TESTS)
    done = completed(*words, cwd=tmp_path, env={**os.environ, **paths, "OMP_NUM_THREADS": "1"})
    assert "14 passed" in done.stdout, done.stdout
