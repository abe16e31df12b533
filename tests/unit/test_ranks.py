"""The rank runner, with ranks that need no torch: what they return and say, how they fail, what is left."""

import contextlib
import multiprocessing
import os
import shutil
import signal
import socket
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
    reason="no slow network can be made here: it needs root, iproute2 and network namespaces",
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


SIZE, TIMES = 500_000, 3
RATES = {"ampipe0": 40e6, "ampipe1": 160e6}
PORT = 5555


def sent_over() -> dict[str, int]:
    """By interface, the bytes that this rank has sent."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    columns = {
        name.strip(): rest.split() for name, colon, rest in (line.partition(":") for line in lines) if colon
    }
    return {name: int(columns[name][8]) for name in RATES if name in columns}


def transfer(rank: Rank[RankJob]) -> list[tuple[float, dict[str, int]]]:
    """Rank 0 sends to each of the others; returns the least seconds, and bytes by interface, for each."""
    if rank.number > 0:
        with socket.create_server((f"10.77.0.{rank.number + 1}", PORT)) as server:
            rank.say("listens")
            connection, _ = server.accept()
            for _ in range(TIMES):
                connection.recv(SIZE, socket.MSG_WAITALL)
                connection.sendall(b"x")
            control = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            assert control.rstrip(bytes(1)) == b"cubic", control
        return []
    found = []
    for peer in range(1, rank.job.num_ranks):
        connection = connected_to(f"10.77.0.{peer + 1}")
        before, times_s = sent_over(), []
        for _ in range(TIMES):
            begin_s = time.perf_counter()
            connection.sendall(bytes(SIZE))
            connection.recv(1)
            times_s.append(time.perf_counter() - begin_s)
        after = sent_over()
        found.append((min(times_s), {name: after[name] - before[name] for name in after}))
    return found


def connected_to(address: str) -> socket.socket:
    """A connection to a rank that may not listen yet."""
    for _ in range(600):
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((address, PORT))
        time.sleep(0.1)
    raise TimeoutError(address)


@needs_network
@pytest.mark.parametrize(
    ("link", "num_ranks", "ranks_per_node"),
    # Two are connected by a cable, others by a bridge: of all ranks, or of a node.
    [
        ("40mbit", 2, None),
        ("40mbit", 3, None),
        ("inter=40mbit,intra=160mbit", 4, 2),
        ("inter=40mbit,intra=160mbit", 6, 3),
    ],
)
def test_every_link_has_its_rate(link: str, num_ranks: int, ranks_per_node: int | None) -> None:
    """What goes to a rank of the same node uses the faster link, and nothing else."""
    job = RankJob(num_ranks=num_ranks, link=parse_link(link), ranks_per_node=ranks_per_node)
    found = run_ranks(job, transfer)[0]
    for peer, (took_s, sent) in enumerate(found, 1):
        used = "ampipe1" if ranks_per_node is not None and peer < ranks_per_node else "ampipe0"
        least_s = {name: 0.95 * (SIZE - network.burst_bytes(rate)) * 8 / rate for name, rate in RATES.items()}
        # The token bucket allows a small burst; a busy machine can only be slower.
        assert took_s >= least_s[used]
        assert used == "ampipe0" or took_s < least_s["ampipe0"]
        assert SIZE < sent[used] / TIMES < 1.02 * SIZE
        assert sum(sent.values()) / TIMES < 1.02 * SIZE


def test_ranks_know_their_node() -> None:
    job = RankJob(num_ranks=4, link=parse_link("none"), ranks_per_node=2)
    assert run_ranks(job, of_node) == [("2", "0"), ("2", "1"), ("2", "0"), ("2", "1")]


def of_node(_rank: Rank[RankJob]) -> tuple[str, str]:
    return os.environ["LOCAL_WORLD_SIZE"], os.environ["LOCAL_RANK"]
