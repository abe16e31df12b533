"""Runs a block of ``tests/stress.py`` on a CPU, with and without inserted faults, in one process."""

from __future__ import annotations

import dataclasses
import sys
import time
import traceback
from functools import partial
from typing import Any

from megatron_ampipe.launch import host
from megatron_ampipe.schedule import kinds
from tests.dist.worker import report


def main() -> None:
    host.install()
    from megatron_ampipe.runtime.executors import CudaExecutor, ThreadExecutor
    from tests import stress

    setup = stress.StressSetup(
        device="cpu",
        sequence_length=32,
        hidden=32,
        ffn=64,
        executor=ThreadExecutor,
        delay=lambda: time.sleep(2e-4),
        travel=lambda: time.sleep(5e-4),
    )
    one = stress.block(4)
    # The executor for CUDA, on the host platform's streams: tests what it releases, and when.
    on_streams = dataclasses.replace(setup, executor=CudaExecutor)
    impatient = dataclasses.replace(setup, executor=_Impatient)
    compare = partial(stress.differences_under, one)
    found: dict[str, Any] = {}
    with stress.start_ranks():
        found["thread executor"] = _try(partial(compare, setup))
        found["cuda executor"] = _try(partial(compare, on_streams))
        found["stock"] = _try(partial(compare, setup, stock=True))
        found["early release"] = _try(partial(compare, setup, insert_fault=stress.insert_unheld_reader))
        found["missing wait"] = _try(partial(compare, impatient))
    report(found)


def _try(compare: Any) -> Any:
    try:
        return compare()
    except Exception:
        print(traceback.format_exc(), file=sys.stderr)
        return {"error": traceback.format_exc()}


class _Impatient:
    """A fault: does not wait for collectives, except for counts, which are needed to run at all."""

    host_waits = False
    threads = False

    def execute(self, tape: Any, run: Any, *rest: Any) -> None:
        """See ``runtime.executors.Executor``."""
        travelling = []
        for call in tape.calls:
            transfer = run(call)
            if transfer is not None and call.stage.kind == kinds.COUNTS:
                transfer.wait()
            elif transfer is not None:
                travelling.append(transfer)
        for transfer in travelling:
            transfer.wait()


if __name__ == "__main__":
    main()
