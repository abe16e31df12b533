"""The link between ranks, as ``--link`` describes it, and the real slow network that it may need.

Each rank is in a separate network namespace, connected by veth pairs with ``tc tbf``.

The namespaces have no names. Each is held open by a ``cat`` that reads from a pipe of this process, and the
kernel removes it with every interface in it when its last process has ended for any reason, so nothing can be
left over, even after ``kill -9``. Two ranks are connected directly, others by a bridge in another namespace.
Needs root, if only of a user namespace. Needs no torch.

Every interface is shaped where packets leave it. With a bridge that applies to both ends of each cable, so no
rank receives faster than the rate either.

With two classes of links, a rank has a second interface, connected to the other ranks of its node, with
another rate. It has one address: routes to the ranks of its node use the second interface. So both classes
carry bytes at the same time, and each is counted separately.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_ampipe.errors import EnvironmentMissing
from megatron_ampipe.files.inputs import adder, at_least

_NONE, RANKS = "none", 2
"""Defaults of ``--link`` and ``--ranks``."""

SPIN_KERNELS = ("ampipe_spin", "spin_kernel", "ampipe_move")
"""An emulated link's kernels in a GPU's trace: by nanoseconds (:mod:`.emulation`), torch's by cycles, and the
one that moves bytes (:mod:`.moving`)."""

NCCL_BLOCKS = 16
"""Thread blocks of a transfer over an ``:nccl`` link that names no number."""
_MOST_BLOCKS = 64

# Bits per second. The units of bits are those of tc. 'GB/s', the unit of accelerator links, is in bytes.
_RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12,
               "kB/s": 8e3, "MB/s": 8e6, "GB/s": 8e9, "TB/s": 8e12}  # fmt: skip
_LATENCY_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_MINIMUM_BIT_PER_S = 100e3
_QUANTITY = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>\D+)")
_RATE, _LATENCY = (rf"\d+(?:\.\d+)?(?:{'|'.join(units)})" for units in (_RATE_UNITS, _LATENCY_UNITS))
_LINK = re.compile(
    rf"emulated:(?P<emulated>{_RATE})(:(?P<latency>{_LATENCY}))?(?P<nccl>:nccl(?P<blocks>\d+)?)?"
    rf"(:skew(?P<skew>{_LATENCY}))?"
    rf"|(?P<rate>{_RATE})"
    rf"|inter=(?P<inter>{_RATE}),intra=(?P<intra>{_RATE})"
)


@dataclass(frozen=True, slots=True)
class Link:
    """A link between ranks, as the user wrote it in ``text``.

    Attributes:
        rate_bit_per_s: Rate of each rank and direction; None without limit (loopback, shared memory, NVLink).
            With two classes of links, the rate between nodes.
        within_node_bit_per_s: Rate of each rank and direction within a node, if that is another network.
        emulated: No real link has this rate: every all-to-all is delayed by the time of such a link.
        latency_s: Latency that is added to every all-to-all of an emulated link.
        blocks: Thread blocks that an emulated link's kernel holds while it moves the bytes through the
            memory of the device, as NCCL's kernels do; None if one thread only waits.
        skew_s: How much later than this rank another one arrives at every exchange of counts.
    """

    text: str
    rate_bit_per_s: float | None = None
    within_node_bit_per_s: float | None = None
    emulated: bool = False
    latency_s: float = 0.0
    blocks: int | None = None
    skew_s: float = 0.0

    @property
    def is_network(self) -> bool:
        """Whether it is a real TCP network between network namespaces, shaped to its rate."""
        return self.rate_bit_per_s is not None and not self.emulated

    @property
    def burst_bytes(self) -> int:
        """How much a network sends at once after a pause, at most; 0 for other links."""
        if not self.is_network:
            return 0
        assert self.rate_bit_per_s is not None
        return burst_bytes(max(self.rate_bit_per_s, self.within_node_bit_per_s or 0.0))

    def transfer_s(self, size_bytes: float) -> float:
        """The seconds of an emulated link for this many bytes in its busier direction."""
        assert self.rate_bit_per_s is not None
        return self.latency_s + size_bytes * 8 / self.rate_bit_per_s


def parse_link(text: str | None) -> Link:
    """The type of ``--link`` for ``argparse``: checks the form, and that a run can end."""
    if text in (None, _NONE):
        return Link(_NONE)
    parts = _LINK.fullmatch(text)
    rates: list[float] = []
    if parts is not None:
        rates = [
            _quantity(parts[name], _RATE_UNITS)
            for name in ("emulated", "rate", "inter", "intra")
            if parts[name] is not None
        ]
    if parts is None or min(rates) < _MINIMUM_BIT_PER_S:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no link of at least 100kbit; write none, a rate (200mbit, 25MB/s), "
            "emulated:RATE[:LATENCY][:nccl[BLOCKS]][:skewTIME] (emulated:20GB/s, emulated:20GB/s:10us, "
            "emulated:20GB/s:nccl32, emulated:20GB/s:skew2ms), or inter=RATE,intra=RATE with "
            "--ranks-per-node"
        )
    if parts["inter"] is not None:
        between, within = rates
        return Link(text, between, within)
    if parts["rate"] is not None:
        return Link(text, rates[0])
    latency_s, skew_s = (
        0.0 if parts[name] is None else _quantity(parts[name], _LATENCY_UNITS) for name in ("latency", "skew")
    )
    blocks = None
    if parts["nccl"] is not None:
        blocks = NCCL_BLOCKS if parts["blocks"] is None else int(parts["blocks"])
        if not 1 <= blocks <= _MOST_BLOCKS:
            raise argparse.ArgumentTypeError(
                f"{text!r}: a transfer holds 1 to {_MOST_BLOCKS} thread blocks; write nccl{NCCL_BLOCKS} or "
                f"nccl{2 * NCCL_BLOCKS}"
            )
    return Link(text, rates[0], emulated=True, latency_s=latency_s, blocks=blocks, skew_s=skew_s)


def _quantity(text: str, units: Mapping[str, float]) -> float:
    parts = _QUANTITY.fullmatch(text)
    assert parts is not None
    return float(parts["number"]) * units[parts["unit"]]


def add_link_arguments(parser: argparse.ArgumentParser, *, fewest_ranks: int) -> None:
    """Declare ``--link``, and ``--ranks`` and ``--ranks-per-node``, whose default is None."""
    add = adder(parser)
    link = (
        "none, a rate (200mbit) for a real network between namespaces, inter=RATE,intra=RATE for one between "
        "nodes and one within each, or emulated:RATE[:LATENCY][:nccl[BLOCKS]][:skewTIME]: nccl holds thread "
        f"blocks ({NCCL_BLOCKS}) and moves the bytes through memory, skew delays every exchange of counts"
    )
    add("--link", "L", link, type=parse_link, default=_NONE)
    add("--ranks", "N", f"expert-parallel ranks (default: {RANKS})", type=at_least(fewest_ranks))
    per_node = "consecutive ranks that are one node, for exchanges in two hops (default: all)"
    add("--ranks-per-node", "N", per_node, type=at_least(2))


def check_nodes(arguments: argparse.Namespace, num_ranks: int) -> None:
    """Refuse ``--ranks-per-node`` and ``--link`` if they do not describe nodes of ``num_ranks`` ranks."""
    per_node: int | None = arguments.ranks_per_node
    if per_node is None:
        if arguments.link.within_node_bit_per_s is not None:
            arguments.refuse(
                f"--link {arguments.link.text} needs to know the ranks of a node; add --ranks-per-node 2 and "
                "--ranks 4"
            )
    elif num_ranks % per_node or num_ranks == per_node:
        arguments.refuse(
            f"--ranks-per-node {per_node} does not divide {num_ranks} ranks into several nodes; use --ranks "
            f"{2 * per_node}"
        )


INTERFACE, WITHIN_NODE = "ampipe0", "ampipe1"
"""Names of the interfaces in every rank's namespace; the second exists with two classes of links."""
_SUBNET = "10.77.0.0/24"

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
def connected(link: Link, num_ranks: int, *, ranks_per_node: int | None = None) -> Iterator[list[int]]:
    """A context with connected network namespaces, one for each rank.

    Args:
        link: A link that is a network.
        num_ranks: Number of namespaces.
        ranks_per_node: With two classes of links, how many consecutive ranks are a node.

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
        _connect(stack, pids, INTERFACE, link.rate_bit_per_s)
        for rank, pid in enumerate(pids):
            _inside(pid, "ip link set lo up")
            _inside(pid, f"ip address add {_address(rank)}/24 dev {INTERFACE}")
            _inside(pid, f"ip route change {_SUBNET} dev {INTERFACE} {_route_of(rank)}")
        if link.within_node_bit_per_s is not None:
            assert ranks_per_node is not None
            for node in itertools.batched(range(num_ranks), ranks_per_node):
                _connect(stack, [pids[rank] for rank in node], WITHIN_NODE, link.within_node_bit_per_s)
                for rank, peer in itertools.permutations(node, 2):
                    to_peer = f"{_address(peer)}/32 dev {WITHIN_NODE} {_route_of(rank)}"
                    _inside(pids[rank], f"ip route add {to_peer}")
        yield pids


def _connect(stack: contextlib.ExitStack, pids: Sequence[int], interface: str, rate_bit_per_s: float) -> None:
    """Give each namespace a shaped interface: two are connected by a cable, others by a shaped bridge."""
    if len(pids) == 2:
        _inside(pids[0], f"ip link add {interface} type veth peer {interface} netns {pids[1]}")
    else:
        switch = stack.enter_context(_holder())
        _inside(switch, "ip link add switch up type bridge")
        for place, pid in enumerate(pids):
            port = f"port{place}"
            _inside(switch, f"ip link add {port} type veth peer {interface} netns {pid}")
            _inside(switch, f"ip link set {port} master switch up")
            _shape(switch, port, rate_bit_per_s)
    for pid in pids:
        _inside(pid, f"ip link set {interface} gso_max_size {_SEGMENT_BYTES} up")
        _shape(pid, interface, rate_bit_per_s)


def _address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def _route_of(rank: int) -> str:
    """The end of a route of a rank; a namespace can use only algorithms of its host, a route can use any."""
    return f"src {_address(rank)} congctl {_CONGESTION_CONTROL}"


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
