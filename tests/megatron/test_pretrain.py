"""How a training ends, and goes on: a resumed run, a full disk, Ctrl-C, a missing Megatron."""

import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.megatron.launcher import MODULE, REPOSITORY, TINY_GPT, TINY_MOE, environment, train
from tests.rendezvous import meeting_place

pytestmark = pytest.mark.timeout(900)


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    """With dropout, so that the restored random state matters."""
    shared = ["--expert-model-parallel-size", "2", "--train-iters", "6"]
    unbroken = train(*shared, "--save", str(tmp_path), "--save-interval", "2")
    resumed = train(*shared, "--load", str(tmp_path), "--ckpt-step", "2")
    assert resumed.iterations == [3, 4, 5, 6]
    assert resumed.grad_norm == unbroken.grad_norm[2:]
    # Megatron does not reset its sum at the first iteration that it logs after a resume, so it prints the
    # mean of both for the second.
    mean = (unbroken.lm_loss[2] + unbroken.lm_loss[3]) / 2
    assert resumed.lm_loss[1] == pytest.approx(mean, abs=2e-6)
    for index in (0, 2, 3):
        assert resumed.lm_loss[index] == unbroken.lm_loss[2 + index]
        assert resumed.load_balancing_loss[index] == unbroken.load_balancing_loss[2 + index]


def _start_alone(log: Path, *arguments: str, until: str) -> subprocess.Popen[bytes]:
    """Start a run of one rank, and wait until it prints ``until``."""
    address = meeting_place()
    with log.open("wb") as output:
        job = subprocess.Popen(
            [sys.executable, "-m", MODULE, *TINY_GPT, *TINY_MOE, "--mock-data", *arguments],
            cwd=REPOSITORY,
            env=environment() | address | {"RANK": "0", "WORLD_SIZE": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            # A shell that runs the tests in the background ignores SIGINT, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    while until not in log.read_text():
        assert job.poll() is None, log.read_text()[-4000:]
        time.sleep(0.05)
    return job


def test_a_full_disk_ends_with_3_and_the_last_checkpoint_loads(tmp_path: Path) -> None:
    """A limit on the file size of the process has the same effect as a full disk."""
    saving = ("--save", str(tmp_path), "--save-interval", "2")
    log = tmp_path / "log"
    job = _start_alone(log, *saving, "--train-iters", "1000", until="successfully saved checkpoint")
    try:
        resource.prlimit(job.pid, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        code = job.wait(timeout=90)
    finally:
        job.kill()
    output = log.read_text()
    assert code == 3, output[-4000:]
    last = (tmp_path / "latest_checkpointed_iteration.txt").read_text()
    assert f"successfully saved checkpoint from iteration {last:>7} to" in output
    assert output.splitlines()[-1] == "error: rank 0 failed; the cause is above."
    more = ["--train-iters", str(int(last) + 1), "--override-opt-param-scheduler"]
    assert train("--load", str(tmp_path), *more, num_ranks=1).iterations == [int(last) + 1]


def test_ctrl_c_ends_a_training_with_130_and_one_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    job = _start_alone(log, "--train-iters", "100000", "--ampipe-degree", "2", until="iteration        2/")
    try:
        job.send_signal(signal.SIGINT)
        code = job.wait(timeout=60)
    finally:
        job.kill()
    output = log.read_text()
    assert code == 130, output[-4000:]
    assert "Traceback" not in output
    assert sum(line.startswith("interrupted. ") for line in output.splitlines()) == 1


def test_a_missing_megatron_is_reported_with_the_install_command(tmp_path: Path) -> None:
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").write_text("raise ImportError('no Megatron here')")
    done = subprocess.run(
        [sys.executable, "-m", MODULE, *TINY_GPT, "--mock-data"],
        cwd=REPOSITORY,
        env={**environment(), "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr
