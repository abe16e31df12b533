"""A real slow network: each rank in a separate network namespace, connected by veth pairs with ``tc tbf``.

The namespaces have no names. Each is held open by a ``cat`` that reads from a pipe of this process, and the
kernel removes it with every interface in it when its last process has ended for any reason, so nothing can be
left over, even after ``kill -9``. Two ranks are connected directly, others by a bridge in another namespace.
Needs root, or :func:`choose_link` finds a user namespace in which there is one, or an emulated link. Needs no
torch.

Every interface is shaped where packets leave it. With a bridge that applies to both ends of each cable, so no
rank receives faster than the rate either.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_ampipe.errors import EnvironmentMissing
from megatron_ampipe.tools.measuring.link import Link, LinkKind, parse_link

INTERFACE = "ampipe0"
"""What the interface is called in every rank's namespace."""
IN_USER_NAMESPACE = ("unshare", "--user", "--map-root-user", "--net", "--")
"""Runs a command as the root of a new user namespace, which may make network namespaces."""

_SUBNET, _ADDRESS = "10.77.0.0/16", "10.77.{high}.{low}"
_PROGRAMS = ("ip", "tc", "nsenter")
# How much may leave at once after a pause. It has to be small compared with a chunk: with the 256 KB of many
# examples, whole chunks would pass a 100 Mbit/s link in almost no time.
_BURST_BYTES, _BURST_S = 32 * 1024, 0.25e-3
_SEGMENT_BYTES = 28 * 1024
_QUEUE = "400ms"
_CONGESTION_CONTROL = "cubic"
"""Linux's default, whatever this host's is: BBR paces by timers, which are work for the ranks' cores."""
_TRIAL_TIMEOUT_S = 60
# Where tc is on many systems, and not on the path of an ordinary user.
_SYSTEM_FOLDERS = ("/usr/sbin", "/sbin")


class NetworkUnavailable(EnvironmentMissing):
    """No real slow network can be made here; ``reason`` says why, as one clause without a full stop."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"{reason}. --link RATE makes network namespaces: run as root on Linux where that is allowed, or "
            "use --link emulated:RATE."
        )


def check_usable() -> None:
    """Refuse early where no network can be made.

    Raises:
        NetworkUnavailable: this is not root or not Linux, or a program is absent.
    """
    if not hasattr(os, "unshare"):
        raise NetworkUnavailable("network namespaces need Linux")
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        raise NetworkUnavailable(f"{' and '.join(missing)} not found (packages iproute2 and util-linux)")
    if os.geteuid() != 0:
        raise NetworkUnavailable("this is not root")


class LinkChoice(NamedTuple):
    """What to run over.

    Attributes:
        link: Real, emulated, or none where none was wanted.
        prefix: Put before the command that starts the ranks; empty where it can start them as it is.
        why_emulated: Why no real network could be made, where one was wanted and the link is emulated.
    """

    link: Link
    prefix: tuple[str, ...] = ()
    why_emulated: str | None = None


def choose_link(wanted: str, *, may_emulate: bool) -> LinkChoice:
    """The link that is wanted, and how it can be made here, which is found out by trying.

    Args:
        wanted: A value of ``--link``.
        may_emulate: Take an emulated link of the same rate where no real one can be made.

    Raises:
        BadInput: ``wanted`` is not such a link.
        EnvironmentMissing: no real network can be made, and none may be emulated.
    """
    link = parse_link(wanted)
    if link.kind is not LinkKind.NETWORK:
        return LinkChoice(link)
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join([*path, *(f for f in _SYSTEM_FOLDERS if f not in path)])
    reasons = []
    for prefix in ((), IN_USER_NAMESPACE):
        reason = _why_not(prefix, link)
        if reason is None:
            return LinkChoice(link, prefix)
        reasons.append(reason)
    # The second is most often the first again.
    why = "; ".join(dict.fromkeys(reasons))
    if not may_emulate:
        raise NetworkUnavailable(f"--link {wanted} cannot be made here: {why}")
    return LinkChoice(parse_link(f"emulated:{wanted}"), why_emulated=why)


def _why_not(prefix: Sequence[str], link: Link) -> str | None:
    """Why a command with this prefix cannot make the network; None if it can."""
    command = [*prefix, sys.executable, "-m", "megatron_ampipe.tools.measuring.network", link.text]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TRIAL_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = done.stderr.strip().splitlines()[-1:] or [f"it ended with code {done.returncode}"]
    return said[0] if done.returncode else None


@contextlib.contextmanager
def connected(link: Link, num_ranks: int) -> Iterator[list[int]]:
    """Network namespaces that are connected, one for each rank, for as long as this lasts.

    Yields:
        What :func:`enter` takes, by rank.

    Raises:
        NetworkUnavailable: the kernel does not allow it.
    """
    assert link.rate_bit_per_s is not None
    with contextlib.ExitStack() as stack:
        pids = [stack.enter_context(_holder()) for _ in range(num_ranks)]
        if num_ranks == 2:
            _run("ip", "link", "add", "name", INTERFACE, "netns", str(pids[0]), "type", "veth",
                 "peer", "name", INTERFACE, "netns", str(pids[1]))  # fmt: skip
        else:
            switch = stack.enter_context(_holder())
            _inside(switch, "ip", "link", "add", "switch", "type", "bridge")
            _inside(switch, "ip", "link", "set", "switch", "up")
            for rank, pid in enumerate(pids):
                _run("ip", "link", "add", "name", INTERFACE, "netns", str(pid), "type", "veth",
                     "peer", "name", f"port{rank}", "netns", str(switch))  # fmt: skip
                _inside(switch, "ip", "link", "set", f"port{rank}", "master", "switch", "up")
                _shape(switch, f"port{rank}", link.rate_bit_per_s)
        for rank, pid in enumerate(pids):
            address = _ADDRESS.format(high=(rank + 1) // 256, low=(rank + 1) % 256)
            _inside(pid, "ip", "link", "set", "lo", "up")
            _inside(pid, "ip", "link", "set", INTERFACE, "gso_max_size", str(_SEGMENT_BYTES), "up")
            _shape(pid, INTERFACE, link.rate_bit_per_s)
            _inside(pid, "ip", "address", "add", f"{address}/16", "dev", INTERFACE)
            # A namespace can use only what its host lists; a route can use any.
            _inside(pid, "ip", "route", "change", _SUBNET, "dev", INTERFACE, "src", address,
                    "congctl", _CONGESTION_CONTROL)  # fmt: skip
        yield pids


def enter(namespace: int) -> None:
    """Put this process into a network namespace of :func:`connected`."""
    with open(f"/proc/{namespace}/ns/net") as file:
        os.setns(file.fileno(), os.CLONE_NEWNET)


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
    _inside(pid, "tc", "qdisc", "add", "dev", interface, "root", "tbf", "rate", f"{rate_bit_per_s:.0f}bit",
            "burst", f"{burst_bytes(rate_bit_per_s)}b", "latency", _QUEUE)  # fmt: skip


def _inside(pid: int, *command: str) -> None:
    _run("nsenter", f"--net=/proc/{pid}/ns/net", "--", *command)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise NetworkUnavailable(f"'{' '.join(command)}' failed: {done.stderr.strip() or done.returncode}")


def main() -> int:
    """Make the network of the rate in the first argument; say what is wrong."""
    try:
        check_usable()
        with connected(parse_link(sys.argv[1]), 2):
            return 0
    except NetworkUnavailable as error:
        print(error.reason, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
