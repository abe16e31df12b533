"""A real slow network: each rank in a separate network namespace, connected by veth pairs with ``tc tbf``.

The namespaces have no names. A rank makes its namespace (``unshare``), and the kernel removes it with every
interface in it when its last process has ended for any reason, so nothing can be left over, even after
``kill -9``. Two ranks are connected directly, more of them by a bridge, whose namespace is held open by a
``cat`` that reads from a pipe of this process. Needs root, or :func:`choose_link` finds a user namespace in
which there is one, or an emulated link. Needs no torch.

Every interface is shaped where packets leave it. With a bridge that applies to both ends of each cable, so no
rank receives faster than the rate either. With nodes, each rank has a second interface: its node has another
bridge, and routes to the ranks of the same node lead over it. So both classes of links carry bytes at the
same time, and each is counted separately.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_ampipe.errors import EnvironmentMissing, RunFailed
from megatron_ampipe.tools.measuring.link import Link, LinkKind, parse_link

INTERFACE, WITHIN_NODE = "ampipe0", "ampipe1"
"""What the interfaces are called in every rank's namespace; the second exists where there are nodes."""
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
_COMMAND_TIMEOUT_S, _TRIAL_TIMEOUT_S = 20, 60
# Where tc is on many systems, and not on the path of an ordinary user.
_SYSTEM_FOLDERS = ("/usr/sbin", "/sbin")


class NetworkUnavailable(EnvironmentMissing):
    """No real slow network can be made here; ``reason`` says why, as one clause without a full stop."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"{reason}. --link RATE makes network namespaces: run as root on Linux where that is allowed, or "
            "use --link emulated:RATE, which needs none of this."
        )


def check_usable() -> None:
    """Refuse early where no network can be made.

    Raises:
        NetworkUnavailable: this is not root or not Linux, or a program is absent.
    """
    if reason := _lacking() or ("this is not root" if os.geteuid() != 0 else None):
        raise NetworkUnavailable(reason)


def _lacking() -> str | None:
    """What a network is made with and is not here."""
    if not hasattr(os, "unshare"):
        return "network namespaces need Linux"
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    return f"{' and '.join(missing)} not found (packages iproute2 and util-linux)" if missing else None


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
        wanted: A value of ``--link`` with one class of links.
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
    if reason := _lacking() or ("this is not root" if not prefix and os.geteuid() != 0 else None):
        return reason
    command = [*prefix, sys.executable, "-m", "megatron_ampipe.tools.measuring.network", link.text]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TRIAL_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = done.stderr.strip().splitlines()[-1:] or [f"it ended with code {done.returncode}"]
    return said[0] if done.returncode else None


def enter_namespace() -> None:
    """Put this process into a new network namespace.

    Raises:
        NetworkUnavailable: the kernel does not allow it.
    """
    try:
        os.unshare(os.CLONE_NEWNET)
    except OSError as error:
        raise NetworkUnavailable(f"a network namespace cannot be made ({error.strerror})") from error


@contextlib.contextmanager
def joined(pids: Sequence[int], link: Link) -> Iterator[None]:
    """Connect processes, one for each rank, that each have a network namespace, for as long as they live.

    Raises:
        NetworkUnavailable: the kernel does not allow it.
    """
    assert link.rate_bit_per_s is not None
    ranks = list(range(len(pids)))
    with contextlib.ExitStack() as stack:
        for pid in pids:
            _inside(pid, "ip", "link", "set", "lo", "up")
        if len(pids) > 1:
            _connect(stack, pids, INTERFACE, link.rate_bit_per_s)
        for rank, pid in enumerate(pids if len(pids) > 1 else ()):
            _inside(pid, "ip", "address", "add", f"{_address(rank)}/16", "dev", INTERFACE)
            # A namespace can use only what its host lists; a route can use any.
            _inside(pid, "ip", "route", "change", _SUBNET, "dev", INTERFACE, *_route(rank))
        if link.ranks_per_node is not None and link.within_node_bit_per_s is not None:
            # A rank has one address, and routes say over which interface it is reached.
            for first in ranks[:: link.ranks_per_node]:
                node = ranks[first : first + link.ranks_per_node]
                _connect(stack, [pids[rank] for rank in node], WITHIN_NODE, link.within_node_bit_per_s)
                for rank, peer in itertools.permutations(node, 2):
                    to_peer = (f"{_address(peer)}/32", "dev", WITHIN_NODE, *_route(rank))
                    _inside(pids[rank], "ip", "route", "add", *to_peer)
        yield


def _connect(stack: contextlib.ExitStack, pids: Sequence[int], interface: str, rate_bit_per_s: float) -> None:
    """Give each process a shaped interface, all of them on one wire or bridge, which shapes what it sends."""
    if len(pids) == 2:
        first, second = pids
        _run("ip", "link", "add", "name", interface, "netns", str(first), "type", "veth",
             "peer", "name", interface, "netns", str(second))  # fmt: skip
    else:
        switch = stack.enter_context(_holder())
        _inside(switch, "ip", "link", "add", "switch", "type", "bridge")
        _inside(switch, "ip", "link", "set", "switch", "up")
        for place, pid in enumerate(pids):
            port = f"port{place}"
            _run("ip", "link", "add", "name", interface, "netns", str(pid), "type", "veth",
                 "peer", "name", port, "netns", str(switch))  # fmt: skip
            _inside(switch, "ip", "link", "set", port, "master", "switch", "up")
            _shape(switch, port, rate_bit_per_s)
    for pid in pids:
        _inside(pid, "ip", "link", "set", interface, "gso_max_size", str(_SEGMENT_BYTES), "up")
        _shape(pid, interface, rate_bit_per_s)


def _route(rank: int) -> tuple[str, ...]:
    return ("src", _address(rank), "congctl", _CONGESTION_CONTROL)


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
        # With its own standard input, it also ends when this process is killed.
        process = subprocess.Popen(
            ["cat"], stdin=subprocess.PIPE, start_new_session=True, preexec_fn=enter_namespace
        )
    except subprocess.SubprocessError as error:
        # What an exception in preexec_fn becomes; its own text is lost.
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
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"'{' '.join(command)}' did not end within {_COMMAND_TIMEOUT_S} s") from error
    if done.returncode != 0:
        raise NetworkUnavailable(f"'{' '.join(command)}' failed: {done.stderr.strip() or done.returncode}")


def main() -> int:
    """Make the network of the rate in the first argument between two idle processes; say what is wrong."""
    try:
        with _holder() as first, _holder() as second, joined([first, second], parse_link(sys.argv[1])):
            return 0
    except NetworkUnavailable as error:
        print(error.reason, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
