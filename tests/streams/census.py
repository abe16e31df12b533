"""Counts what the host does for a block: device calls, and waits for the device."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from megatron_ampipe.schedule import Exchange
from tests.dist.cases import AUX, TIGHT
from tests.streams.cases import RECOMPUTE, SHARED, VARIANTS, block

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
    "all-gather dispatcher": {"local_experts": 2, "model": VARIANTS["allgather"]},
}  # fmt: skip


def census() -> dict[str, dict[str, Any]]:
    """For each block and degree: ``calls`` per direction, stage and kind; ``waits``."""
    from tests.streams.run import run_case

    found: dict[str, dict[str, Any]] = {}
    for name, fields in BLOCKS.items():
        found[name] = {}
        for degree in DEGREES:
            ours = block(kernel="cpu-flash", sequence_length=SEQUENCE_LENGTH, degree=degree, **fields)
            found[name][str(degree)] = _counted(run_case(ours, warm=True))
    return found


def _counted(run: Any) -> dict[str, Any]:
    calls: dict[str, Counter[str]] = defaultdict(Counter)
    stages: Counter[str] = Counter()
    for place, made in run.issued.items():
        kind = place.partition(".")[0]
        stages[kind] += 1
        calls[kind].update(made)
    waits: Counter[str] = Counter(f"{place.partition('.')[0]}: {call}" for place, call in run.waits)
    return {
        "calls": {kind: sum(made.values()) / stages[kind] for kind, made in calls.items() if kind},
        "waits": dict(waits),
    }
