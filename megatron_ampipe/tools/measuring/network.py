"""A real slow network: each rank in a separate network namespace, connected by veth pairs with ``tc tbf``.

The namespaces have no names. A rank makes its namespace (``unshare``), and the kernel removes it with every
interface in it when its last process has ended for any reason, so nothing can be left over, even after
``kill -9``. Two ranks are connected directly, more of them by a bridge. The bridge's namespace is held open
by a ``cat`` that reads from a pipe of this process and ends with it. Needs root. Called by
:mod:`.rank_processes`.

Every interface is shaped where packets leave it. With a bridge that applies to both ends of each cable, so no
rank receives faster than the rate either.

With nodes, each rank has a second interface: its node has another bridge, and routes to the ranks of the same
node lead over it. So both classes of links carry bytes at the same time, and each is counted separately.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence

from megatron_ampipe.errors import EnvironmentMissing, RunFailed
from megatron_ampipe.tools.measuring.link import Nodes

INTERFACE, WITHIN_NODE = "ampipe0", "ampipe1"
"""What the interfaces are called in every rank's namespace; the second exists where there are nodes."""

_SUBNET, _ADDRESS = "10.77.0.0/16", "10.77.{high}.{low}"
_INSTEAD = "or use --link emulated:RATE, which needs none of this."
_PROGRAMS = ("ip", "tc", "nsenter")
# How much may leave at once after a pause. It has to be small compared with a chunk: with the 256 KB of many
# examples, whole chunks would pass a 100 Mbit/s link in almost no time.
_BURST_BYTES, _BURST_S = 32 * 1024, 0.25e-3
_SEGMENT_BYTES = 28 * 1024
_QUEUE = "400ms"
_CONGESTION_CONTROL = "cubic"
"""Linux's default, whatever this host's is: BBR paces by timers, which are work for the ranks' cores."""
_COMMAND_TIMEOUT_S = 20


class NetworkUnavailable(EnvironmentMissing):
    """No real slow network can be made here.

    Args:
        reason: Why, as one clause without a full stop.
        remedy: What to do, as one clause; an emulated link is offered after it.
    """

    def __init__(self, reason: str, *, remedy: str) -> None:
        self.reason = reason
        super().__init__(f"{reason}. {remedy}, {_INSTEAD}")


def missing_programs() -> list[str]:
    """The programs that a network is made with and that are not on the path."""
    return [program for program in _PROGRAMS if shutil.which(program) is None]


def check_usable() -> None:
    """Refuse early where no network can be made.

    Raises:
        NetworkUnavailable: this is not root, or a program is absent.
    """
    if not hasattr(os, "unshare"):
        raise NetworkUnavailable(
            "--link RATE needs Linux: it makes network namespaces", remedy="Run it there"
        )
    if missing := missing_programs():
        raise NetworkUnavailable(
            f"--link RATE needs {' and '.join(missing)}", remedy="Install iproute2 and util-linux"
        )
    if os.geteuid() != 0:
        raise NetworkUnavailable("--link RATE makes network namespaces, which needs root", remedy="Use sudo")


def try_out(*, rate_bit_per_s: float) -> None:
    """Make a network between two idle processes and remove it again.

    Raises:
        NetworkUnavailable: :func:`check_usable` refuses, or the kernel does.
    """
    check_usable()
    with _holder() as first, _holder() as second, joined([first, second], rate_bit_per_s=rate_bit_per_s):
        pass


@contextlib.contextmanager
def joined(pids: Sequence[int], *, rate_bit_per_s: float, nodes: Nodes | None = None) -> Iterator[None]:
    """Connect processes that each have a network namespace, for as long as they live.

    Args:
        pids: One for each rank.
        rate_bit_per_s: Of every rank, in each direction; with nodes, to ranks of other nodes.
        nodes: The network within each node, in addition.

    Raises:
        NetworkUnavailable: the kernel does not allow it.
    """
    with contextlib.ExitStack() as stack:
        _connect(stack, pids, INTERFACE, rate_bit_per_s)
        for rank, pid in enumerate(pids):
            _inside(pid, "ip", "link", "set", "lo", "up")
            if len(pids) > 1:
                _inside(pid, "ip", "address", "add", f"{_address(rank)}/16", "dev", INTERFACE)
                _inside(pid, "ip", "link", "set", INTERFACE, "gso_max_size", str(_SEGMENT_BYTES), "up")
                # A namespace can use only what its host lists; a route can use any.
                _inside(pid, "ip", "route", "change", _SUBNET, "dev", INTERFACE, "src", _address(rank),
                        "congctl", _CONGESTION_CONTROL)  # fmt: skip
                _shape(pid, INTERFACE, rate_bit_per_s)
        if nodes is not None:
            for first in range(0, len(pids), nodes.ranks_per_node):
                _join_node(stack, range(first, first + nodes.ranks_per_node), pids, nodes.rate_bit_per_s)
        yield


def _connect(stack: contextlib.ExitStack, pids: Sequence[int], interface: str, rate_bit_per_s: float) -> None:
    """Give each process an interface, all of them on one wire or bridge; a bridge shapes what it sends."""
    if len(pids) == 2:
        first, second = pids
        _run("ip", "link", "add", "name", interface, "netns", str(first), "type", "veth",
             "peer", "name", interface, "netns", str(second))  # fmt: skip
    elif len(pids) > 2:
        switch = stack.enter_context(_holder())
        _inside(switch, "ip", "link", "add", "switch", "type", "bridge")
        _inside(switch, "ip", "link", "set", "switch", "up")
        for place, pid in enumerate(pids):
            port = f"port{place}"
            _run("ip", "link", "add", "name", interface, "netns", str(pid), "type", "veth",
                 "peer", "name", port, "netns", str(switch))  # fmt: skip
            _inside(switch, "ip", "link", "set", port, "master", "switch", "up")
            _shape(switch, port, rate_bit_per_s)


def _join_node(
    stack: contextlib.ExitStack, ranks: Sequence[int], pids: Sequence[int], rate_bit_per_s: float
) -> None:
    """The network of one node: a rank has one address, and routes say over which interface it is reached."""
    _connect(stack, [pids[rank] for rank in ranks], WITHIN_NODE, rate_bit_per_s)
    for rank in ranks:
        pid = pids[rank]
        _inside(pid, "ip", "link", "set", WITHIN_NODE, "gso_max_size", str(_SEGMENT_BYTES), "up")
        for peer in ranks:
            if peer != rank:
                _inside(pid, "ip", "route", "add", f"{_address(peer)}/32", "dev", WITHIN_NODE,
                        "src", _address(rank), "congctl", _CONGESTION_CONTROL)  # fmt: skip
        _shape(pid, WITHIN_NODE, rate_bit_per_s)


def _address(rank: int) -> str:
    return _ADDRESS.format(high=(rank + 1) // 256, low=(rank + 1) % 256)


def burst_bytes(rate_bit_per_s: float) -> int:
    """The size of the token bucket: a quarter of a millisecond, at least 32 KB.

    Small compared with a chunk, or an idle link would save up for the next one. But it has to hold the
    segments that the kernel passes to the interface: tbf cuts larger ones into packets in software, which
    costs the ranks more processor time than the rest of communication (docs/log). So segments are limited
    to 28 KB, which fit in with their headers.
    """
    return max(_BURST_BYTES, int(rate_bit_per_s / 8 * _BURST_S))


@contextlib.contextmanager
def _holder() -> Iterator[int]:
    """A namespace held open by a process that ends when this one does; yields its process id."""
    try:
        process = subprocess.Popen(
            ["cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_unshare,
        )
    except subprocess.SubprocessError as error:
        # What an exception in preexec_fn becomes; its own text is lost.
        raise NetworkUnavailable(
            "the kernel does not allow a new network namespace", remedy="Run where that is allowed"
        ) from error
    assert process.stdin is not None
    try:
        yield process.pid
    finally:
        process.stdin.close()
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _unshare() -> None:
    os.unshare(os.CLONE_NEWNET)


def _shape(pid: int, interface: str, rate_bit_per_s: float) -> None:
    _inside(pid, "tc", "qdisc", "add", "dev", interface, "root", "tbf", "rate", f"{rate_bit_per_s:.0f}bit",
            "burst", f"{burst_bytes(rate_bit_per_s)}b", "latency", _QUEUE)  # fmt: skip


def _inside(pid: int, *command: str) -> None:
    _run("nsenter", f"--net=/proc/{pid}/ns/net", "--", *command)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"'{' '.join(command)}' did not end within {_COMMAND_TIMEOUT_S} s") from error
    if done.returncode != 0:
        raise NetworkUnavailable(
            f"'{' '.join(command)}' failed: {done.stderr.strip() or done.returncode}",
            remedy="Run where network namespaces, veth and tbf are allowed",
        )
