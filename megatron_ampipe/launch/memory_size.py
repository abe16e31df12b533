"""The value of ``--ampipe-memory-budget``. Imports neither torch nor Megatron."""

from __future__ import annotations

import re

from megatron_ampipe.errors import BadInput

FLAG = "--ampipe-memory-budget"
_UNITS = {"MiB": 2**20, "GiB": 2**30}
_SIZE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)(MiB|GiB)", re.ASCII)


def parse_size(text: str) -> int:
    """The bytes of a size such as ``60GiB``.

    Raises:
        BadInput: it is no size, or 0.
    """
    found = _SIZE.fullmatch(text)
    size_bytes = 0 if found is None else int(float(found[1]) * _UNITS[found[2]])
    if not size_bytes:
        raise BadInput(
            FLAG,
            text or "(empty)",
            rule="is not a size above 0 in MiB or GiB",
            remedy=f"Use for example {FLAG} 60GiB.",
        )
    return size_bytes


def size_to_text(size_bytes: float) -> str:
    """What :func:`parse_size` reads, rounded up to two digits."""
    unit = "GiB" if size_bytes >= 2**30 else "MiB"
    hundredths = -int(-size_bytes * 100 // _UNITS[unit])
    return f"{hundredths / 100:.2f}{unit}"
