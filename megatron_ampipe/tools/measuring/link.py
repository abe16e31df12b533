"""The value of ``--link``: no link, a real network of some rate, or an emulated one. Parses text only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from megatron_ampipe.errors import BadInput

# Bits per second. The units of bits are those of tc. 'GB/s', the unit of accelerator links, is in bytes.
_RATE_UNITS = {
    "kbit": 1e3,
    "mbit": 1e6,
    "gbit": 1e9,
    "tbit": 1e12,
    "kB/s": 8e3,
    "MB/s": 8e6,
    "GB/s": 8e9,
    "TB/s": 8e12,
}
_LATENCY_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z/]+)")

SPIN_KERNELS = ("ampipe_spin", "spin_kernel")
"""An emulated link's kernels in a GPU's trace: by nanoseconds (:mod:`.device_clock`), torch's by cycles."""

_MINIMUM_BIT_PER_S = 100e3
_MAXIMUM_NETWORK_BIT_PER_S = 100e9
_MAXIMUM_LATENCY_S = 1.0

_CLASSES, _RANKS_PER_NODE = ("inter", "intra"), "ranks-per-node"

_REMEDY = (
    "Write none, a rate (200mbit, 25MB/s), emulated:RATE or emulated:RATE:LATENCY (emulated:20GB/s:10us)."
)


class LinkKind(StrEnum):
    """Where the bytes of an all-to-all go."""

    NONE = "none"
    """Loopback, shared memory or NVLink, as the ranks have."""
    NETWORK = "network"
    """A real TCP network between network namespaces, shaped to a rate."""
    EMULATED = "emulated"
    """As NONE, and every all-to-all takes longer by what a link would take."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """The second class of links: a network within each node, which is used at the same time as the other.

    Attributes:
        ranks_per_node: Ranks of a node; they follow one another.
        rate_bit_per_s: Of each rank within its node, in each direction.
    """

    ranks_per_node: int
    rate_bit_per_s: float

    def node_of(self, rank: int) -> int:
        """The node of a rank."""
        return rank // self.ranks_per_node


@dataclass(frozen=True, slots=True)
class Link:
    """A link between ranks.

    Attributes:
        text: As the user wrote it.
        kind: See :class:`LinkKind`.
        rate_bit_per_s: Of each rank, in each direction; None without a limit. With nodes, between them.
        latency_s: Added to every all-to-all of an emulated link.
        nodes: Where ranks of a node have another network among themselves; None where all have one.
    """

    text: str
    kind: LinkKind
    rate_bit_per_s: float | None = None
    latency_s: float = 0.0
    nodes: Nodes | None = None

    @property
    def emulated(self) -> bool:
        """Whether no real link had this rate."""
        return self.kind is LinkKind.EMULATED

    def transfer_s(self, size_bytes: float) -> float:
        """What an emulated link takes for this many bytes in its busier direction."""
        assert self.rate_bit_per_s is not None
        return self.latency_s + size_bytes * 8 / self.rate_bit_per_s


def parse_link(text: str) -> Link:
    """Read the value of ``--link``.

    Raises:
        BadInput: it is none of the three forms, or a figure is out of range.
    """
    if text == "none":
        return Link(text, LinkKind.NONE)
    if "=" in text:
        return _of_nodes(text)
    head, *rest = text.split(":")
    if head != "emulated":
        if rest:
            raise _refused(text, "only an emulated link takes a latency")
        rate = _rate(text, text)
        if rate > _MAXIMUM_NETWORK_BIT_PER_S:
            raise _refused(text, "is more than a network of this machine can carry (100gbit)")
        return Link(text, LinkKind.NETWORK, rate)
    if not 1 <= len(rest) <= 2:
        raise _refused(text, "an emulated link has a rate and at most a latency")
    latency_s = _quantity(text, rest[1], _LATENCY_UNITS, "latency") if len(rest) == 2 else 0.0
    if latency_s > _MAXIMUM_LATENCY_S:
        raise _refused(text, "the latency must be at most 1s")
    return Link(text, LinkKind.EMULATED, _rate(text, rest[0]), latency_s)


def require_one_class(link: Link, *, flag: str = "--link") -> None:
    """Refuse a link with nodes where one kind of link is measured.

    Raises:
        BadInput: it has two classes.
    """
    if link.nodes is not None:
        rule = "has two classes of links, which ampipe bench and ampipe profile make"
        raise BadInput(flag, link.text, rule=rule, remedy=f"Use {flag} 100mbit.")


def with_nodes(text: str, *, ranks_per_node: int) -> str:
    """A ``--link`` of two classes with the ranks of a node, as :func:`parse_link` reads it."""
    return f"{text},{_RANKS_PER_NODE}={ranks_per_node}"


def has_classes(text: str) -> bool:
    """Whether a ``--link`` names classes of links."""
    return "=" in text


def _of_nodes(text: str) -> Link:
    parts = [part.partition("=") for part in text.split(",")]
    found = {key: value for key, _, value in parts}
    if sorted(found) != sorted([*_CLASSES, _RANKS_PER_NODE]) or len(parts) != len(found):
        raise _refused(
            text, "two classes of links are inter=RATE,intra=RATE with --nodes and --ranks-per-node"
        )
    rates = {key: _rate(text, found[key]) for key in _CLASSES}
    for rate in rates.values():
        if rate > _MAXIMUM_NETWORK_BIT_PER_S:
            raise _refused(text, "is more than a network of this machine can carry (100gbit)")
    nodes = Nodes(int(found[_RANKS_PER_NODE]), rates["intra"])
    return Link(text, LinkKind.NETWORK, rates["inter"], nodes=nodes)


def _rate(text: str, rate: str) -> float:
    bit_per_s = _quantity(text, rate, _RATE_UNITS, "rate")
    if bit_per_s < _MINIMUM_BIT_PER_S:
        raise _refused(text, "is below 100kbit, at which no run would end")
    return bit_per_s


def _quantity(text: str, quantity: str, units: dict[str, float], what: str) -> float:
    found = _QUANTITY.fullmatch(quantity)
    if found is None:
        raise _refused(text, f"{quantity!r} is not a {what}: a number and one of {', '.join(units)}")
    number, unit = found.groups()
    if unit not in units:
        raise _refused(text, f"{unit!r} is not a unit of {what}; units are {', '.join(units)}")
    return float(number) * units[unit]


def _refused(text: str, rule: str) -> BadInput:
    return BadInput("--link", text or "(empty)", rule=rule, remedy=_REMEDY)
