"""Values of flags that are names or have a unit: classes of users, casts, thresholds, sizes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_ampipe.errors import BadInput
from megatron_ampipe.spelling import did_you_mean

ROUTER_FLAG, WIRE_FLAG, BUDGET_FLAG = "--ampipe-router", "--ampipe-wire", "--ampipe-memory-budget"

SHIPPED_GATES = {
    "noisy-topk": "megatron_ampipe.layers.gates.scored:NoisyTopKRouter",
    "cosine": "megatron_ampipe.layers.gates.scored:CosineRouter",
    "sigmoid": "megatron_ampipe.layers.gates.scored:SigmoidRouter",
    "expert-choice": "megatron_ampipe.layers.gates.scored:ExpertChoiceRouter",
    "hash": "megatron_ampipe.layers.gates.hashed:HashRouter",
}
"""Routers of AMPipe by the name under which a user asks for them. Their papers are in docs/gates.md."""

IMPOSSIBLE_GATES = {
    "soft-moe": (
        "an expert of SoftMoE works on mixtures of all tokens of a sequence, so every token would depend on "
        "later ones, and no chunk could be sent before the last is known",
        "Use one of " + ", ".join(SHIPPED_GATES) + ".",
    ),
    "sinkhorn": (
        "it is a load-balancing type of Megatron",
        "Use --moe-router-load-balancing-type sinkhorn.",
    ),
}
"""Names of gates that there are and that cannot be had: why, and what to use."""

UNCHANGED = "none"
"""In ``ampipe bench --wire``: rows travel as they are."""
SHIPPED_WIRES = ("bf16", "fp8")
"""What rows can be cast to while they travel."""

_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_UNITS = {"MiB": 2**20, "GiB": 2**30}
_SIZE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)(MiB|GiB)", re.ASCII)


def class_path(name: str) -> str:
    """``package.module:Class`` for a value of ``--ampipe-router``.

    Raises:
        BadInput: the value is neither a shipped gate nor of this form.
    """
    if name in IMPOSSIBLE_GATES:
        rule, remedy = IMPOSSIBLE_GATES[name]
        raise BadInput(ROUTER_FLAG, name, rule=rule, remedy=remedy)
    if name in SHIPPED_GATES:
        return SHIPPED_GATES[name]
    examples = "cosine", "my_package.my_module:MyRouter"
    _require_class(ROUTER_FLAG, name, list(SHIPPED_GATES), examples=examples)
    return name


def check_wire(name: str, *, flag: str = WIRE_FLAG) -> None:
    """Check the form of a value of ``--ampipe-wire``, or of another flag that takes the same.

    Raises:
        BadInput: it is neither a shipped wire nor ``package.module:Class``.
    """
    if name not in SHIPPED_WIRES:
        _require_class(flag, name, SHIPPED_WIRES, examples=("fp8", "my_package.my_module:MyWire"))


def _require_class(flag: str, name: str, shipped: Sequence[str], *, examples: tuple[str, str]) -> None:
    """Check that a value names a class; ``shipped`` are the names that the flag also knows."""
    if _CLASS.fullmatch(name) is None:
        raise BadInput(
            flag,
            name or "(empty)",
            rule=f"is neither package.module:Class nor one of {', '.join(shipped)}",
            remedy=did_you_mean(name, list(shipped), most=1)
            or f"Use for example {flag} {examples[0]}, or {flag} {examples[1]}.",
        )


def check_threshold(value: float) -> None:
    """Check a value of ``--ampipe-condense``.

    Raises:
        BadInput: it is no cosine at which two tokens are similar.
    """
    # Written so that NaN is refused.
    if not 0 < value <= 1:
        raise BadInput(
            "--ampipe-condense",
            f"{value:g}",
            rule="is not above 0 and at most 1, as a cosine at which two tokens are similar is",
            remedy="Use for example --ampipe-condense 0.9, or leave it out.",
        )


def parse_size(text: str) -> int:
    """The bytes of a size such as ``60GiB``.

    Raises:
        BadInput: it is no size, or 0.
    """
    found = _SIZE.fullmatch(text)
    size_bytes = 0 if found is None else int(float(found[1]) * _UNITS[found[2]])
    if not size_bytes:
        raise BadInput(
            BUDGET_FLAG,
            text,
            rule="is not a size above 0 in MiB or GiB",
            remedy=f"Use for example {BUDGET_FLAG} 60GiB.",
        )
    return size_bytes


def size_to_text(size_bytes: float) -> str:
    """What :func:`parse_size` reads, rounded up to two digits."""
    unit = "GiB" if size_bytes >= 2**30 else "MiB"
    hundredths = -int(-size_bytes * 100 // _UNITS[unit])
    return f"{hundredths / 100:.2f}{unit}"
