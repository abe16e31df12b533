"""The stress test of ``tests/gpu`` on a CPU: it detects inserted faults, and reports none otherwise.

All of its blocks run in ``test_gpu_check.py``, on stand-ins for CUDA.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_ampipe.runtime.executors import CudaExecutor, ThreadExecutor
from megatron_ampipe.schedule import kinds

pytestmark = pytest.mark.ranks(1)


@pytest.fixture(autouse=True, scope="module")
def _pretended_ranks() -> Iterator[None]:
    from tests import stress

    torch.distributed.destroy_process_group()
    with stress.start_ranks():
        yield


class Impatient:
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


def differences(executor: Any, **options: Any) -> tuple[dict[str, float], int]:
    from tests import stress

    setup = stress.StressSetup(
        device="cpu",
        sequence_length=32,
        hidden=32,
        ffn=64,
        executor=executor,
        delay=lambda: time.sleep(2e-4),
        travel=lambda: time.sleep(5e-4),
    )
    return stress.differences_under(stress.block(4), setup, **options)


# The executor for CUDA is on the host platform's streams: tests what it releases, and when.
@pytest.mark.parametrize(
    ("executor", "stock"), [(ThreadExecutor, False), (CudaExecutor, False), (ThreadExecutor, True)]
)
def test_equals_sequential_execution(executor: Any, stock: bool) -> None:
    found, filled = differences(executor, stock=stock)
    assert {key: value for key, value in found.items() if not value <= 1e-5} == {}
    assert filled > 0


@pytest.mark.parametrize("fault", ["early release", "missing wait"])
def test_an_inserted_fault_is_detected(fault: str) -> None:
    from tests import stress

    early = {"insert_fault": stress.insert_unheld_reader} if fault == "early release" else {}
    found, _ = differences(ThreadExecutor if early else Impatient, **early)
    assert any(math.isnan(value) for value in found.values())
