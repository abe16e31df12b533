"""Blocks of real sizes on a GPU, with slow stages and with released memory filled with NaN.

Ranks are emulated, so received tensors are memory of the communication lane, as with several GPUs. The code
is in ``tests/stress.py``; ``tests/cuda_standin.py`` runs it on a CPU.
"""

import itertools
from collections.abc import Iterator

import pytest
import torch

from megatron_ampipe.runtime.executors import CudaExecutor
from megatron_ampipe.schedule import LISTED, Partner
from tests import stress
from tests.dist.cases import Case
from tests.stress import STRESSES, StressSetup, block

# Longer than the host needs for a stage, so that the host runs ahead of the device.
DELAY_CYCLES = 3_000_000
# Transfers take a shorter and a longer time than stages, so that now one lane waits and now the other.
TURNS = itertools.cycle((1, 1, 8))
SETUP = StressSetup(
    device="cuda",
    # Tensors of 4 MiB at degree 8, and of 32 MiB if all tokens are exchanged at once.
    sequence_length=4096,
    hidden=1024,
    ffn=2048,
    executor=CudaExecutor,
    delay=lambda: torch.cuda._sleep(DELAY_CYCLES),
    travel=lambda: torch.cuda._sleep(next(TURNS) * DELAY_CYCLES),
)
TOLERANCE = 1e-4
"""Relative to the largest value, in fp32: sums over 4096 rows in another order. What is poisoned is NaN."""


@pytest.fixture(scope="module", autouse=True)
def emulated_peers() -> Iterator[None]:
    """Rank 0 of several, on the device."""
    torch.cuda.set_device(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    with stress.start_ranks():
        yield


@pytest.mark.parametrize("one", STRESSES, ids=lambda case: case.name)
def test_equals_the_sequence_of_stages(one: Case) -> None:
    differences, filled = stress.differences_under(one, SETUP)
    assert {name: value for name, value in differences.items() if not value <= TOLERANCE} == {}
    assert filled > 0


@pytest.mark.parametrize("degree", [2, 8])
def test_equals_stock_at_real_sizes(degree: int) -> None:
    differences, _ = stress.differences_under(block(degree, local_experts=2), SETUP, stock=True)
    assert {name: value for name, value in differences.items() if not value <= TOLERANCE} == {}


@pytest.mark.parametrize("partner", [Partner(), Partner(order=LISTED), Partner(2)], ids=str)
def test_partners_equal_the_sequence_of_stages(partner: Partner) -> None:
    differences, filled = stress.differences_under(block(4, local_experts=2), SETUP, partner=partner)
    assert {name: value for name, value in differences.items() if not value <= TOLERANCE} == {}
    assert filled > 0


def test_a_missing_wait_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results above would differ if computation did not wait for received data."""
    compute, wait_event, wait = (
        torch.cuda.current_stream(),
        torch.cuda.Stream.wait_event,
        torch.cuda.Event.wait,
    )

    def by_others(stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        if stream != compute:
            wait_event(stream, event)

    def on_others(event: torch.cuda.Event, stream: torch.cuda.Stream | None = None) -> None:
        if (stream or torch.cuda.current_stream()) != compute:
            wait(event, stream)

    # Stream.wait_stream comes down to the first.
    monkeypatch.setattr(torch.cuda.Stream, "wait_event", by_others)
    monkeypatch.setattr(torch.cuda.Event, "wait", on_others)
    differences, _ = stress.differences_under(block(4), SETUP)
    torch.cuda.synchronize()
    assert any(not value <= TOLERANCE for value in differences.values())


def test_an_early_release_is_seen() -> None:
    """Likewise if memory were returned to its stream before another stream has read it."""
    differences, _ = stress.differences_under(block(4), SETUP, insert_fault=stress.insert_unheld_reader)
    assert any(not value <= TOLERANCE for value in differences.values())
