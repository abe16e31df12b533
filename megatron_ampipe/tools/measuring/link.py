"""The link between ranks: what ``--link`` says, and the flags that go with it. Needs no torch."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from enum import StrEnum

from megatron_ampipe.errors import BadInput
from megatron_ampipe.files.inputs import at_least

NO_LINK, RANKS = "none", 2
"""Where ``--link`` is not given, and where neither ``--ranks`` nor ``--nodes`` is."""

SPIN_KERNELS = ("ampipe_spin", "spin_kernel")
"""An emulated link's kernels in a GPU's trace: by nanoseconds (:mod:`.emulation`), torch's by cycles."""

# Bits per second. The units of bits are those of tc. 'GB/s', the unit of accelerator links, is in bytes.
_RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12,
               "kB/s": 8e3, "MB/s": 8e6, "GB/s": 8e9, "TB/s": 8e12}  # fmt: skip
_LATENCY_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_MINIMUM_BIT_PER_S = 100e3
_CLASSES = ("inter", "intra")
_REMEDY = (
    "Write none, a rate (200mbit, 25MB/s), emulated:RATE or emulated:RATE:LATENCY (emulated:20GB/s:10us), or "
    "inter=RATE,intra=RATE with --nodes and --ranks-per-node."
)
_EXAMPLE = "--link inter=50mbit,intra=400mbit --nodes 2 --ranks-per-node 2"


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


def parse_link(text: str, *, ranks_per_node: int | None = None) -> Link:
    """Read the value of ``--link``, with that of ``--ranks-per-node`` for two classes of links.

    Raises:
        BadInput: it has none of the forms, or a figure is out of range.
    """
    if text == NO_LINK:
        return Link(text, LinkKind.NONE)
    if "=" in text:
        rates = dict(part.partition("=")[::2] for part in text.split(","))
        if sorted(rates) != sorted(_CLASSES) or text.count("=") != 2 or ranks_per_node is None:
            raise _refused(text, f"two classes of links are written as in {_EXAMPLE}")
        inter, intra = (_rate(text, rates[name]) for name in _CLASSES)
        text = f"{text},ranks-per-node={ranks_per_node}"
        return Link(text, LinkKind.NETWORK, inter, nodes=Nodes(ranks_per_node, intra))
    head, *rest = text.split(":")
    if head != "emulated":
        if rest:
            raise _refused(text, "only an emulated link takes a latency")
        return Link(text, LinkKind.NETWORK, _rate(text, text))
    if not 1 <= len(rest) <= 2:
        raise _refused(text, "an emulated link has a rate and at most a latency")
    latency_s = _quantity(text, rest[1], _LATENCY_UNITS, "latency") if len(rest) == 2 else 0.0
    return Link(text, LinkKind.EMULATED, _rate(text, rest[0]), latency_s)


def _rate(text: str, rate: str) -> float:
    bit_per_s = _quantity(text, rate, _RATE_UNITS, "rate")
    if bit_per_s < _MINIMUM_BIT_PER_S:
        raise _refused(text, "is below 100kbit, at which no run would end")
    return bit_per_s


def _quantity(text: str, quantity: str, units: dict[str, float], what: str) -> float:
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z/]+)", quantity)
    if parts is None or parts[2] not in units:
        raise _refused(text, f"{quantity!r} is not a {what}: a number and one of {', '.join(units)}")
    return float(parts[1]) * units[parts[2]]


def _refused(text: str, rule: str) -> BadInput:
    return BadInput("--link", text or "(empty)", rule=rule, remedy=_REMEDY)


def add_link_arguments(parser: argparse.ArgumentParser, *, fewest_ranks: int) -> None:
    """Declare ``--link``, ``--ranks``, ``--nodes`` and ``--ranks-per-node``."""
    add = parser.add_argument
    link = (
        "none; a rate (200mbit) for a real network between namespaces; inter=RATE,intra=RATE for one between "
        f"nodes and one within each; or emulated:RATE[:LATENCY] (default: {NO_LINK})"
    )
    ranks = f"expert-parallel ranks (default: {RANKS}, or those of all nodes)"
    nodes = "with --link inter=RATE,intra=RATE: how many nodes there are; ranks of a node follow one another"
    add("--link", metavar="L", help=link)
    add("--ranks", metavar="N", type=at_least(fewest_ranks), help=ranks)
    add("--nodes", metavar="N", type=at_least(2), help=nodes)
    add("--ranks-per-node", metavar="N", type=at_least(2), help="ranks of a node, with --nodes")


def link_of(arguments: argparse.Namespace) -> Link:
    """The link that the flags describe.

    Raises:
        BadInput: it is not a link, or the flags about nodes do not go together with it.
    """
    text = arguments.link or NO_LINK
    for flag, value in (("--nodes", arguments.nodes), ("--ranks-per-node", arguments.ranks_per_node)):
        if (value is None) == ("=" in text):
            if value is None:
                rule = f"has two classes of links, and needs {flag}"
                raise BadInput("--link", text, rule=rule, remedy=f"Use for example {_EXAMPLE}.")
            rule = f"has no effect with --link {text}"
            raise BadInput(flag, value, rule=rule, remedy=f"Use for example {_EXAMPLE}.")
    return parse_link(text, ranks_per_node=arguments.ranks_per_node)


def num_ranks(arguments: argparse.Namespace) -> int:
    """The value of ``--ranks``, or how many there are without.

    Raises:
        BadInput: it is not the number of ranks of all nodes.
    """
    ranks: int = arguments.ranks or RANKS
    if arguments.nodes is None:
        return ranks
    on_nodes: int = arguments.nodes * arguments.ranks_per_node
    if arguments.ranks not in (None, on_nodes):
        rule = f"is not {arguments.nodes} nodes of {arguments.ranks_per_node} ranks"
        raise BadInput("--ranks", ranks, rule=rule, remedy=f"Leave it out: there are {on_nodes}.")
    return on_nodes


def refuse_own_ranks(arguments: argparse.Namespace) -> None:
    """Refuse these flags where torchrun has started the ranks.

    Raises:
        BadInput: one of them is given.
    """
    for flag in ("--link", "--ranks", "--nodes", "--ranks-per-node"):
        value = getattr(arguments, flag[2:].replace("-", "_"))
        if value is not None:
            rule = "is for ranks that the command starts itself, and torchrun has started these"
            raise BadInput(flag, value, rule=rule, remedy=f"Leave {flag} out.")
