"""Counts what the host does for a block: device calls, and waits for the device."""

from __future__ import annotations

from collections import Counter
from typing import Any

from megatron_ampipe.schedule import Exchange
from tests.dist.cases import AUX, TIGHT
from tests.streams.cases import ALLGATHER, RECOMPUTE, SHARED, block

DEGREES = (2, 4, 8)
SEQUENCE_LENGTH = 64
"""Enough tokens for every expert to receive some in every chunk."""
BLOCKS: dict[str, dict[str, Any]] = {
    "1 expert per rank": {},
    "2 experts per rank": {"local_experts": 2},
    "4 experts per rank": {"local_experts": 4},
    "router losses, shared experts": {"model": AUX | SHARED},
    "capacity": {"model": TIGHT},
    "each token once per rank": {
        "local_experts": 2, "exchange": Exchange.RANKS, "model": {"moe_router_topk": 2}
    },
    "recompute of experts": {"model": RECOMPUTE},
    "all-gather dispatcher": {"local_experts": 2, "model": ALLGATHER},
}  # fmt: skip


def census(name: str) -> dict[int, dict[str, Any]]:
    """By degree the ``calls`` of each stage and the ``waits``."""
    from tests.streams.run import run_case

    found = {}
    for degree in DEGREES:
        case = block(kernel="cpu-flash", sequence_length=SEQUENCE_LENGTH, degree=degree, **BLOCKS[name])
        run = run_case(case, warm=True)
        calls: dict[str, int] = Counter()
        stages = Counter(place.partition(".")[0] for place in run.issued)
        for place, made in run.issued.items():
            calls[place.partition(".")[0]] += sum(made.values())
        found[degree] = {
            "calls": {kind: number / stages[kind] for kind, number in calls.items() if kind},
            "waits": Counter(f"{place.partition('.')[0]}: {call}" for place, call in run.waits),
        }
    return found
