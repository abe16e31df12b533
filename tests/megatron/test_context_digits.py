"""Context parallelism over 2 and 4 ranks against one rank: from the same checkpoint, the digits of its log.

On a CPU, stock layers under context parallelism attend with AMPipe's own order of the rows, so two runs with
the same layout could share a mistake in it. One rank has no such order.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.megatron.launcher import MOCK_DATA, TINY_GPT, TINY_MOE, Run
from tests.megatron.pairs import assert_same_digits, runs_of

pytestmark = pytest.mark.timeout(900)

SAVED_ITERATION = 1
COMMON = [
    *TINY_GPT,
    *TINY_MOE,
    *MOCK_DATA,
    *shlex.split(
        "--train-iters 3 --attention-dropout 0 --hidden-dropout 0 --lr-decay-style constant "
        "--position-embedding-type rope --group-query-attention --num-query-groups 2 --ckpt-format torch_dist"
    ),
]


def launched(folder: Path, lines: dict[str, str], *, num_ranks: int) -> Mapping[str, Run]:
    load = f"--load {folder} --ckpt-step {SAVED_ITERATION} --no-load-rng "
    return runs_of(
        {
            name: [*COMMON, *shlex.split((load if name != "saved" else "") + flags)]
            for name, flags in lines.items()
        },
        num_ranks=num_ranks,
    )


def test_ranks_of_a_context_log_the_digits_of_one_rank(tmp_path: Path) -> None:
    alone = launched(tmp_path, {"saved": f"--save {tmp_path} --save-interval 1", "alone": ""}, num_ranks=1)
    stock = alone["alone"]
    assert stock.iterations == [2, 3]
    assert stock.lm_loss[-1] < stock.lm_loss[0], "a run that learns nothing proves little"
    hierarchy = "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"
    # Two heads of keys, which Transformer Engine's a2a could not divide between four ranks.
    gathered = {"gathered": hierarchy, "a2a": "--cp-comm-type a2a"}
    for num_ranks, degree, others in ((2, 4, {}), (4, 3, gathered)):
        layout = f"--context-parallel-size {num_ranks}"
        lines = {"stock": layout, "ring": f"{layout} --ampipe-degree {degree}"}
        lines |= {name: f"{lines['ring']} {flags}" for name, flags in others.items()}
        found = launched(tmp_path, lines, num_ranks=num_ranks)
        assert_same_digits(stock, *found.values())
        steps = f"context ring keys and values of {num_ranks} ranks in {num_ranks} steps"
        assert steps in found["ring"].table
        if others:
            said = "--cp-comm-type all_gather in pipelined blocks, in place of"
            assert f"{said} a2a+p2p:" in found["gathered"].table
            assert f"{said} a2a:" in found["a2a"].table
