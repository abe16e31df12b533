"""Training runs that must log the same digits: launched together, and compared. Used by tests.

Pipelined layers add in another order than stock layers, so the last of the seven digits of a logged loss, and
the last one of a gradient norm, may differ by one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest

from tests.megatron.launcher import SEVERAL, Run, pretrain_several

LAST_DIGIT_OF_GRAD_NORM = 1.001e-3


def runs_of(
    lines: Mapping[str, Sequence[str]], *, num_ranks: int = 2, timeout_s: float = 800, module: str = SEVERAL
) -> Mapping[str, Run]:
    """Runs on the same ranks, one after another; all must succeed.

    Args:
        lines: The command line of each, by name.
        num_ranks: Number of ranks of every run.
        timeout_s: Timeout of all runs together.
        module: What each rank runs.
    """
    found = pretrain_several(lines, num_ranks=num_ranks, timeout_s=timeout_s, module=module)
    for name, run in found.items():
        assert run.exit_code == 0, f"{name}:\n{run.output[-6000:]}"
    assert found.keys() == lines.keys()
    return found


def digits(values: Sequence[float]) -> list[object]:
    """What is equal to logged losses in seven digits, but for one unit of the last."""
    # Logged is 1.234567E+00.
    return [
        pytest.approx(value, rel=0, abs=1.001e-6 * 10 ** math.floor(math.log10(value)) if value else 0)
        for value in values
    ]


def assert_same_digits(stock: Run, *others: Run, iterations: int | None = None) -> None:
    """Check that runs log what the stock run logs, but for one unit of the last digit.

    Args:
        stock: The reference.
        others: What is compared with it.
        iterations: How many iterations the stock run has, if it is a whole training, which must learn.
    """
    if iterations is not None:
        assert stock.iterations == list(range(1, iterations + 1))
        assert stock.lm_loss[-1] < stock.lm_loss[0], "a run that learns nothing proves little"
    for ours in others:
        assert ours.iterations == stock.iterations
        assert ours.losses == {name: digits(values) for name, values in stock.losses.items()}
        assert ours.grad_norm == pytest.approx(stock.grad_norm, abs=LAST_DIGIT_OF_GRAD_NORM)


def assert_resumed(resumed: Run, unbroken: Run, *, first: int) -> None:
    """Check that a run that goes on from a checkpoint logs what the unbroken run logs.

    Args:
        resumed: Its first iteration is number ``first``.
        unbroken: From iteration 1.
        first: Counted from 1.
    """
    assert resumed.iterations == list(range(first, unbroken.iterations[-1] + 1))
    # Of the second iteration after a resume, Megatron prints the mean of the first two losses.
    assert resumed.lm_loss[:1] == digits(unbroken.lm_loss[first - 1 : first])
    assert resumed.grad_norm == pytest.approx(unbroken.grad_norm[first - 1 :], abs=LAST_DIGIT_OF_GRAD_NORM)
