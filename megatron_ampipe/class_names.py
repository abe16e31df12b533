"""The form ``package.module:Class`` of a flag that names a class of the user.

Imports neither torch nor Megatron. Used where the values of such flags are checked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_ampipe.errors import BadInput
from megatron_ampipe.spelling import did_you_mean

_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def require_class_path(flag: str, name: str, shipped: Sequence[str], *, examples: tuple[str, str]) -> None:
    """Check that a value names a class.

    Args:
        flag: Whose value it is.
        name: The value.
        shipped: The names that the flag also knows, none of which it is.
        examples: A shipped name and a class path, for the message.

    Raises:
        BadInput: it is not ``package.module:Class``.
    """
    if _CLASS.fullmatch(name) is None:
        known = ", ".join(shipped)
        raise BadInput(
            flag,
            name or "(empty)",
            rule=f"is neither package.module:Class nor one of {known}",
            remedy=did_you_mean(name, list(shipped), most=1)
            or f"Use for example {flag} {examples[0]}, or {flag} {examples[1]}.",
        )
