"""Variables that let the streams of a process run at the same time on a GPU, and NCCL's groups safely so.

``CUDA_DEVICE_MAX_CONNECTIONS`` is the number of hardware queues that the streams share.
``NCCL_LAUNCH_ORDER_IMPLICIT`` has NCCL start the collectives of different groups in the order in which the
host has issued them, which is the same on all ranks; in different orders they can wait for each other
forever. Both are read once, when CUDA and NCCL are initialised.

torch before 2.8 calls ``record_stream`` for the tensors of a collective, so that their memory is free at a
time that depends on the device, not on the schedule. With ``TORCH_NCCL_AVOID_RECORD_STREAMS``, read when a
process group is made, it keeps them until they are waited for, as newer versions do. Imports neither torch
nor Megatron.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from megatron_ampipe import compat

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
QUEUES = "32"
"""The maximum of CUDA, which is more than the busy streams of a process with AMPipe."""
EXPORT = f"export {VARIABLE}={QUEUES}"
ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
ORDER_SINCE = (2, 26)
"""The first version of NCCL that reads :data:`ORDER`."""
_EXPORT_ORDER = f"export {ORDER}=1"
RECORDS = "TORCH_NCCL_AVOID_RECORD_STREAMS"
RECORDS_BEFORE = (2, 8)
"""The first version of torch that needs no :data:`RECORDS`, and warns of it."""
_YES = ("1", "y", "yes", "t", "true")
"""What torch takes for set, in any case."""


def set_default() -> None:
    """Set the variables that the user has not set, if what reads them has not been initialised."""
    torch = sys.modules.get("torch")
    has_groups = torch is not None and torch.distributed.is_initialized()
    if VARIABLE not in os.environ and (torch is None or not torch.cuda.is_initialized()):
        os.environ[VARIABLE] = QUEUES
    if ORDER not in os.environ and not has_groups:
        os.environ[ORDER] = "1"
    if RECORDS not in os.environ and not has_groups and records_streams(compat.torch_release()):
        os.environ[RECORDS] = "1"


def without_one_queue(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables without a limit to one hardware queue, which would take the overlap away."""
    return {name: value for name, value in environment.items() if (name, value) != (VARIABLE, "1")}


def warning(value: str | None) -> str:
    """The effect of a number of queues on pipelined layers, and the remedy; empty if it is good."""
    if value not in (None, "1"):
        return ""
    effect = "8 hardware queues, which more than 8 busy streams share"
    if value == "1":
        effect = (
            "one hardware queue: work starts in the order in which it was issued, so that a transfer "
            "overlaps with about one stage less"
        )
    return f"{effect}; {EXPORT} before torchrun"


def order_warning(value: str | None, nccl: tuple[int, ...]) -> str:
    """What a value of :data:`ORDER` means with this version of NCCL, and the remedy; empty if it is good."""
    danger = "collectives of different groups that run at the same time can wait for each other forever"
    if nccl < ORDER_SINCE:
        since = ".".join(map(str, ORDER_SINCE))
        return f"NCCL {'.'.join(map(str, nccl))} ignores it: {danger}. Use NCCL {since} (torch 2.7) or newer"
    return "" if value == "1" else f"{danger}; {_EXPORT_ORDER} before torchrun"


def records_streams(torch: tuple[int, ...] | None) -> bool:
    """Whether a version of torch reads :data:`RECORDS`; None for no torch."""
    return torch is not None and torch < RECORDS_BEFORE


def records_warning(value: str | None, torch: tuple[int, ...] | None) -> str:
    """What a value of :data:`RECORDS` means with a version of torch, and the remedy; empty if it is good."""
    if not records_streams(torch) or (value or "").lower() in _YES:
        return ""
    effect = "collectives keep memory for a time that depends on the device: peaks are higher, and differ"
    return f"{effect}; export {RECORDS}=1 before torchrun"


def startup_rows(
    environ: Mapping[str, str], nccl: tuple[int, ...], torch: tuple[int, ...] | None
) -> list[tuple[str, str, str]]:
    """Each variable for the start-up table: a label, its value, and what it does.

    ``nccl`` and ``torch`` are the versions; :data:`RECORDS` is only shown for those that it matters to.
    """
    queues, order, records = (environ.get(name) for name in (VARIABLE, ORDER, RECORDS))
    given = [
        (VARIABLE, queues, warning(queues), "hardware queues, so that streams work independently"),
        (ORDER, order, order_warning(order, nccl), "NCCL starts the collectives of all groups in one order"),
    ]
    if records_streams(torch):
        effect = "memory of collectives is free as soon as they have been waited for"
        given.append((RECORDS, records, records_warning(records, torch), effect))
    rows = []
    for name, value, problem, effect in given:
        text = f"{name} is not set" if value is None else f"{name}={value}"
        rows.append(("warning" if problem else "environment", text, problem or effect))
    return rows
