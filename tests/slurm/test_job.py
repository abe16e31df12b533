"""What the job script decides, with a ``python`` inside the job that only pretends to train."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.timeout(60)

Run = Callable[..., Cluster]

WORDS = ["--nodes", "2", "--gpus-per-node", "4", "--job-name", "job", "--", "--lr", "1e-4"]
# Whole at once: the first node to end takes the other with it, in the middle of whatever it writes.
CHECKPOINT = (
    "cd runs/job/checkpoints; echo {iteration} >$SLURM_NODEID; "
    "mv $SLURM_NODEID latest_checkpointed_iteration.txt"
)
FAILS = "exit 1"
SECOND_NODE_FAILS = 'if [ "$SLURM_NODEID" = 1 ]; then exit 3; else sleep 600; fi'
WAITS = "echo waiting; sleep 600"
LISTENS = """
import pathlib, signal, time
def leave(*_):
    time.sleep(0.5)
    pathlib.Path("runs/job/checkpoints/latest_checkpointed_iteration.txt").write_text("7\\n")
    raise SystemExit(0)
print("at first", signal.signal(signal.SIGUSR1, leave).name, flush=True)
time.sleep(600)
"""
"""What a rank does, in a Python of its own: bash cannot listen for a signal that it was told to ignore."""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Submit a job whose ``python`` is a bash script; nothing of it outlives the test."""
    clusters = []

    def submit(python: str, *words: str) -> Cluster:
        clusters.append(Cluster(tmp_path / "job", fake_python=python))
        clusters[-1].submit(*words, *WORDS)
        return clusters[-1]

    yield submit
    for cluster in clusters:
        cluster.end()


def test_one_torchrun_on_each_node_in_the_order_of_the_nodes(run: Run) -> None:
    cluster = run('echo "$@"')
    assert cluster.wait() == "COMPLETED"
    for node in (1, 2):
        words = shlex.split(cluster.log("job", attempt=0, node=node))
        assert words[:4] == ["-m", "torch.distributed.run", "--node-rank", str(node - 1)]
        flags = dict(zip(words[4:12:2], words[5:12:2], strict=True))
        assert flags.pop("--master-port") == str(20000 + cluster.job_id % 12000)
        assert flags == {"--nnodes": "2", "--nproc-per-node": "4", "--master-addr": "127.0.0.1"}
        training = " ".join(words[12:])
        checkpoints = "runs/job/checkpoints"
        assert training == (
            f"-m megatron_ampipe.pretrain_gpt --lr 1e-4 --save {checkpoints} --load {checkpoints} "
            "--save-interval 500 --exit-signal-handler --exit-signal SIGUSR1"
        )


def test_a_node_that_fails_ends_the_others(run: Run) -> None:
    cluster = run(SECOND_NODE_FAILS, "--max-restarts", "0")
    assert cluster.wait() == "FAILED"
    (attempt,) = cluster.attempts
    assert attempt.code != 0 and attempt.left == 0
    assert "restart 0 of at most 0: not requeued" in cluster.said("job")


def test_a_job_that_fails_twice_at_the_same_place_is_not_requeued_again(run: Run) -> None:
    cluster = run(FAILS)
    assert cluster.wait() == "FAILED"
    assert [(ended.requeued, ended.left) for ended in cluster.attempts] == [(True, 0), (False, 0)]
    assert "failed at the same checkpoint: not requeued" in cluster.said("job")


def test_a_job_that_gets_further_is_requeued_up_to_the_bound(run: Run) -> None:
    further = CHECKPOINT.format(iteration="$((10 + ${SLURM_RESTART_COUNT:-0}))")
    cluster = run(f"{further}; exit 1", "--max-restarts", "3")
    assert cluster.wait() == "FAILED"
    assert [attempt.requeued for attempt in cluster.attempts] == [True, True, True, False]
    said = cluster.said("job")
    assert "goes on from checkpoint 12" in said
    assert "restart 3 of at most 3: not requeued. Submit again to go on" in said


@pytest.mark.parametrize("times", [1, 2])
def test_a_signal_reaches_the_ranks_and_their_end_is_waited_for(run: Run, times: int) -> None:
    """Twice as well: a second signal ends the wait for the step once more."""
    cluster = run(f"exec {sys.executable} -c '{LISTENS}'", "--max-restarts", "0")
    # Until it listened, it was told to ignore the signal, as torchrun is, which does not listen.
    both_listen = "at first SIG_IGN"
    cluster.until(lambda: all(both_listen in cluster.log("job", attempt=0, node=node) for node in (1, 2)))
    for asked in range(times):
        os.kill(cluster.script_pid, signal.SIGUSR1)
        cluster.until(lambda asked=asked: cluster.said("job").count("asked to stop") > asked)
    cluster.wait()
    assert cluster.said("job").count("asked to stop") == times
    (attempt,) = cluster.attempts
    assert (attempt.code, attempt.left) == (0, 0)
    saved = cluster.folder / "runs/job/checkpoints/latest_checkpointed_iteration.txt"
    assert saved.read_text() == "7\n"


def test_a_cancelled_job_does_not_come_back(run: Run) -> None:
    cluster = run(WAITS)
    cluster.until(lambda: "waiting" in cluster.log("job", attempt=0, node=1))
    cluster.cancel()
    cluster.until(lambda: cluster.attempts)
    assert [attempt.requeued for attempt in cluster.attempts] == [False]
    assert "cancelled: not requeued" in cluster.said("job")


def test_the_logs_of_earlier_attempts_stay(run: Run) -> None:
    cluster = run('echo "attempt ${SLURM_RESTART_COUNT:-0}"; exit 1')
    cluster.wait()
    logs = [cluster.log("job", attempt=number, node=1) for number in (0, 1)]
    assert logs == ["attempt 0\n", "attempt 1\n"]
    assert cluster.said("job").count("node(s), first") == 2
