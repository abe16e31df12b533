"""Values of flags that are names or have a unit: classes, which are imported, casts, thresholds, sizes."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Mapping
from typing import Any

from megatron_ampipe.errors import BadInput, did_you_mean

ROUTER_FLAG, WIRE_FLAG = "--ampipe-router", "--ampipe-wire"

SHIPPED_GATES = {
    "noisy-topk": "megatron_ampipe.layers.gates:NoisyTopKRouter",
    "cosine": "megatron_ampipe.layers.gates:CosineRouter",
    "sigmoid": "megatron_ampipe.layers.gates:SigmoidRouter",
    "expert-choice": "megatron_ampipe.layers.gates:ExpertChoiceRouter",
    "hash": "megatron_ampipe.layers.gates:HashRouter",
}
"""Routers of AMPipe by the name under which a user asks for them. Their papers are in docs/gates.md."""

SHIPPED_WIRES = {
    "bf16": "megatron_ampipe.exchange.codecs:Bf16Wire",
    "fp8": "megatron_ampipe.exchange.codecs:Fp8Wire",
}
"""What rows can be cast to while they travel."""

_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_UNITS = {"MiB": 2**20, "GiB": 2**30}
_SIZE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)(MiB|GiB)", re.ASCII)


def class_path(name: str, shipped: Mapping[str, str], *, flag: str) -> str:
    """``package.module:Class`` for a name of ``shipped``, or itself; :class:`BadInput` if it is neither."""
    if name not in shipped and _CLASS.fullmatch(name) is None:
        rule = f"is neither package.module:Class nor one of {', '.join(shipped)}"
        remedy = f"Use for example {flag} {min(shipped)} or {flag} my_package.my_module:MyClass."
        raise BadInput(flag, name or "(empty)", rule=rule, remedy=did_you_mean(name, shipped) or remedy)
    return shipped.get(name, name)


def import_class(
    name: str, shipped: Mapping[str, str], *, flag: str, fits: Callable[[type], bool], rule: str, remedy: str
) -> Any:
    """The class of :func:`class_path`, whose module is imported; or :class:`BadInput`.

    A class that does not fit is refused with ``rule`` and ``remedy``.
    """
    try:
        value = pkgutil.resolve_name(class_path(name, shipped, flag=flag))
    except BadInput:
        raise
    except Exception as error:
        rule = f"cannot be imported: {type(error).__name__}: {error}".rstrip(".")
        remedy = "Check the name, and that its folder is in PYTHONPATH on every rank."
        raise BadInput(flag, name, rule=rule, remedy=remedy) from error
    if not (isinstance(value, type) and fits(value)):
        raise BadInput(flag, name, rule=rule, remedy=remedy)
    return value


def check_threshold(value: float) -> None:
    """Raise :class:`BadInput` for a value of ``--ampipe-condense`` that is no cosine of similar tokens."""
    # Written so that NaN is refused.
    if not 0 < value <= 1:
        rule = "is not above 0 and at most 1, as a cosine at which two tokens are similar is"
        remedy = "Use for example --ampipe-condense 0.9, or leave it out."
        raise BadInput("--ampipe-condense", f"{value:g}", rule=rule, remedy=remedy)


def parse_size(text: str) -> int:
    """The bytes of a size such as ``60GiB``; :class:`BadInput` if it is none, or 0."""
    parts = _SIZE.fullmatch(text)
    size_bytes = 0 if parts is None else int(float(parts[1]) * _UNITS[parts[2]])
    if not size_bytes:
        flag = "--ampipe-memory-budget"
        remedy = f"Use for example {flag} 60GiB."
        raise BadInput(flag, text, rule="is not a size above 0 in MiB or GiB", remedy=remedy)
    return size_bytes


def size_to_text(size_bytes: float) -> str:
    """What :func:`parse_size` reads, rounded up to two digits."""
    unit = "GiB" if size_bytes >= 2**30 else "MiB"
    hundredths = -int(-size_bytes * 100 // _UNITS[unit])
    return f"{hundredths / 100:.2f}{unit}"
