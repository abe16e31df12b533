"""A real slow network: each rank in a separate network namespace, connected by veth pairs with ``tc tbf``.

The namespaces have no names. Each is held open by a ``cat`` that reads from a pipe of this process, and the
kernel removes it with every interface in it when its last process has ended for any reason, so nothing can be
left over, even after ``kill -9``. Two ranks are connected directly, others by a bridge in another namespace.
Needs root, if only of a user namespace. Needs no torch.

Every interface is shaped where packets leave it. With a bridge that applies to both ends of each cable, so no
rank receives faster than the rate either.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

from megatron_ampipe.errors import EnvironmentMissing
from megatron_ampipe.tools.measuring.link import Link

INTERFACE = "ampipe0"
"""What the interface is called in every rank's namespace."""

# How much may leave at once after a pause. It has to be small compared with a chunk: with the 256 KB of many
# examples, whole chunks would pass a 100 Mbit/s link in almost no time.
_BURST_BYTES, _BURST_S = 32 * 1024, 0.25e-3
_SEGMENT_BYTES = 28 * 1024
_QUEUE = "400ms"
_CONGESTION_CONTROL = "cubic"
"""Linux's default, whatever this host's is: BBR paces by timers, which are work for the ranks' cores."""


class NetworkUnavailable(EnvironmentMissing):
    """No real slow network can be made here; ``reason`` says why, as one clause without a full stop."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"{reason}. --link RATE makes network namespaces: run as root on Linux where that is allowed, or "
            "use --link emulated:RATE."
        )


@contextlib.contextmanager
def connected(link: Link, num_ranks: int) -> Iterator[list[int]]:
    """Network namespaces that are connected, one for each rank, for as long as this lasts.

    Yields:
        What :func:`enter` takes, by rank; NetworkUnavailable if they cannot be made here.
    """
    assert link.rate_bit_per_s is not None
    if not hasattr(os, "unshare"):
        raise NetworkUnavailable("network namespaces need Linux")
    missing = [program for program in ("ip", "tc", "nsenter") if shutil.which(program) is None]
    if missing:
        raise NetworkUnavailable(f"{' and '.join(missing)} not found (packages iproute2 and util-linux)")
    if os.geteuid() != 0:
        raise NetworkUnavailable("this is not root")
    with contextlib.ExitStack() as stack:
        pids = [stack.enter_context(_holder()) for _ in range(num_ranks)]
        if num_ranks == 2:
            _inside(pids[0], f"ip link add {INTERFACE} type veth peer {INTERFACE} netns {pids[1]}")
        else:
            switch = stack.enter_context(_holder())
            _inside(switch, "ip link add switch up type bridge")
            for rank, pid in enumerate(pids):
                port = f"port{rank}"
                _inside(switch, f"ip link add {port} type veth peer {INTERFACE} netns {pid}")
                _inside(switch, f"ip link set {port} master switch up")
                _shape(switch, port, link.rate_bit_per_s)
        for rank, pid in enumerate(pids):
            address = f"10.77.0.{rank + 1}"
            _inside(pid, "ip link set lo up")
            _inside(pid, f"ip link set {INTERFACE} gso_max_size {_SEGMENT_BYTES} up")
            _shape(pid, INTERFACE, link.rate_bit_per_s)
            _inside(pid, f"ip address add {address}/24 dev {INTERFACE}")
            # A namespace can use only what its host lists; a route can use any.
            cubic = f"congctl {_CONGESTION_CONTROL}"
            _inside(pid, f"ip route change 10.77.0.0/24 dev {INTERFACE} src {address} {cubic}")
        yield pids


def enter(namespace: int) -> None:
    """Put this process into a network namespace of :func:`connected`."""
    with open(f"/proc/{namespace}/ns/net") as file:
        os.setns(file.fileno(), os.CLONE_NEWNET)


def burst_bytes(rate_bit_per_s: float) -> int:
    """The size of the token bucket: a quarter of a millisecond, at least 32 KB.

    It has to hold the segments of 28 KB that the kernel passes to the interface: tbf cuts larger ones in
    software, which costs the ranks more processor time than the rest of communication (docs/log).
    """
    return max(_BURST_BYTES, int(rate_bit_per_s / 8 * _BURST_S))


@contextlib.contextmanager
def _holder() -> Iterator[int]:
    """A namespace held open by a process that ends when this one does; yields its process id."""
    try:
        # With its own standard input, it also ends when this process is killed.
        process = subprocess.Popen(
            ["cat"],
            stdin=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: os.unshare(os.CLONE_NEWNET),
        )
    except subprocess.SubprocessError as error:
        # The text of an exception in preexec_fn is lost.
        raise NetworkUnavailable("the kernel does not allow a new network namespace") from error
    try:
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def _shape(pid: int, interface: str, rate_bit_per_s: float) -> None:
    bucket = f"rate {rate_bit_per_s:.0f}bit burst {burst_bytes(rate_bit_per_s)}b latency {_QUEUE}"
    _inside(pid, f"tc qdisc add dev {interface} root tbf {bucket}")


def _inside(pid: int, command: str) -> None:
    words = ["nsenter", f"--net=/proc/{pid}/ns/net", "--", *command.split()]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise NetworkUnavailable(f"'{command}' failed: {done.stderr.strip() or done.returncode}")
