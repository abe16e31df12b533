"""The decisions of the job script, with a fake ``python`` inside the job that does not train."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.timeout(60)

Submit = Callable[..., Cluster]

WORDS = ["--nodes", "2", "--gpus-per-node", "4", "--job-name", "job"]
FLAGS = ["--no-check", "--", "--lr", "1e-4"]
# Written atomically: the first node that ends terminates the other one, possibly while it writes.
CHECKPOINT = (
    "cd runs/job/$SLURM_JOB_ID/checkpoints; echo {iteration} >$SLURM_NODEID; "
    "mv $SLURM_NODEID latest_checkpointed_iteration.txt"
)


@pytest.fixture
def submit(tmp_path: Path, request: pytest.FixtureRequest) -> Submit:
    """Submits a job whose ``python`` is a bash script; all its processes end with the test."""

    def submitted(python: str, *words: str) -> Cluster:
        cluster = Cluster(tmp_path / "job", fake_python=python)
        request.addfinalizer(cluster.end)
        cluster.submit(*words, *WORDS, *FLAGS)
        return cluster

    return submitted


def test_one_torchrun_on_each_node_in_the_order_of_the_nodes(submit: Submit) -> None:
    """After the setup lines; each task of an array in a separate folder."""
    words = ["--setup", "export GREETING='hello' # a comment", "--setup", "lost=$NOT_SET_AT_ALL"]
    words += ["--sbatch-option=--array=7", "--folder", "here/it is"]
    cluster = submit('echo "$GREETING $@"', *words)
    assert cluster.run()[-1].code == 0
    task = "here/it is/7"
    for node in (1, 2):
        log = cluster.folder / task / f"logs/{cluster.job_id}.0/127.0.0.{node}.log"
        assert log.read_text() == (
            f"hello -m torch.distributed.run --node-rank {node - 1} --nnodes 2 --nproc-per-node 4 "
            f"--master-addr 127.0.0.1 --master-port {20000 + cluster.job_id % 12000} "
            f"-m megatron_ampipe.pretrain_gpt --save-interval=500 --lr 1e-4 --save {task}/checkpoints "
            f"--load {task}/checkpoints --exit-signal-handler --exit-signal SIGUSR1\n"
        )


def test_a_job_that_fails_twice_at_the_same_checkpoint_is_not_requeued_again(submit: Submit) -> None:
    """A node that fails ends the others."""
    # The second node fails first, else the first one's end could come before it has said anything.
    last = '[ "$SLURM_NODEID" = 1 ] || sleep 600; exit 1'
    cluster = submit(f'echo "attempt ${{SLURM_RESTART_COUNT:-0}}"; {last}')
    attempts = cluster.run()
    assert attempts[-1].code != 0
    assert [(ended.requeued, ended.left) for ended in attempts] == [(True, 0), (False, 0)]
    assert "failed at the same checkpoint: not requeued" in cluster.said()
    logs = [cluster.log(attempt=number, node=1) for number in (0, 1)]
    assert logs == ["attempt 0\n", "attempt 1\n"]


def test_a_job_that_makes_progress_is_requeued_up_to_the_limit(submit: Submit) -> None:
    further = CHECKPOINT.format(iteration="$((10 + ${SLURM_RESTART_COUNT:-0}))")
    cluster = submit(f"{further}; exit 1", "--max-restarts", "2")
    attempts = cluster.run()
    assert attempts[-1].code != 0
    assert [attempt.requeued for attempt in attempts] == [True, True, False]
    said = cluster.said()
    assert "attempt 1: 2 node(s), first 127.0.0.1; last checkpoint: none" in said
    assert "resumes from checkpoint 11" in said
    folder = f"runs/job/{cluster.job_id}"
    assert f"restart 2 of at most 2: not requeued. To resume, submit with --folder {folder}" in said
    # A job with other settings does not find the checkpoints.
    cluster.submit(*WORDS, "--max-restarts", "0", *FLAGS[:-1], "3e-4")
    assert [attempt.requeued for attempt in cluster.run()] == [False]
    assert "attempt 1: 2 node(s), first 127.0.0.1; last checkpoint: none" in cluster.said()


def test_a_cancelled_job_is_not_requeued(submit: Submit) -> None:
    cluster = submit("echo waiting; sleep 600")
    script = cluster.start()
    cluster.until(lambda: "waiting" in cluster.log(attempt=0, node=1))
    cluster.cancel(script)
    assert not cluster.ended(script).requeued
    assert "cancelled: not requeued" in cluster.said()


def test_a_failed_setup_line_is_named(submit: Submit) -> None:
    cluster = submit("echo trained", "--setup", "cd /no/such/folder", "--max-restarts", "0")
    assert cluster.run()[-1].code != 0
    logs = "".join(cluster.log(attempt=0, node=node) for node in (1, 2))
    assert ": --setup failed with code 1: cd /no/such/folder\n" in logs and "trained" not in logs


def test_a_container_job_needs_pyxis(submit: Submit, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = submit("echo trained", "--container", "team#image")
    assert cluster.run()[-1].code == 0
    monkeypatch.setenv("STUB_WITHOUT_PYXIS", "1")
    ended = cluster.ended(cluster.start())
    assert ended.code != 0 and not ended.requeued
    assert "has no option --container-image, so pyxis is not installed: not started" in cluster.said()
