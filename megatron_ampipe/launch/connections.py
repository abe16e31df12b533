"""``CUDA_DEVICE_MAX_CONNECTIONS``: the number of hardware queues that a process's streams share on a GPU.

CUDA reads it once, when it is initialised. Imports neither torch nor Megatron.
"""

from __future__ import annotations

import os
import sys

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
QUEUES = "32"
"""The maximum of CUDA, which is more than the busy streams of a process with AMPipe."""
EXPORT = f"export {VARIABLE}={QUEUES}"


def set_default() -> None:
    """Set :data:`QUEUES` if the user has not set the variable and CUDA has not been initialised."""
    torch = sys.modules.get("torch")
    if VARIABLE not in os.environ and (torch is None or not torch.cuda.is_initialized()):
        os.environ[VARIABLE] = QUEUES


def warning(value: str | None) -> str:
    """The effect of a value of the variable on pipelined layers, and the remedy; empty if it is good."""
    if value not in (None, "1"):
        return ""
    effect = "8 hardware queues, which more than 8 busy streams share"
    if value == "1":
        effect = (
            "one hardware queue: work starts in the order in which it was issued, so that a transfer "
            "overlaps with about one stage less"
        )
    return f"{effect}; {EXPORT} before torchrun"
