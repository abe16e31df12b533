"""Counts what the host does for a block: device calls, and waits for the device.

``python -m tests.streams.census`` prints it as the table of docs/gpu.md.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from megatron_ampipe.schedule import Exchange
from tests.dist.cases import AUX, TIGHT
from tests.dist.worker import start_alone
from tests.streams.cases import RANKS, RECOMPUTE, SHARED, VARIANTS, block

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
    """For each block and degree (0: Megatron's layer): ``calls`` per direction, stage and kind; ``waits``."""
    from tests.streams.run import run_case

    found: dict[str, dict[str, Any]] = {}
    for name, fields in BLOCKS.items():
        case = block(kernel="cpu-flash", sequence_length=SEQUENCE_LENGTH, **fields)
        found[name] = {"0": _counted(run_case(case, stock=True, warm=True))}
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
        "all": sum(sum(made.values()) for made in calls.values()),
        "waits": dict(waits),
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    """The calls, and waits in parentheses, of a forward and a backward pass together, as a table."""
    degrees = ("0", *map(str, DEGREES))
    head = "| block | " + " | ".join("Megatron" if d == "0" else f"degree {d}" for d in degrees) + " |"
    rows = [
        f"| {name} | "
        + " | ".join(f"{by_degree[d]['all']} ({sum(by_degree[d]['waits'].values())})" for d in degrees)
        + " |"
        for name, by_degree in found.items()
    ]
    return "\n".join([head, "|" + "---|" * (len(degrees) + 1), *rows])


def main() -> None:
    start_alone(RANKS, expert_model_parallel_size=RANKS)
    print(table(census()))


if __name__ == "__main__":
    main()
