"""How a training ends, and goes on: a full disk, Ctrl-C, a missing Megatron."""

import resource
import signal
import sys
from pathlib import Path

import pytest

from tests.forked import REPOSITORY, completed
from tests.megatron.launcher import MODULE, TINY_GPT, environment, started, train

pytestmark = pytest.mark.timeout(900)


def test_a_full_disk_ends_with_3_and_the_last_checkpoint_loads(tmp_path: Path) -> None:
    """A limit on the file size of the process has the same effect as a full disk."""
    saving = ("--save", str(tmp_path), "--save-interval", "2")
    log = tmp_path / "log"
    saves = started(*saving, "--train-iters", "1000", logs=[log], until="successfully saved checkpoint")
    with saves as (job,):
        resource.prlimit(job.pid, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        code = job.wait(timeout=90)
    output = log.read_text()
    assert code == 3, output[-4000:]
    last = (tmp_path / "latest_checkpointed_iteration.txt").read_text()
    assert f"successfully saved checkpoint from iteration {last:>7} to" in output
    assert output.splitlines()[-1] == "error: rank 0 failed; the cause is above."
    more = ["--train-iters", str(int(last) + 1), "--override-opt-param-scheduler"]
    assert train("--load", str(tmp_path), *more, num_ranks=1).iterations == [int(last) + 1]


def test_ctrl_c_ends_a_training_with_130_and_one_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    words = ["--train-iters", "100000", "--ampipe-degree", "2"]
    with started(*words, logs=[log], until="iteration        2/") as (job,):
        job.send_signal(signal.SIGINT)
        code = job.wait(timeout=60)
    output = log.read_text()
    assert code == 130, output[-4000:]
    assert "Traceback" not in output
    assert sum(line.startswith("interrupted. ") for line in output.splitlines()) == 1


def test_a_missing_megatron_is_reported_with_the_install_command(tmp_path: Path) -> None:
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").write_text("raise ImportError('no Megatron here')")
    env = {**environment(), "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    done = completed(sys.executable, "-m", MODULE, *TINY_GPT, "--mock-data", env=env, code=1)
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr
