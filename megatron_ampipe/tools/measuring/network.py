"""The link between ranks, as ``--link`` describes it, and the real slow network that it may need.

Each rank is in a separate network namespace, connected by veth pairs with ``tc tbf``.

The namespaces have no names. Each is held open by a ``cat`` that reads from a pipe of this process, and the
kernel removes it with every interface in it when its last process has ended for any reason, so nothing can be
left over, even after ``kill -9``. Two ranks are connected directly, others by a bridge in another namespace.
Needs root, if only of a user namespace. Needs no torch.

Every interface is shaped where packets leave it. With a bridge that applies to both ends of each cable, so no
rank receives faster than the rate either.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ampipe.errors import EnvironmentMissing
from megatron_ampipe.files.inputs import adder, at_least

_NONE, RANKS = "none", 2
"""Defaults of ``--link`` and ``--ranks``."""

SPIN_KERNELS = ("ampipe_spin", "spin_kernel")
"""An emulated link's kernels in a GPU's trace: by nanoseconds (:mod:`.emulation`), torch's by cycles."""

# Bits per second. The units of bits are those of tc. 'GB/s', the unit of accelerator links, is in bytes.
_RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12,
               "kB/s": 8e3, "MB/s": 8e6, "GB/s": 8e9, "TB/s": 8e12}  # fmt: skip
_LATENCY_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_MINIMUM_BIT_PER_S = 100e3
_LINK = re.compile(
    rf"(?P<emulated>emulated:)?(?P<rate>\d+(\.\d+)?)(?P<unit>{'|'.join(_RATE_UNITS)})"
    rf"(:(?P<latency>\d+(\.\d+)?)(?P<of_latency>{'|'.join(_LATENCY_UNITS)}))?"
)


@dataclass(frozen=True, slots=True)
class Link:
    """A link between ranks, as the user wrote it in ``text``.

    Attributes:
        rate_bit_per_s: Rate of each rank and direction; None without limit (loopback, shared memory, NVLink).
        emulated: No real link has this rate: every all-to-all is delayed by the time of such a link.
        latency_s: Latency that is added to every all-to-all of an emulated link.
    """

    text: str
    rate_bit_per_s: float | None = None
    emulated: bool = False
    latency_s: float = 0.0

    @property
    def is_network(self) -> bool:
        """Whether it is a real TCP network between network namespaces, shaped to its rate."""
        return self.rate_bit_per_s is not None and not self.emulated

    def transfer_s(self, size_bytes: float) -> float:
        """The seconds of an emulated link for this many bytes in its busier direction."""
        assert self.rate_bit_per_s is not None
        return self.latency_s + size_bytes * 8 / self.rate_bit_per_s


def parse_link(text: str | None) -> Link:
    """The type of ``--link`` for ``argparse``: checks the form, and that a run can end."""
    if text in (None, _NONE):
        return Link(_NONE)
    parts = _LINK.fullmatch(text)
    rate = float(parts["rate"]) * _RATE_UNITS[parts["unit"]] if parts else 0.0
    if parts is None or rate < _MINIMUM_BIT_PER_S or (parts["latency"] and not parts["emulated"]):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no link of at least 100kbit; write none, a rate (200mbit, 25MB/s), "
            "emulated:RATE or emulated:RATE:LATENCY (emulated:20GB/s:10us)"
        )
    latency_s = float(parts["latency"] or 0) * _LATENCY_UNITS.get(parts["of_latency"], 1.0)
    return Link(text, rate, emulated=bool(parts["emulated"]), latency_s=latency_s)


def add_link_arguments(parser: argparse.ArgumentParser, *, fewest_ranks: int) -> None:
    """Declare ``--link``, and ``--ranks``, whose default is None."""
    add = adder(parser)
    link = "none, a rate (200mbit) for a real network between namespaces, or emulated:RATE[:LATENCY]"
    add("--link", "L", link, type=parse_link, default=_NONE)
    add("--ranks", "N", f"expert-parallel ranks (default: {RANKS})", type=at_least(fewest_ranks))


INTERFACE = "ampipe0"
"""Name of the interface in every rank's namespace."""

# How much may leave at once after a pause. It has to be small compared with a chunk: with the 256 KB of many
# examples, whole chunks would pass a 100 Mbit/s link in almost no time.
_BURST_BYTES, _BURST_S = 32 * 1024, 0.25e-3
_SEGMENT_BYTES = 28 * 1024
_QUEUE = "400ms"
_CONGESTION_CONTROL = "cubic"
"""Linux's default; the host's setting is ignored, because BBR's timers would load the ranks' cores."""


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
    """A context with connected network namespaces, one for each rank.

    Yields:
        The arguments of :func:`enter`, by rank; NetworkUnavailable if they cannot be made here.
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
            # A namespace can use only algorithms that its host lists; a route can use any.
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
