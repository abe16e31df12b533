"""Two ranks run an AMPipe layer; on rank 0 one of its collectives fails. Reports each rank's exception."""

from __future__ import annotations

import sys
import time
import traceback
from typing import Any

from tests.dist.cases import AUX, Case
from tests.dist.worker import report, start, use_groups

FAILING_CALL = {"forward": 3, "backward": 10}
"""Indices of exchanges of a pass: 8 in each direction, two for each of four chunks."""


def main() -> None:
    rank, _ = start()
    use_groups()
    from megatron_ampipe.exchange import packing
    from megatron_ampipe.runtime.collectives import exchange_rows
    from tests.dist.blocks import build_layers, run

    case = Case("failure", model={"moe_router_topk": 2, **AUX})
    _, ours = build_layers(case)
    run(ours, case, rank=rank)
    calls = 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if rank == 0 and calls == FAILING_CALL[sys.argv[1]]:
            raise OSError("the cable was pulled")
        return exchange_rows(*args, **kwargs)

    packing.ALL_TO_ALL = (failing, failing)
    began = time.monotonic()
    found = {"type": None, "message": "", "traceback": "", "calls": 0}
    try:
        run(ours, case, rank=rank)
    except Exception as error:
        found |= {"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
    report(found | {"seconds": time.monotonic() - began, "calls": calls})


if __name__ == "__main__":
    main()
