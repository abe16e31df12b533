"""How ``--ampipe-wire`` becomes an object. What a class must promise is in docs/wire.md."""

from __future__ import annotations

from megatron_ampipe.block.named_values import SHIPPED_WIRES, WIRE_FLAG
from megatron_ampipe.errors import BadInput
from megatron_ampipe.layers.named_class import import_class
from megatron_ampipe.runtime.wire import SHIPPED, Wire

assert set(SHIPPED) == set(SHIPPED_WIRES)


def load_wire(name: str) -> Wire:
    """The wire that ``--ampipe-wire NAME`` names. Imports its module, and makes an object without arguments.

    Raises:
        BadInput: there is no such module or class, it cannot be made, or it lacks a method.
    """
    if name in SHIPPED:
        return SHIPPED[name]()
    found = import_class(WIRE_FLAG, name, path=name, fits=_is_wire, kind="Wires")
    if not isinstance(found, type) or not _is_wire(found):
        raise BadInput(
            WIRE_FLAG,
            name,
            rule="is no class with the methods encode(rows, trip) and decode(parts, out, trip)",
            remedy="Give it both; see docs/wire.md.",
        )
    try:
        wire: Wire = found()
    except Exception as error:
        raise BadInput(
            WIRE_FLAG,
            name,
            rule=f"cannot be made without arguments: {type(error).__name__}: {error}".rstrip("."),
            remedy="Give its arguments defaults.",
        ) from error
    return wire


def _is_wire(found: type) -> bool:
    return callable(getattr(found, "encode", None)) and callable(getattr(found, "decode", None))
