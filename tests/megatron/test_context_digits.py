"""Context parallelism over 2 and 4 ranks against one rank: from the same checkpoint, the digits of its log.

On a CPU, stock layers under context parallelism attend with AMPipe's own order of the rows, so two runs with
the same layout could share a mistake in it. One rank has no such order.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.megatron.launcher import MOCK_DATA, TINY_GPT, TINY_MOE, Run, pretrain_several

pytestmark = pytest.mark.timeout(400)

TOLERANCE = 1e-5
LAST_DIGIT_OF_GRAD_NORM = 1.001e-3
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


def runs_of(folder: Path, lines: dict[str, str], *, num_ranks: int) -> dict[str, Run]:
    load = f"--load {folder} --ckpt-step {SAVED_ITERATION} --no-load-rng "
    found = pretrain_several(
        {
            name: [*COMMON, *shlex.split((load if name != "saved" else "") + flags)]
            for name, flags in lines.items()
        },
        num_ranks=num_ranks,
        timeout_s=180,
    )
    for name, run in found.items():
        assert run.exit_code == 0, f"{name}:\n{run.output[-6000:]}"
    return found


def test_ranks_of_a_context_log_the_digits_of_one_rank(tmp_path: Path) -> None:
    alone = runs_of(tmp_path, {"saved": f"--save {tmp_path} --save-interval 1", "alone": ""}, num_ranks=1)
    stock = alone["alone"]
    assert stock.iterations == [2, 3]
    assert stock.lm_loss[-1] < stock.lm_loss[0], "a run that learns nothing proves little"
    for num_ranks, degree in ((2, 4), (4, 3)):
        layout = f"--context-parallel-size {num_ranks} --cp-comm-type p2p "
        lines = {"stock": layout, "ampipe": f"{layout} --ampipe-degree {degree}"}
        for name, run in runs_of(tmp_path, lines, num_ranks=num_ranks).items():
            where = f"{name} on {num_ranks} ranks"
            assert run.iterations == stock.iterations, where
            assert run.lm_loss == pytest.approx(stock.lm_loss, rel=TOLERANCE), where
            assert run.load_balancing_loss == pytest.approx(stock.load_balancing_loss, rel=TOLERANCE), where
            assert run.grad_norm == pytest.approx(stock.grad_norm, abs=LAST_DIGIT_OF_GRAD_NORM), where
