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


@pytest.mark.parametrize("version", VERSIONS)
def test_its_own_tests_pass(version: str, tmp_path: Path) -> None:
    copy = tmp_path / BLOCK
    copy.parent.mkdir(parents=True)
    shutil.copy(megatron_of(version).parent / BLOCK, copy)
    alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    completed("git", "apply", PATCH, cwd=tmp_path, env=alone)
    folder = folder_of(version)
    paths = {} if folder is None else {"PYTHONPATH": str(folder)}
    words = (sys.executable, "-c", PATCHED, BLOCK, tmp_path, ITS_TESTS)
    done = completed(*words, cwd=tmp_path, env={**os.environ, **paths, "OMP_NUM_THREADS": "1"})
    assert "14 passed" in done.stdout, done.stdout
