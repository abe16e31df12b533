"""A training job on two nodes with a stub of SLURM: it trains, and resumes after an interruption."""

import os
import re
import shlex
import signal
from pathlib import Path

import pytest

from tests.megatron.launcher import MOCK_DATA, TINY_GPT, TINY_MOE, parse, train
from tests.slurm.cluster import Cluster

NUM_ITERATIONS = 24
SAVE_INTERVAL = 8
KILLED_AFTER = 10
ASKED_TO_STOP_AFTER = 15
# With dropout (Megatron's default), so that the restored random state matters.
FLAGS = shlex.split(
    f"--expert-model-parallel-size 2 --train-iters {NUM_ITERATIONS} --lr-decay-style constant"
)


@pytest.mark.timeout(900)
def test_an_interrupted_job_has_the_loss_curve_of_an_uninterrupted_run(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The first attempt loses a rank, the second receives USR1 twice, the third finishes."""
    cluster = Cluster(tmp_path / "job")
    request.addfinalizer(cluster.end)
    (cluster.folder / "run.yaml").write_text(f"save-interval: {SAVE_INTERVAL}\nampipe:\n  degree: 4\n")
    words = ["--nodes", "2", "--gpus-per-node", "1", "--job-name", "job", "--run", "run.yaml", "--no-check"]
    cluster.submit(*words, "--", *TINY_GPT, *TINY_MOE, *MOCK_DATA, *FLAGS)
    expected = train(*FLAGS, "--ampipe-degree", "4")
    assert expected.iterations == list(range(1, NUM_ITERATIONS + 1))
    assert expected.lm_loss[-1] < expected.lm_loss[0] - 0.05

    def log(attempt: int) -> str:
        # Megatron logs iterations on the last node.
        return cluster.log(attempt=attempt, node=2)

    def until(iteration: int, *, attempt: int) -> None:
        cluster.until(lambda: f"iteration {iteration:8d}/" in log(attempt), timeout_s=300)

    script = cluster.start()
    until(KILLED_AFTER, attempt=0)
    os.kill(cluster.processes("LOCAL_RANK=")[0], signal.SIGKILL)
    attempts = [cluster.ended(script)]
    script = cluster.start()
    until(ASKED_TO_STOP_AFTER, attempt=1)
    # The second one interrupts the wait for the step again.
    for asked in (1, 2):
        os.kill(script.pid, signal.SIGUSR1)
        cluster.until(lambda asked=asked: cluster.said().count("received USR1") == asked)
    attempts += [cluster.ended(script), cluster.ended(cluster.start(), timeout_s=300)]
    assert [attempt.code != 0 for attempt in attempts] == [True, False, False], cluster.everything()
    assert [attempt.requeued for attempt in attempts] == [True, True, False]
    assert not any(attempt.left for attempt in attempts), "all processes of both nodes have ended"
    assert f"finished; last checkpoint: {NUM_ITERATIONS}" in cluster.said()
    assert "chunk boundaries" in cluster.log(attempt=0, node=1), "the start-up table of rank 0"
    runs = [parse(0, log(attempt)) for attempt in range(3)]
    checkpoints = [int(text) for text in re.findall(r"resumes from checkpoint (\d+)", cluster.said())]
    assert [run.iterations[0] - 1 for run in runs] == [0, *checkpoints]
    assert KILLED_AFTER // SAVE_INTERVAL * SAVE_INTERVAL <= checkpoints[0] <= runs[0].iterations[-1]
    assert ASKED_TO_STOP_AFTER <= checkpoints[1] == runs[1].iterations[-1] < NUM_ITERATIONS
    assert runs[2].iterations[-1] == NUM_ITERATIONS
    for number, run in enumerate(runs):
        assert run.iterations == list(range(run.iterations[0], run.iterations[-1] + 1))
        same = slice(run.iterations[0] - 1, run.iterations[-1])
        assert run.grad_norm == expected.grad_norm[same]
        losses = expected.lm_loss[same]
        if number > 0:
            # For the second iteration after a resume, Megatron prints the mean of the first two.
            losses[1] = pytest.approx((losses[0] + losses[1]) / 2, abs=2e-6)
        assert run.lm_loss == losses
