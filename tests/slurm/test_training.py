"""A training job on two nodes with a stub of SLURM: it trains, and resumes after an interruption."""

import os
import re
import shlex
import signal
from pathlib import Path

import pytest

from tests.megatron.launcher import MOCK_DATA, MODULE, TINY_GPT, TINY_MOE, Run
from tests.slurm.cluster import Cluster

NUM_ITERATIONS = 24
SAVE_INTERVAL = 8
KILLED_AFTER = 10
ASKED_TO_STOP_AFTER = 15
NAME = "tiny"
RUN = f"save-interval: {SAVE_INTERVAL}\nampipe:\n  degree: 4\n"
# With dropout (Megatron's default), so that the restored random state matters.
FLAGS = [
    *TINY_GPT, *TINY_MOE, *MOCK_DATA,
    *shlex.split(f"--expert-model-parallel-size 2 --train-iters {NUM_ITERATIONS} --lr-decay-style constant"),
]  # fmt: skip


def submitted(folder: Path) -> Cluster:
    folder.mkdir()
    (folder / "run.yaml").write_text(RUN)
    cluster = Cluster(folder)
    words = ["--nodes", "2", "--gpus-per-node", "1", "--job-name", NAME, "--run", "run.yaml", "--no-check"]
    cluster.submit(*words, "--", *FLAGS)
    return cluster


def run_of(cluster: Cluster, *, attempt: int) -> Run:
    """What the second node logs, on which Megatron logs iterations."""
    return cluster.losses(NAME, attempt=attempt, node=2)


def is_rank(pid: int) -> bool:
    return b"\0LOCAL_RANK=" in Path(f"/proc/{pid}/environ").read_bytes()


@pytest.mark.timeout(900)
def test_an_interrupted_job_has_the_loss_curve_of_an_uninterrupted_one(tmp_path: Path) -> None:
    """The first attempt loses a rank, the second receives USR1, the third finishes."""
    whole = submitted(tmp_path / "whole")
    assert whole.wait(timeout_s=300) == "COMPLETED", whole.everything()
    (attempt,) = whole.attempts
    assert (attempt.code, attempt.requeued, attempt.left) == (0, False, 0)
    expected = run_of(whole, attempt=0)
    assert expected.iterations == list(range(1, NUM_ITERATIONS + 1))
    assert expected.lm_loss[-1] < expected.lm_loss[0] - 0.05
    assert f"finished; last checkpoint: {NUM_ITERATIONS}" in whole.said(NAME)
    assert "chunk boundaries" in whole.log(NAME, attempt=0, node=1), "the start-up table of rank 0"

    cluster = submitted(tmp_path / "interrupted")

    def until(iteration: int, *, attempt: int) -> None:
        cluster.until(
            lambda: max(run_of(cluster, attempt=attempt).iterations, default=0) >= iteration, timeout_s=300
        )

    until(KILLED_AFTER, attempt=0)
    first, _ = [pid for pid in cluster.processes(MODULE) if is_rank(pid)]
    os.kill(first, signal.SIGKILL)
    until(ASKED_TO_STOP_AFTER, attempt=1)
    os.kill(cluster.script_pid, signal.SIGUSR1)
    assert cluster.wait(timeout_s=300) == "COMPLETED", cluster.everything()
    lost, asked, last = cluster.attempts
    assert lost.code != 0 and asked.code == last.code == 0
    assert [attempt.requeued for attempt in cluster.attempts] == [True, True, False]
    assert not any(attempt.left for attempt in cluster.attempts), "all processes of both nodes have ended"
    runs = [run_of(cluster, attempt=number) for number in range(3)]
    checkpoints = [int(text) for text in re.findall(r"resumes from checkpoint (\d+)", cluster.said(NAME))]
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
