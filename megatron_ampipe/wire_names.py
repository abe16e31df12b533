"""The values of ``--ampipe-wire`` and ``--ampipe-condense``. Imports neither torch nor Megatron.

Read by ``config``, which checks the form of a value, and by ``launch``, which finds the class.
"""

from __future__ import annotations

from megatron_ampipe.class_names import require_class_path
from megatron_ampipe.errors import BadInput

WIRE_FLAG, CONDENSE_FLAG = "--ampipe-wire", "--ampipe-condense"

UNCHANGED = "none"
"""In ``ampipe bench --wire``: rows travel as they are."""
SHIPPED_WIRES = ("bf16", "fp8")
"""What rows can be cast to while they travel."""


def check_wire(name: str, *, flag: str = WIRE_FLAG) -> None:
    """Check the form of a value of ``--ampipe-wire``, or of another flag that takes the same.

    Raises:
        BadInput: it is neither a shipped wire nor ``package.module:Class``.
    """
    if name not in SHIPPED_WIRES:
        examples = "fp8", "my_package.my_module:MyWire"
        require_class_path(flag, name, SHIPPED_WIRES, examples=examples)


def check_threshold(value: float) -> None:
    """Check a value of ``--ampipe-condense``.

    Raises:
        BadInput: it is no cosine at which two tokens are similar.
    """
    # Written so that NaN is refused.
    if not 0 < value <= 1:
        raise BadInput(
            CONDENSE_FLAG,
            f"{value:g}",
            rule="is not above 0 and at most 1, as a cosine at which two tokens are similar is",
            remedy=f"Use for example {CONDENSE_FLAG} 0.9, or leave it out.",
        )
