"""Training with the scripts of the checkout that ``AMPIPE_MEGATRON`` names, as they are: the next Megatron.

Skipped without it. With it, these run too: ``tests/dist/test_versions.py`` (blocks),
``tests/megatron/test_megatron_names.py`` (names) and ``tests/unit/test_patch.py`` (the patch).
"""

from __future__ import annotations

import shlex
from functools import cache

import pytest

from tests.megatron.launcher import MOCK_DATA, TINY_GPT, TINY_MOE, Run, execute, torchrun_command
from tests.megatron.pairs import assert_same_digits
from tests.megatrons import NEXT, folder_of, needs_checkout

pytestmark = [pytest.mark.timeout(900), needs_checkout]

COMMON = [
    *TINY_GPT,
    *TINY_MOE,
    *MOCK_DATA,
    *shlex.split(
        "--expert-model-parallel-size 2 --attention-dropout 0 --hidden-dropout 0 --num-layers 4 "
        "--position-embedding-type rope --mamba-head-dim 16 --mamba-num-groups 2 --mamba-state-dim 16"
    ),
]
SCRIPTS = {
    "pretrain_gpt.py": "",
    "pretrain_hybrid.py": "--hybrid-layer-pattern M*EM*-*E --normalization RMSNorm",
}
ADDED = ("--ampipe-degree 4 --ampipe-stack 1", "--ampipe-degree 2 --ampipe-stack all")


@cache
def run_of(script: str, added: str) -> Run:
    """One run of a script of the checkout."""
    folder = folder_of(NEXT)
    assert folder is not None
    words = [*COMMON, *shlex.split(SCRIPTS[script]), *shlex.split(added)]
    run = execute(torchrun_command("-m", "megatron_ampipe.launch", str(folder / script), *words))
    assert run.exit_code == 0, run.output[-6000:]
    assert run.iterations == [1, 2, 3, 4]
    return run


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("added", ADDED)
def test_its_scripts_train_like_stock(script: str, added: str) -> None:
    ours = run_of(script, added)
    assert_same_digits(run_of(script, ""), ours, iterations=4)
    assert f"Megatron {NEXT}" in " ".join(ours.table.replace("│", " ").split())
