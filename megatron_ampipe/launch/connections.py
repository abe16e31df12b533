"""``CUDA_DEVICE_MAX_CONNECTIONS``: how many hardware queues the streams of a process share on a GPU.

CUDA reads it once, when it is initialised. Imports neither torch nor Megatron.
"""

from __future__ import annotations

import os
import sys

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
QUEUES = "32"
"""The most that CUDA has; more than a process of AMPipe's has busy streams."""
EXPORT = f"export {VARIABLE}={QUEUES}"


def set_default() -> None:
    """Use :data:`QUEUES` where the user has not chosen, unless CUDA has been initialised already."""
    torch = sys.modules.get("torch")
    if VARIABLE not in os.environ and (torch is None or not torch.cuda.is_initialized()):
        os.environ[VARIABLE] = QUEUES


def warning(value: str | None) -> str:
    """What a value of the variable does to pipelined layers, and what to do about it; empty if it is well."""
    if value not in (None, "1"):
        return ""
    what = "8 hardware queues, which more than 8 busy streams share"
    if value == "1":
        what = (
            "one hardware queue: work starts in the order in which it was issued, so that a transfer "
            "overlaps with about one stage less"
        )
    return f"{what}; {EXPORT} before torchrun"
