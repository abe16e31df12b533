"""The rank runner, with ranks that need no torch: what they return and say, how they fail, what is left."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_ampipe.errors import AMPipeError, BadInput, DifferenceFound, EnvironmentMissing, RunFailed
from megatron_ampipe.tools.measuring import network
from megatron_ampipe.tools.measuring.network import parse_link
from megatron_ampipe.tools.measuring.ranks import Rank, RankJob, run_ranks
from tests.forked import REPOSITORY, alive, until


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum(RankJob):
    number: int = 0


def add(rank: Rank[Sum]) -> tuple[int, str, str]:
    print("printed by a library")
    rank.say("step", rank.number)
    rank.progress()
    return rank.job.number + rank.number, os.environ["RANK"], os.environ["OMP_NUM_THREADS"]


def test_results_messages_and_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Lines stay whole where text and line end are written apart.
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    said: list[tuple[int, str, Any]] = []
    log = tmp_path / "log"
    job = Sum(num_ranks=2, link=parse_link("none"), number=5)
    results = run_ranks(job, add, on_message=lambda *message: said.append(message), log=log)
    assert results == [(5, "0", "1"), (6, "1", "1")]
    assert sorted(said) == [(0, "progress", None), (0, "step", 0), (1, "progress", None), (1, "step", 1)]
    assert log.read_text() == "printed by a library\n" * 2


def fails(rank: Rank[Sum]) -> None:
    print("what a library said")
    if rank.number == 1:
        raise ValueError("cannot")
    time.sleep(60)


def is_refused(rank: Rank[Sum]) -> None:
    raise BadInput("--x", 1, rule="is wrong", remedy="Use 2.")


def lacks(rank: Rank[Sum]) -> None:
    raise EnvironmentMissing("there is no GPU")


def differs(rank: Rank[Sum]) -> None:
    if rank.number == 0:
        raise RuntimeError("connection lost")
    raise DifferenceFound("not the same")


def is_killed(rank: Rank[Sum]) -> None:
    if rank.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1)
    raise RuntimeError("connection lost")


def leaves(rank: Rank[Sum]) -> None:
    if rank.number == 1:
        os._exit(0)
    time.sleep(60)


def hangs(rank: Rank[Sum]) -> None:
    rank.say("pid", os.getpid())
    time.sleep(60)


@pytest.mark.parametrize(
    ("work", "kind", "said"),
    [
        (fails, RunFailed, r"rank 1 failed: ValueError: cannot\n.*last lines of the ranks:\n.*library said"),
        (is_refused, RunFailed, r"rank \d failed: --x 1: is wrong. Use 2."),
        (lacks, EnvironmentMissing, "^there is no GPU$"),
        (differs, DifferenceFound, "^not the same$"),
        (is_killed, RunFailed, "rank 1 was killed by SIGKILL; the others were ended"),
        (leaves, RunFailed, "rank 1 ended with exit code 0"),
        (hangs, RunFailed, "no rank answered for 6 s; all were ended"),
    ],
)  # fmt: skip
def test_the_first_cause_is_reported_and_nothing_is_left(
    work: Callable[[Any], Any],
    kind: type[AMPipeError],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # A busy machine needs seconds to start a process.
    job = Sum(num_ranks=2, link=parse_link("none"), timeout_s=6.0 if work is hangs else 60.0)
    with pytest.raises(kind, match=f"(?s){said}"):
        run_ranks(job, work)
    assert not list(tmp_path.iterdir())
    assert not multiprocessing.active_children()


def possible(*command: str) -> bool:
    """Whether a command exists here, and ends well."""
    is_there = shutil.which(command[0]) is not None
    return is_there and subprocess.run(command, capture_output=True, timeout=20).returncode == 0


LINKS = "ip link add name one type veth peer name two"
RATE = "tc qdisc add dev one root tbf rate 1mbit burst 32kb latency 50ms"
# The kernel is asked, not the package: where that refuses a possible network, tests fail and are not skipped.
HAS_NETWORK = possible("unshare", "--net", "sh", "-c", f"{LINKS} && {RATE}")
needs_network = pytest.mark.skipif(
    not HAS_NETWORK,
    reason="no slow network can be created here: it takes root, network namespaces and iproute2",
)
COMMAND = """
from tests.unit.test_ranks import *
job = Sum(num_ranks=2, link=parse_link(sys.argv[1]))
run_ranks(job, hangs, on_message=lambda rank, event, pid: print(pid, flush=True))
"""


@pytest.mark.parametrize("link", ["none", pytest.param("200mbit", marks=needs_network)])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, number: signal.Signals, link: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, link],
        cwd=REPOSITORY,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        # A shell that runs the tests in the background may have set this signal to be ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stdout is not None
        ranks = [int(process.stdout.readline()) for _ in range(2)]
        process.send_signal(number)
        if number is signal.SIGKILL:
            assert process.wait(20) == -number
        else:
            # All are KeyboardInterrupt, after which Python ends itself by the signal of Ctrl-C.
            assert process.wait(20) == -signal.SIGINT
            assert not list(tmp_path.iterdir())
    # With the ranks, the kernel ends their networks.
    until(lambda: not any(map(alive, ranks)), "the end of the ranks", timeout_s=10)
    if link != "none":
        shown = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
        assert network.INTERFACE not in shown
