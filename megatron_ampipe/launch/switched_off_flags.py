"""Megatron's other overlaps, and a fusion, which AMPipe switches off. Imports neither torch nor Megatron.

Called by ``launch`` after parsing, before Megatron validates its arguments, except for
:data:`LIFTS_ONE_CONNECTION`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SwitchedOffFlag:
    """A flag that requests a different overlap or a fusion: without it the run computes the same function.

    Attributes:
        setting: The Megatron flag.
        reason: Why it is not needed: what AMPipe does instead.
    """

    setting: str
    reason: str

    @property
    def name(self) -> str:
        """Its name in parsed arguments."""
        return self.setting.removeprefix("--").replace("-", "_")


_SAME_EXCHANGES = "AMPipe schedules the same all-to-alls inside each micro-batch"
_SAME_WEIGHTS = "it delays weight gradients for an overlap that AMPipe replaces"

SWITCHED_OFF: tuple[SwitchedOffFlag, ...] = (
    SwitchedOffFlag("--moe-shared-expert-overlap", "AMPipe schedules the shared experts itself"),
    SwitchedOffFlag("--overlap-moe-expert-parallel-comm", _SAME_EXCHANGES),
    SwitchedOffFlag("--ep-overlap-early-attn-memory-release", _SAME_EXCHANGES),
    SwitchedOffFlag("--overlap-dispatch-backward-with-experts-wgrad", _SAME_WEIGHTS),
    SwitchedOffFlag("--delay-wgrad-compute", _SAME_WEIGHTS),
    SwitchedOffFlag(
        "--fused-residual-rmsnorm",
        "stages call the norm and the residual addition one after the other, with the same result",
    ),
)
"""The flags that are switched off if layers are pipelined; the start-up table has a line for each."""


LIFTS_ONE_CONNECTION = "overlap_moe_expert_parallel_comm"
"""While Megatron validates its arguments, this one of them is set, of a pipelined run too that was started
without it. Megatron then warns that tensor or context parallelism prefers ``CUDA_DEVICE_MAX_CONNECTIONS=1``
on Hopper and older GPUs, where it would otherwise demand it: what it says of that overlap of the same
all-to-alls is true of AMPipe's. ``launch.session`` switches it off afterwards."""


def switch_off_overlaps(arguments: Any) -> tuple[SwitchedOffFlag, ...]:
    """Switch off the flags in :data:`SWITCHED_OFF`.

    Args:
        arguments: Parsed but not validated yet, because Megatron's validation checks what these flags need.

    Returns:
        The flags that were set.
    """
    found = tuple(one for one in SWITCHED_OFF if getattr(arguments, one.name, False))
    for one in found:
        setattr(arguments, one.name, False)
    return found
