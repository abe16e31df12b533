"""``ampipe doctor`` with real ranks: checks that they agree, and reports overlap only if there is overlap."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron.launcher import REPOSITORY, environment, torchrun_command

pytestmark = [pytest.mark.timeout(180), pytest.mark.world_size(2)]


def run(command: list[str], *, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command that writes ``health.json`` in the folder."""
    return subprocess.run(
        command, cwd=folder, env=environment() | variables, capture_output=True, text=True, timeout=150
    )


def test_the_doctor_starts_ranks_and_measures(tmp_path: Path) -> None:
    done = run(
        [sys.executable, "-m", "megatron_ampipe.cli", "doctor", "--json", "health.json"], folder=tmp_path
    )
    document = json.loads((tmp_path / "health.json").read_text())
    assert done.returncode == 0, (done.stderr, document["problems"])
    found = document["overlap"]
    assert len(document["ranks"]) == 2 and document["differences"] == []
    assert found["what"] == "all-to-all" and found["device"] == "cpu"
    together, alone = found["together_ms"], (found["communication_ms"], found["computation_ms"])
    # On any machine: both together take longer than one, and not much longer than one after the other.
    assert 0.8 * min(alone) < together < 1.5 * sum(alone)
    assert 0 <= found["hidden_share"] <= 1
    assert "2 ranks on 1 host(s): versions and environment agree" in done.stdout
    assert "overlap on the CPU: all-to-all of " in done.stdout


def test_ranks_of_torchrun_with_different_settings_are_reported(tmp_path: Path) -> None:
    script = tmp_path / "rank.sh"
    script.write_text(
        'if [ "$RANK" = 1 ]; then export NCCL_ALGO=Tree; fi\n'
        f'exec {sys.executable} -m megatron_ampipe.cli doctor --quick --json "$PWD/health.json"\n'
    )
    done = run(torchrun_command("--no-python", "bash", str(script)), folder=tmp_path)
    document = json.loads((tmp_path / "health.json").read_text())
    assert done.returncode == 1
    (difference,) = document["differences"]
    assert difference == {"name": "NCCL_ALGO", "values": {"(not there)": [0], "Tree": [1]}}
    assert "ranks do not agree on NCCL_ALGO. Start all of them identically." in document["problems"]
    assert done.stdout.count("What a training run uses") == 1, "only the first rank prints"


def test_a_failed_rendezvous_is_reported_without_a_traceback(tmp_path: Path) -> None:
    """One rank of two, at a port on which another program listens."""
    command = [sys.executable, "-m", "megatron_ampipe.cli", "doctor", "--quick", "--json", "health.json"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        done = run(command, folder=tmp_path, **rank, **place)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (problem,) = json.loads((tmp_path / "health.json").read_text())["problems"]
    assert problem.startswith("the ranks cannot connect (")


@pytest.mark.alone
@pytest.mark.parametrize(
    ("executor", "least", "most"), [("ThreadExecutor", 0.6, 1.0), ("SequentialExecutor", 0.0, 0.3)]
)
def test_overlap_is_measured_only_if_there_is_overlap(
    executor: str, least: float, most: float, tmp_path: Path
) -> None:
    """The transfer sleeps, so that it takes no CPU time from the computation."""
    code = f"""
import json, time, torch, torch.distributed as dist
from megatron_ampipe.runtime import executors
from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.tools import doctor_ranks
doctor_ranks.ThreadExecutor = executors.{executor}
class Sleep:
    wait = staticmethod(lambda: time.sleep(0.012))
doctor_ranks._Work._exchange = lambda work: Transfer((), (Sleep,))
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
print(json.dumps(doctor_ranks.measure("cpu")))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=environment(), capture_output=True, text=True,
        timeout=100,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    assert least <= found["hidden_share"] <= most, found
