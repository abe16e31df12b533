"""A training job on two nodes with a stub of SLURM: it trains, and resumes after an interruption."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.megatron.launcher import MODULE
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.timeout(900)

NUM_ITERATIONS = 24
SAVE_INTERVAL = 8
KILLED_AFTER = 10
ASKED_TO_STOP_AFTER = 15
NAME = "tiny"
MODEL = """
num-layers: 2
hidden-size: 64
num-attention-heads: 4
seq-length: 64
max-position-embeddings: 64
disable-bias-linear: true
num-experts: 4
moe-router-topk: 2
moe-token-dispatcher-type: alltoall
moe-router-load-balancing-type: aux_loss
moe-aux-loss-coeff: 1.0e-2
tokenizer-type: NullTokenizer
vocab-size: 255
"""
RUN = f"""
expert-model-parallel-size: 2
mock-data: true
micro-batch-size: 1
global-batch-size: 4
train-iters: {NUM_ITERATIONS}
# With dropout (Megatron's default), so that the restored random state matters.
lr: 1.0e-3
lr-decay-style: constant
save-interval: {SAVE_INTERVAL}
log-interval: 1
eval-iters: 0
eval-interval: 100
ampipe:
  degree: 4
"""
WORDS = f"--nodes 2 --gpus-per-node 1 --job-name {NAME} --model model.yaml --run run.yaml".split()
LAST_RANKS_NODE = 2
"""The node on which Megatron logs iterations."""


def submitted(folder: Path, *words: str) -> Cluster:
    (folder / "model.yaml").write_text(MODEL)
    (folder / "run.yaml").write_text(RUN)
    cluster = Cluster(folder)
    cluster.submit(*WORDS, *words)
    return cluster


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = submitted(tmp_path_factory.mktemp("uninterrupted"))
    cluster.wait(timeout_s=300)
    yield cluster
    cluster.end()


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The same job: the first attempt loses a rank, the second receives USR1, the third finishes."""
    # The flags were checked with Megatron for the other job.
    cluster = submitted(tmp_path_factory.mktemp("interrupted"), "--no-check")
    cluster.until(lambda: _last_iteration(cluster, attempt=0) >= KILLED_AFTER, timeout_s=300)
    ranks = [pid for pid in cluster.processes(MODULE) if _is_rank(pid)]
    assert len(ranks) == 2
    os.kill(ranks[0], signal.SIGKILL)
    cluster.until(lambda: _last_iteration(cluster, attempt=1) >= ASKED_TO_STOP_AFTER, timeout_s=300)
    os.kill(cluster.script_pid, signal.SIGUSR1)
    cluster.wait(timeout_s=300)
    yield cluster
    cluster.end()


def _is_rank(pid: int) -> bool:
    return b"\0LOCAL_RANK=" in Path(f"/proc/{pid}/environ").read_bytes()


def _last_iteration(cluster: Cluster, *, attempt: int) -> int:
    return max(cluster.losses(NAME, attempt=attempt, node=LAST_RANKS_NODE).iterations, default=0)


def test_a_job_on_two_nodes_trains_and_each_node_has_its_log(uninterrupted: Cluster) -> None:
    assert uninterrupted.state == "COMPLETED", uninterrupted.everything()
    (attempt,) = uninterrupted.attempts
    assert (attempt.code, attempt.requeued, attempt.left) == (0, False, 0)
    run = uninterrupted.losses(NAME, attempt=0, node=LAST_RANKS_NODE)
    assert run.iterations == list(range(1, NUM_ITERATIONS + 1))
    assert run.lm_loss[-1] < run.lm_loss[0] - 0.05
    assert f"finished; last checkpoint: {NUM_ITERATIONS}" in uninterrupted.said(NAME)
    first, second = (uninterrupted.log(NAME, attempt=0, node=node) for node in (1, 2))
    assert "AMPipe" in first and "chunk boundaries" in first, "the start-up table of rank 0"
    assert "elapsed time per iteration" in second and "elapsed time per iteration" not in first


def test_a_lost_rank_and_a_signal_requeue_the_job(interrupted: Cluster) -> None:
    assert interrupted.state == "COMPLETED", interrupted.everything()
    lost, asked, last = interrupted.attempts
    assert lost.code != 0 and asked.code == last.code == 0
    assert [attempt.requeued for attempt in interrupted.attempts] == [True, True, False]
    assert not any(attempt.left for attempt in interrupted.attempts), "all processes of both nodes have ended"
    stopped_after = interrupted.losses(NAME, attempt=1, node=LAST_RANKS_NODE).iterations[-1]
    assert ASKED_TO_STOP_AFTER <= stopped_after < NUM_ITERATIONS
    said = interrupted.said(NAME)
    assert "failed with code" in said
    assert f"resumes from checkpoint {stopped_after}" in said, "not an earlier one"


def test_the_loss_curve_equals_that_of_the_uninterrupted_job(
    uninterrupted: Cluster, interrupted: Cluster
) -> None:
    expected = uninterrupted.losses(NAME, attempt=0, node=LAST_RANKS_NODE)
    attempts = [interrupted.losses(NAME, attempt=number, node=LAST_RANKS_NODE) for number in range(3)]
    resumed = re.findall(r"resumes from checkpoint (\d+)", interrupted.said(NAME))
    checkpoints = [int(iteration) for iteration in resumed]
    assert [run.iterations[0] - 1 for run in attempts] == [0, *checkpoints]
    assert KILLED_AFTER // SAVE_INTERVAL * SAVE_INTERVAL <= checkpoints[0] <= attempts[0].iterations[-1]
    for number, run in enumerate(attempts):
        first = run.iterations[0]
        assert run.iterations == list(range(first, run.iterations[-1] + 1))
        same = slice(first - 1, run.iterations[-1])
        assert run.grad_norm == expected.grad_norm[same]
        losses = expected.lm_loss[same]
        if number > 0:
            # For the second iteration after a resume, Megatron prints the mean of the first two.
            losses[1] = pytest.approx((losses[0] + losses[1]) / 2, abs=2e-6)
        assert run.lm_loss == losses
    assert attempts[2].iterations[-1] == NUM_ITERATIONS
