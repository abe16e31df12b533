"""Trainings with ``--ampipe-rows fixed`` log the digits of exact rows, also if steps exceed a budget."""

import re
import shlex

import pytest

from tests.megatron.launcher import MOCK_DATA, Run, assert_same_digits, runs_of
from tests.megatron.stand_ins import SMALL_BUDGETS
from tests.megatron.trainings import COMMON, EP, FOUR_LAYERS, LLAMA, SHARED

pytestmark = pytest.mark.timeout(1500)

NUM_ITERATIONS = 10
STATE = (
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-2 "
    "--moe-router-load-balancing-type global_aux_loss --moe-z-loss-coeff 1e-2 --moe-input-jitter-eps 0.01 "
    "--hidden-dropout 0.1 --eval-iters 1 --eval-interval 4 --global-batch-size 8 "
)
"""What a repeated step must restore: buffers, random numbers, logged losses, sums of gradients."""
FIXED = "--ampipe-rows fixed --ampipe-rows-margin"
LINES = {
    "exact": "",
    "fixed": f"{FIXED} 3",
    "small": f"{FIXED} {SMALL_BUDGETS}",
}
KINDS = {
    # Two groups of expert-parallel ranks, of which one exceeds budgets.
    "stack": EP + LLAMA + SHARED + STATE + "--ampipe-degree 4 ",
    "lancet": EP + FOUR_LAYERS + STATE + "--ampipe-degree 2 --ampipe-schedule lancet --ampipe-stack 1 ",
    "mtp": EP + LLAMA + STATE + "--mtp-num-layers 1 --ampipe-degree 2 ",
    # Whole passes as CUDA graphs, which draw no random numbers.
    "graphs": EP
    + LLAMA
    + SHARED
    + FOUR_LAYERS
    + STATE.replace("--moe-input-jitter-eps 0.01 --hidden-dropout 0.1 ", "")
    + "--ampipe-degree 2 --ampipe-stack 2 ",
}
GRAPHS = "--cuda-graph-impl local --cuda-graph-warmup-steps 1"


LAUNCHES = {
    "stack": (4, "overflows"),
    "lancet": (2, "overflows"),
    "mtp": (2, "overflows"),
    "graphs": (2, "whole_graphs"),
}
"""Ranks and stand-ins of each kind."""


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    found: dict[str, Run] = {}
    for num_ranks, stand_ins in set(LAUNCHES.values()):
        words = {
            f"{kind} {line}": [
                *COMMON,
                *MOCK_DATA,
                *shlex.split(f"{flags}{more} --train-iters {NUM_ITERATIONS}"),
                *(shlex.split(GRAPHS) if kind == "graphs" and more else []),
            ]
            for kind, flags in KINDS.items()
            for line, more in LINES.items()
            if LAUNCHES[kind] == (num_ranks, stand_ins)
        }
        found |= runs_of(words, num_ranks=num_ranks, stand_ins=stand_ins)
    return found


def steps_of(run: Run) -> tuple[int, int]:
    """Steps with budgets, and repeated ones, as a run says in the end."""
    (found,) = re.findall(r"fixed rows: (\d+) steps with budgets, (\d+) of them repeated", run.output)
    return int(found[0]), int(found[1])


@pytest.mark.parametrize("kind", KINDS)
def test_logs_the_digits_of_exact_rows(kind: str, runs: dict[str, Run]) -> None:
    exact, fixed, small = (runs[f"{kind} {line}"] for line in LINES)
    assert_same_digits(exact, fixed, small, iterations=NUM_ITERATIONS)
    for run in (fixed, small):
        # Every digit: rows are added in the same order.
        assert run.logged == exact.logged
        assert run.validation_loss == exact.validation_loss
    assert "fixed rows" not in exact.output


@pytest.mark.parametrize("kind", KINDS)
def test_counts_the_steps_that_are_repeated(kind: str, runs: dict[str, Run]) -> None:
    _, fixed, small = (runs[f"{kind} {line}"] for line in LINES)
    assert steps_of(fixed) == (NUM_ITERATIONS - 2, 0)
    num_steps, num_repeated = steps_of(small)
    assert num_steps == NUM_ITERATIONS - 2 and 1 <= num_repeated < num_steps
    assert len(re.findall(r"more rows than a budget", small.output)) == num_repeated


def test_whole_passes_are_replayed_on_every_rank(runs: dict[str, Run]) -> None:
    """Two stacks, both directions, four micro-batches of a rank in each step with budgets."""
    exact, fixed, small = (
        [int(count) for count in re.findall(r"replays: (\d+)", runs[f"graphs {line}"].output)]
        for line in LINES
    )
    assert exact == [0, 0] and runs["graphs fixed"].says("CUDA graphs whole passes")
    per_step = 2 * 2 * 4
    # The first pass of each stack warms up.
    assert fixed == [(NUM_ITERATIONS - 2) * per_step - 4] * 2
    # Budgets that a repeat has changed are captured again; a repeat itself runs without graphs.
    assert small[0] == small[1] and 0 < small[0] <= fixed[0]
