"""The link between ranks: what ``--link`` says, and the flags that go with it. Needs no torch."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

from megatron_ampipe.errors import BadInput
from megatron_ampipe.files.inputs import at_least

_NONE, RANKS = "none", 2
"""Where ``--link`` and ``--ranks`` are not given."""

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
_REMEDY = (
    "Write none, a rate (200mbit, 25MB/s), emulated:RATE or emulated:RATE:LATENCY (emulated:20GB/s:10us)."
)


@dataclass(frozen=True, slots=True)
class Link:
    """A link between ranks, as the user wrote it in ``text``.

    Attributes:
        rate_bit_per_s: Of each rank, in each direction; None for loopback, shared memory or NVLink as it is.
        emulated: No real link has this rate: every all-to-all takes longer by what such a link would take.
        latency_s: Added to every all-to-all of an emulated link.
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
        """What an emulated link takes for this many bytes in its busier direction."""
        assert self.rate_bit_per_s is not None
        return self.latency_s + size_bytes * 8 / self.rate_bit_per_s


def parse_link(text: str | None) -> Link:
    """Read the value of ``--link``; BadInput if it has none of the forms, or a rate is too low."""
    if text in (None, _NONE):
        return Link(_NONE)
    parts = _LINK.fullmatch(text)
    if parts is None or (parts["latency"] and not parts["emulated"]):
        raise BadInput("--link", text or "(empty)", rule="is not a link", remedy=_REMEDY)
    rate = float(parts["rate"]) * _RATE_UNITS[parts["unit"]]
    if rate < _MINIMUM_BIT_PER_S:
        raise BadInput("--link", text, rule="is below 100kbit, at which no run would end", remedy=_REMEDY)
    latency_s = float(parts["latency"] or 0) * _LATENCY_UNITS.get(parts["of_latency"], 1.0)
    return Link(text, rate, emulated=bool(parts["emulated"]), latency_s=latency_s)


def add_link_arguments(parser: argparse.ArgumentParser, *, fewest_ranks: int) -> None:
    """Declare ``--link`` and ``--ranks``; both are None where they are not given."""
    link = "none, a rate (200mbit) for a real network between namespaces, or emulated:RATE[:LATENCY]"
    ranks = f"expert-parallel ranks (default: {RANKS})"
    parser.add_argument("--link", metavar="L", help=f"{link} (default: {_NONE})")
    parser.add_argument("--ranks", metavar="N", type=at_least(fewest_ranks), help=ranks)
