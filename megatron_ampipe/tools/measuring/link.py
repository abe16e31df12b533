"""The link between ranks: what ``--link`` says, and the flags that go with it. Needs no torch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
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
_RATE, _TIME = (rf"\d+(?:\.\d+)?(?:{'|'.join(units)})" for units in (_RATE_UNITS, _LATENCY_UNITS))
_LINK = re.compile(
    rf"(?P<rate>{_RATE})|emulated:(?P<emulated>{_RATE})(:(?P<latency>{_TIME}))?"
    rf"|inter=(?P<inter>{_RATE}),intra=(?P<intra>{_RATE})"
)
_REMEDY = (
    "Write none, a rate (200mbit, 25MB/s), emulated:RATE or emulated:RATE:LATENCY "
    "(emulated:20GB/s:10us), or inter=RATE,intra=RATE with --nodes and --ranks-per-node."
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
class Link:
    """A link between ranks.

    Attributes:
        text: As the user wrote it.
        rate_bit_per_s: Of each rank, in each direction; None without a limit. With nodes, between them.
        latency_s: Added to every all-to-all of an emulated link.
        ranks_per_node: Ranks of a node, which follow one another; None where all ranks have one network.
        within_node_bit_per_s: The rate of the network that ranks of a node have among themselves, which is
            used at the same time as the other.
    """

    text: str
    kind: LinkKind
    rate_bit_per_s: float | None = None
    latency_s: float = 0.0
    ranks_per_node: int | None = None
    within_node_bit_per_s: float | None = None

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
        BadInput: it has none of the forms, or a rate is too low.
    """
    if text == NO_LINK:
        return Link(text, LinkKind.NONE)
    found = _LINK.fullmatch(text)
    if found is None or (found["inter"] and ranks_per_node is None):
        raise BadInput("--link", text or "(empty)", rule="is not a link", remedy=_REMEDY)
    rate = _quantity(found["rate"] or found["emulated"] or found["inter"], _RATE_UNITS)
    if found["inter"]:
        text, within = f"{text},ranks-per-node={ranks_per_node}", _quantity(found["intra"], _RATE_UNITS)
        link = Link(text, LinkKind.NETWORK, rate, 0.0, ranks_per_node, within)
    elif found["emulated"]:
        link = Link(text, LinkKind.EMULATED, rate, _quantity(found["latency"] or "0s", _LATENCY_UNITS))
    else:
        link = Link(text, LinkKind.NETWORK, rate)
    if min(rate, link.within_node_bit_per_s or rate) < _MINIMUM_BIT_PER_S:
        raise BadInput("--link", text, rule="is below 100kbit, at which no run would end", remedy=_REMEDY)
    return link


def _quantity(text: str, units: Mapping[str, float]) -> float:
    number = text.rstrip("".join(units))
    return float(number) * units[text.removeprefix(number)]


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
            rule = f"is needed with two classes of links, and only there: --link is {text}"
            raise BadInput(flag, value or "", rule=rule, remedy=f"Use for example {_EXAMPLE}.")
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
