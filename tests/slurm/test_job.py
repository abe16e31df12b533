"""The decisions of the job script, with a fake ``python`` inside the job that does not train."""

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

WORDS = ["--nodes", "2", "--gpus-per-node", "4", "--job-name", "job"]
FLAGS = ["--no-check", "--", "--lr", "1e-4"]
# Written atomically: the first node that ends terminates the other one, possibly while it writes.
CHECKPOINT = (
    "cd runs/job/$SLURM_JOB_ID/checkpoints; echo {iteration} >$SLURM_NODEID; "
    "mv $SLURM_NODEID latest_checkpointed_iteration.txt"
)
LISTENS = """
import os, pathlib, signal, time
run_dir = pathlib.Path("runs/job", os.environ["SLURM_JOB_ID"])
def leave(*_):
    while not (run_dir / "all signals were sent").exists():
        time.sleep(0.05)
    time.sleep(0.5)
    (run_dir / "checkpoints/latest_checkpointed_iteration.txt").write_text("7\\n")
    raise SystemExit(0)
print("at first", signal.signal(signal.SIGUSR1, leave).name, flush=True)
time.sleep(600)
"""
"""What a rank does, in a separate Python: bash cannot handle a signal that was ignored when it started."""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Submit a job whose ``python`` is a bash script; all its processes end with the test."""
    clusters = []

    def submit(python: str, *words: str) -> Cluster:
        clusters.append(Cluster(tmp_path / "job", fake_python=python))
        clusters[-1].submit(*words, *WORDS, *FLAGS)
        return clusters[-1]

    yield submit
    for cluster in clusters:
        cluster.end()


def test_one_torchrun_on_each_node_in_the_order_of_the_nodes(run: Run) -> None:
    """After the setup lines; each task of an array in a separate folder."""
    words = ["--setup", "export GREETING='hello' # a comment", "--setup", "lost=$NOT_SET_AT_ALL"]
    words += ["--sbatch-option=--array=7", "--folder", "here/it is"]
    cluster = run('echo "$GREETING $@"', *words)
    assert cluster.wait() == "COMPLETED"
    task = "here/it is/7"
    for node in (1, 2):
        log = (cluster.folder / task / f"logs/{cluster.job_id}.0/127.0.0.{node}.log").read_text()
        greeting, *found = shlex.split(log.replace(task, "TASK"))
        assert greeting == "hello"
        assert found[:4] == ["-m", "torch.distributed.run", "--node-rank", str(node - 1)]
        flags = dict(zip(found[4:12:2], found[5:12:2], strict=True))
        assert flags.pop("--master-port") == str(20000 + cluster.job_id % 12000)
        assert flags == {"--nnodes": "2", "--nproc-per-node": "4", "--master-addr": "127.0.0.1"}
        assert " ".join(found[12:]) == (
            "-m megatron_ampipe.pretrain_gpt --save-interval=500 --lr 1e-4 --save TASK/checkpoints "
            "--load TASK/checkpoints --exit-signal-handler --exit-signal SIGUSR1"
        )


def test_a_node_that_fails_ends_the_others(run: Run) -> None:
    cluster = run('if [ "$SLURM_NODEID" = 1 ]; then exit 3; else sleep 600; fi', "--max-restarts", "0")
    assert cluster.wait() == "FAILED"
    (attempt,) = cluster.attempts
    assert attempt.code != 0 and attempt.left == 0
    assert "restart 0 of at most 0: not requeued" in cluster.said("job")


def test_a_job_that_fails_twice_at_the_same_checkpoint_is_not_requeued_again(run: Run) -> None:
    # The second node fails first, else the first one's end could come before it has said anything.
    last = '[ "$SLURM_NODEID" = 1 ] || sleep 600; exit 1'
    cluster = run(f'echo "attempt ${{SLURM_RESTART_COUNT:-0}}"; {last}')
    assert cluster.wait() == "FAILED"
    assert [(ended.requeued, ended.left) for ended in cluster.attempts] == [(True, 0), (False, 0)]
    assert "failed at the same checkpoint: not requeued" in cluster.said("job")
    logs = [cluster.log("job", attempt=number, node=1) for number in (0, 1)]
    assert logs == ["attempt 0\n", "attempt 1\n"]


def test_a_job_that_makes_progress_is_requeued_up_to_the_limit(run: Run) -> None:
    further = CHECKPOINT.format(iteration="$((10 + ${SLURM_RESTART_COUNT:-0}))")
    cluster = run(f"{further}; exit 1", "--max-restarts", "2")
    assert cluster.wait() == "FAILED"
    assert [attempt.requeued for attempt in cluster.attempts] == [True, True, False]
    said = cluster.said("job")
    assert "attempt 1: 2 node(s), first 127.0.0.1; last checkpoint: none" in said
    assert "resumes from checkpoint 11" in said
    assert (
        f"restart 2 of at most 2: not requeued. To resume, submit with --folder runs/job/{cluster.job_id}"
        in (said)
    )
    # A job with other settings does not find the checkpoints.
    cluster.next_job()
    cluster.submit(*WORDS, "--max-restarts", "0", *FLAGS[:-1], "3e-4")
    cluster.wait()
    assert "attempt 1: 2 node(s), first 127.0.0.1; last checkpoint: none" in cluster.said("job")


def test_signals_reach_the_ranks_and_the_script_waits_for_them(run: Run) -> None:
    """The second one interrupts the wait for the step again."""
    cluster = run(f"exec {sys.executable} -c '{LISTENS}'", "--max-restarts", "0")
    # Before the rank handles the signal it ignores it; torchrun always ignores it.
    both_listen = "at first SIG_IGN"
    cluster.until(lambda: all(both_listen in cluster.log("job", attempt=0, node=node) for node in (1, 2)))
    for asked in range(2):
        os.kill(cluster.script_pid, signal.SIGUSR1)
        cluster.until(lambda asked=asked: cluster.said("job").count("received USR1") > asked)
    (cluster.run_dir("job") / "all signals were sent").touch()
    cluster.wait()
    assert cluster.said("job").count("received USR1") == 2
    (attempt,) = cluster.attempts
    assert (attempt.code, attempt.left) == (0, 0)
    saved = cluster.run_dir("job") / "checkpoints/latest_checkpointed_iteration.txt"
    assert saved.read_text() == "7\n"


def test_a_cancelled_job_is_not_requeued(run: Run) -> None:
    cluster = run("echo waiting; sleep 600")
    cluster.until(lambda: "waiting" in cluster.log("job", attempt=0, node=1))
    cluster.cancel()
    cluster.until(lambda: cluster.attempts)
    assert [attempt.requeued for attempt in cluster.attempts] == [False]
    assert "cancelled: not requeued" in cluster.said("job")


def test_a_failed_setup_line_is_named(run: Run) -> None:
    cluster = run("echo trained", "--setup", "cd /no/such/folder", "--max-restarts", "0")
    assert cluster.wait() == "FAILED"
    logs = "".join(cluster.log("job", attempt=0, node=node) for node in (1, 2))
    assert ": --setup failed with code 1: cd /no/such/folder\n" in logs and "trained" not in logs


def test_a_container_job_needs_pyxis(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = run("echo trained", "--container", "team#image")
    assert cluster.wait() == "COMPLETED"
    cluster.next_job()
    monkeypatch.setenv("STUB_WITHOUT_PYXIS", "1")
    cluster.submit("--container", "team#image", *WORDS, *FLAGS)
    assert cluster.wait() == "FAILED"
    assert "has no option --container-image, so pyxis is not installed: not started" in cluster.said("job")
