"""Peak memory of a pass on the modelled device, and how much keeping memory for other streams adds."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

from megatron_ampipe.runtime import stack_call
from megatron_ampipe.runtime.streams import StreamPlan
from megatron_ampipe.runtime.tape import Tape
from tests.streams.cases import block

SIZES = {"ffn_hidden_size": 32, "moe_router_topk": 2}
PEAKS: dict[str, dict[str, Any]] = {"forward": {"gradients": False}, "forward and backward": {}}


def peaks(name: str) -> tuple[int, int, int]:
    """Peak bytes with the rule of ``stream_order``, if nothing is kept, and if all is kept to the end."""
    from tests.streams.run import run_case

    case = block(degree=8, sequence_length=256, kernel="cpu-flash", model=SIZES)

    def peak() -> int:
        return run_case(case, warm=True, **PEAKS[name]).peak_bytes

    with mock.patch.object(stack_call, "Crossing", lambda: None):
        nothing = peak()
    plan = Tape.stream_plan.func

    def keeping(tape: Tape) -> StreamPlan:
        return dataclasses.replace(plan(tape), releases=((),) * len(tape.calls))

    with mock.patch.object(Tape, "stream_plan", property(keeping)):
        everything = peak()
    return peak(), nothing, everything
