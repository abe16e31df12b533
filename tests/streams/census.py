"""Counts what the host does for a block: device calls, and waits for the device.

``python -m tests.streams.census`` prints it as the table of docs/gpu.md.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from megatron_ampipe.schedule import Exchange
from tests.dist.cases import AUX, TIGHT
from tests.dist.worker import start_alone
from tests.streams.cases import ALLGATHER, RANKS, RECOMPUTE, SHARED, block

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
    """By degree (0 for Megatron's layer) the ``calls`` of each stage, ``all`` of them, and the ``waits``."""
    from tests.streams.run import run_case

    found = {}
    for degree in (0, *DEGREES):
        case = block(kernel="cpu-flash", sequence_length=SEQUENCE_LENGTH, degree=degree or 4, **BLOCKS[name])
        run = run_case(case, stock=degree == 0, warm=True)
        calls: dict[str, int] = Counter()
        stages = Counter(place.partition(".")[0] for place in run.issued)
        for place, made in run.issued.items():
            calls[place.partition(".")[0]] += sum(made.values())
        found[degree] = {
            "calls": {kind: number / stages[kind] for kind, number in calls.items() if kind},
            "all": sum(calls.values()),
            "waits": Counter(f"{place.partition('.')[0]}: {call}" for place, call in run.waits),
        }
    return found


def row(name: str, found: dict[int, dict[str, Any]]) -> str:
    """A row of the table: calls, and waits in parentheses, of a forward and a backward pass together."""
    cells = [f"{each['all']} ({each['waits'].total()})" for each in found.values()]
    return f"| {' | '.join([name, *cells])} |"


def main() -> None:
    start_alone(RANKS, expert_model_parallel_size=RANKS)
    print(*(row(name, census(name)) for name in BLOCKS), sep="\n")


if __name__ == "__main__":
    main()
