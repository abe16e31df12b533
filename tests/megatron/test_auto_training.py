"""``--ampipe-degree auto`` in Megatron's own loop: the losses are a stock run's, and it settles."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.megatron.launcher import Run, train

ITERATIONS = shlex.split(
    "--train-iters 26 --lr 5e-4 --adam-eps 1e-5 --attention-dropout 0 --hidden-dropout 0 --ffn-hidden-size 96"
)
SETTLED = re.compile(r"AMPipe: input of (\d+) rows x (\d+): (degree .*)")


def settled(run: Run) -> list[tuple[str, ...]]:
    """Shape and choice, as often as the log names one."""
    return SETTLED.findall(run.output)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        (2, ["--expert-model-parallel-size", "2"]),
        # Pipeline stages reach their training step at different times; all of them have to take part.
        (4, ["--expert-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]),
    ],
    ids=["ep2", "pp2-ep2"],
)
def test_trying_degrees_changes_no_loss(num_ranks: int, flags: list[str]) -> None:
    stock = train(*flags, *ITERATIONS, num_ranks=num_ranks, timeout_s=200)
    auto = train(*flags, *ITERATIONS, "--ampipe-degree", "auto", num_ranks=num_ranks, timeout_s=200)
    assert auto.lm_loss == pytest.approx(stock.lm_loss, rel=2e-4)
    assert auto.load_balancing_loss == pytest.approx(stock.load_balancing_loss, rel=2e-4)
    assert "auto: the first iterations try 1, 2, 4, 8" in auto.output
    found = settled(auto)
    assert [shape[:2] for shape in found] == [("64", "1")], auto.output[-3000:]
    assert "an iteration spent" in found[0][2]
