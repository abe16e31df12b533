"""Reads a trace of torch's profiler: what overlapped on the device, and where the host waited for it. Pure.

The emulated link is a kernel that spins (:mod:`megatron_ampipe.tools.measuring.emulation`), so the streams on
which one ran are the communication lane, and all other kernels are computation. Called by :mod:`.profiled`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_ampipe.files.timeline import COMPUTE, DIRECTIONS, StageSpan, Timeline
from megatron_ampipe.tools.measuring.network import SPIN_KERNELS

MARK = "ampipe:{direction}"
"""What the host's part of a pass is marked with in the trace."""

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_HOST = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True, slots=True)
class Profile:
    """What one pass, forward and backward, showed.

    Attributes:
        communication_ms: Time in which the communication lane was busy.
        hidden_share: Share of that with computation at the same time, 0 to 1.
        compute_ms: Time in which something was computed.
        host_waits: By direction, how often which call made the host wait for the device.
    """

    communication_ms: float
    hidden_share: float
    compute_ms: float
    host_waits: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def read_profile(trace: Mapping[str, Any]) -> Profile:
    """What a Chrome trace of one marked pass shows.

    Args:
        trace: As ``torch.profiler`` exports it, times in microseconds.

    Raises:
        ValueError: the pass is not marked in it.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    on_device = [event for event in events if event.get("cat") in _ON_DEVICE]
    link_streams = {
        event["args"]["stream"] for event in on_device if any(name in event["name"] for name in SPIN_KERNELS)
    }
    timeline = Timeline(
        rank=0,
        spans=tuple(
            StageSpan(
                lane="comm" if event["args"]["stream"] in link_streams else COMPUTE,
                stage=event["name"],
                direction=DIRECTIONS[0],
                layer=1,
                iteration=1,
                begin_us=float(event["ts"]),
                end_us=float(event["ts"]) + float(event["dur"]),
            )
            for event in on_device
        ),
    )
    return Profile(
        communication_ms=timeline.communication_us / 1e3,
        hidden_share=timeline.hidden_share,
        compute_ms=timeline.compute_us / 1e3,
        host_waits={direction: _waits(events, direction) for direction in DIRECTIONS},
    )


def _waits(events: list[dict[str, Any]], direction: str) -> dict[str, int]:
    """Calls that wait for the device, begun within the mark of a direction, on any of the host's threads."""
    name = MARK.format(direction=direction)
    marks = [event for event in events if event["name"] == name and event.get("cat") == "user_annotation"]
    if len(marks) != 1:
        raise ValueError(f"the trace holds {len(marks)} marks '{name}', not one")
    begin = float(marks[0]["ts"])
    end = begin + float(marks[0]["dur"])
    calls = (event["name"] for event in events if event.get("cat") in _ON_HOST and begin <= event["ts"] < end)
    return dict(Counter(call for call in calls if _waits_for_device(call)))


def _waits_for_device(call: str) -> bool:
    # A copy to pageable memory is Async by name; the synchronisation of its stream after it is what counts.
    copies = call.startswith(("cudaMemcpy", "cuMemcpy"))
    return call.endswith("Synchronize") or (copies and "Async" not in call)
