"""Training jobs on two nodes with a stub of SLURM: one resumes after interruptions, one runs a plan."""

import os
import re
import shlex
import signal
from pathlib import Path

import pytest

from megatron_ampipe.files.inputs import config_names
from tests.conftest import Command
from tests.forked import run_ranks
from tests.megatron.launcher import (
    MOCK_DATA,
    MODULE,
    TINY_GPT,
    TINY_MOE,
    environment,
    meeting_place,
    parse,
    train,
)
from tests.slurm.cluster import Cluster

# So many that the training has not ended before a signal arrives, on a busy machine too.
NUM_ITERATIONS = 48
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


PLANNED_MODEL = """\
num-layers: 2
hidden-size: 64
num-attention-heads: 4
seq-length: 64
max-position-embeddings: 64
disable-bias-linear: true
attention-dropout: 0
hidden-dropout: 0
transformer-impl: local
num-experts: 8
moe-router-topk: 4
moe-token-dispatcher-type: alltoall
expert-model-parallel-size: 4
"""
PLANNED_RUN = """\
micro-batch-size: 1
global-batch-size: 16
train-iters: 2
lr: 1e-3
eval-iters: 0
eval-interval: 100
log-interval: 1
tokenizer-type: NullTokenizer
vocab-size: 255
mock-data: true
"""


def slow_between_nodes(folder: Path, *, ranks_per_node: int) -> Path:
    """A cluster file with small nodes, and links between them that a plan has to save."""
    text = config_names("clusters")["dgx-h100"].read_text()
    within, between = text.replace("ranks_per_node: 8", f"ranks_per_node: {ranks_per_node}").split("\ninter:")
    slow = re.sub("beta_us_per_mb: .*", "beta_us_per_mb: 1000000", between)
    file = folder / "nodes.yaml"
    file.write_text(f"{within}\ninter:{slow}")
    return file


@pytest.mark.timeout(600)
def test_what_a_plan_says_is_accepted_by_sbatch_and_trains(
    tmp_path: Path, request: pytest.FixtureRequest, ampipe: Command
) -> None:
    """On a login node, which has no launcher that says how many ranks share a node."""
    # Trained by forked ranks, not by the job's torchrun as in the other test: a fifth of the time.
    cluster = Cluster(tmp_path / "job", fake_python='printf "%s\\n" "$@" >words.$SLURM_NODEID')
    request.addfinalizer(cluster.end)
    model, run_file, plan = (cluster.folder / f"{name}.yaml" for name in ("model", "run", "plan"))
    model.write_text(PLANNED_MODEL)
    run_file.write_text(PLANNED_RUN)
    nodes = slow_between_nodes(cluster.folder, ranks_per_node=2)
    words = ["--model", str(model), "--cluster", str(nodes), "--ranks", "4", "--exchange", "nodes"]
    said = ampipe("plan", *words, "--degrees", "2", "--output", str(plan)).out
    (flags,) = re.findall("^flags: (.*)$", said, re.M)
    assert "--ampipe-exchange nodes" in flags
    job = ["--nodes", "2", "--gpus-per-node", "2", "--model", str(model), "--run", str(run_file)]
    done = cluster.ampipe_sbatch(*job, "--", *flags.split())
    assert done.returncode == 0, done.stderr
    job += ["--folder", str(cluster.folder / "runs"), "--max-restarts", "0"]
    cluster.submit(*job, "--", "--ampipe-plan", str(plan))
    assert cluster.run()[-1].code == 0, cluster.everything()
    words = (cluster.folder / "words.0").read_text().splitlines()
    assert words[words.index("--nproc-per-node") + 1] == "2"
    training = words[words.index(MODULE) + 1 :]
    env, places = environment() | meeting_place(), {"num_ranks": 4, "ranks_per_node": 2}
    codes, logs = run_ranks(MODULE, training, env=env, timeout_s=300, **places)
    run = parse(0, "".join(logs))
    assert codes == [0] * 4 and run.iterations == [1, 2], run.output[-4000:]
    assert "The reasons are in the table 'AMPipe' near the start" in logs[0].splitlines()[-1]
    assert "│ exchange" in logs[0] and "│ nodes" in logs[0], "the start-up table"
