"""``ampipe doctor`` with real ranks: checks that they agree, and reports overlap only if there is overlap."""

import re
import socket
import sys
import time
from pathlib import Path

import pytest

from tests.forked import completed
from tests.megatron.launcher import environment, torchrun_command

pytestmark = pytest.mark.timeout(180)

DOCTOR = [sys.executable, "-m", "megatron_ampipe.cli", "doctor"]


@pytest.mark.alone
def test_the_doctor_starts_ranks_and_measures(tmp_path: Path) -> None:
    done = completed(*DOCTOR, cwd=tmp_path, env=environment())
    assert "2 ranks: versions and environment agree" in done.stdout
    pattern = r"overlap on cpu: all-to-all (.*) ms, computation (.*) ms, together (.*) ms: (.*)% hidden, "
    (found,) = re.findall(pattern, done.stdout)
    *alone, together, hidden = map(float, found)
    # On any machine: both together take longer than one, and not much longer than one after the other.
    assert 0.8 * min(alone) < together < 1.5 * sum(alone)
    # What is hidden is the time that was saved, of what could be; the times are printed with one decimal.
    saved = 100 * (sum(alone) - together) / min(alone)
    rounding = 100 * 0.2 / min(alone)
    assert hidden == pytest.approx(min(100.0, max(0.0, saved)), abs=1 + rounding)


def test_ranks_of_torchrun_with_different_settings_are_reported(tmp_path: Path) -> None:
    script = tmp_path / "rank.sh"
    setting = 'if [ "$RANK" = 1 ]; then export NCCL_ALGO=Tree; fi\n'
    script.write_text(f"{setting}exec {' '.join(DOCTOR)} --quick\n")
    command = torchrun_command("--no-python", "bash", str(script))
    done = completed(*command, cwd=tmp_path, env=environment(), code=1)
    wrong = "problem: ranks do not agree on NCCL_ALGO: (not there) on ranks [0]; Tree on ranks [1]."
    assert wrong in done.stdout
    assert done.stdout.count("What a training run uses") == 1, "only the first rank prints"


def test_a_failed_rendezvous_is_reported_without_a_traceback(tmp_path: Path) -> None:
    """One rank of two, at a port on which another program listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        done = completed(*DOCTOR, "--quick", cwd=tmp_path, env=environment() | rank | place, code=1)
    assert "Traceback" not in done.stderr
    assert "problem: the ranks cannot connect (" in done.stdout


@pytest.mark.alone
@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("executor", "least", "most"), [("ThreadExecutor", 0.6, 1.0), ("SequentialExecutor", 0.0, 0.3)]
)
def test_overlap_is_measured_only_if_there_is_overlap(
    executor: str, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transfer sleeps, so that it takes no CPU time from the computation."""
    from megatron_ampipe.runtime import executors
    from megatron_ampipe.runtime.collectives import Transfer
    from megatron_ampipe.tools import doctor_ranks

    class Sleep:
        wait = staticmethod(lambda: time.sleep(0.012))

    monkeypatch.setattr(doctor_ranks, "ThreadExecutor", getattr(executors, executor))
    monkeypatch.setattr(doctor_ranks, "_exchange", lambda rows: Transfer((), (Sleep,)))
    found = doctor_ranks.measure("cpu")
    assert least <= found["hidden_share"] <= most, found
