"""Wires alone: what fp8 and bf16 lose, and names that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_ampipe.block.named_values import check_wire
from megatron_ampipe.errors import BadInput
from megatron_ampipe.exchange.codecs import Trip, WireCodec, load_wire
from megatron_ampipe.exchange.transports import ALL_TO_ALL, RowTransport, exchange_chunks
from megatron_ampipe.schedule import Direction, Exchange, Pipeline
from megatron_ampipe.schedule.config import AMPipeConfig

TRIP = Trip(1, 0, "dispatch", Direction.FORWARD)


def there_and_back(name: str, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Rows after a trip, and the bytes that were sent."""
    wire = load_wire(name)
    parts = wire.encode(rows, TRIP)
    out = torch.empty_like(rows)
    wire.decode(parts, out, TRIP)
    return out, sum(part.numel() * part.element_size() for part in parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "largest", "row_bytes"), [("bf16", 2**-8, 128), ("fp8", 2**-4, 68)])
def test_a_value_is_off_by_the_precision_of_the_format(
    name: str, largest: float, row_bytes: int, dtype: torch.dtype
) -> None:
    rows = torch.randn(50, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    rows[:25] *= 1e-12
    rows[7], rows[8] = 0, 3e20
    found, sent = there_and_back(name, rows)
    assert sent == 50 * row_bytes
    # A value far below the largest of its row has fewer digits in fp8.
    small = rows.abs() < rows.abs().amax(dim=1, keepdim=True) * 2**-14
    error = (found - rows).abs() / rows.abs().clamp_min(1e-37)
    assert error[~small].max() <= largest * 1.001
    assert torch.equal(found[7], rows[7]) and found.dtype == dtype


def test_what_is_not_finite_stays_visible() -> None:
    rows = torch.ones(3, 8)
    rows[0, 2], rows[1, 5] = float("nan"), float("inf")
    found, _ = there_and_back("fp8", rows)
    assert not found[:2].isfinite().all(dim=1).any()
    assert torch.equal(found[2], rows[2])


def test_no_rows_are_no_rows() -> None:
    found, sent = there_and_back("fp8", torch.empty(0, 16))
    assert found.shape == (0, 16) and sent == 0


class OneRank:
    """A process group of one."""

    def size(self) -> int:
        """Number of ranks."""
        return 1


def test_what_cannot_be_divided_over_ranks_is_refused() -> None:
    transport = RowTransport(ALL_TO_ALL, [4], [4], OneRank())
    codec = WireCodec(load_wire("tests.wires:JoinedWire"), TRIP)
    with pytest.raises(BadInput, match=r"sizes \[\[1, 32\]\] for 4 rows"):
        exchange_chunks([transport], [[torch.ones(4, 8)]], combine=False, codecs=[codec])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fp9", "Did you mean fp8?"),
        ("int4", "is neither package.module:Class nor one of bf16, fp8"),
        ("nowhere.at_all:Wire", "no module named 'nowhere'"),
        ("tests.wires:Nothing", "Wires in it: ArgumentWire, HalvesWire, JoinedWire"),
        ("tests.wires:EncodeOnlyWire", "is no class with the methods encode"),
        ("tests.wires:ArgumentWire", "cannot be made without arguments: TypeError"),
    ],
)
def test_other_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(BadInput, match="--ampipe-wire") as caught:
        check_wire(name)
        load_wire(name)
    assert message in str(caught.value)


@pytest.mark.parametrize("value", [0.0, -0.5, 1.01, float("nan")])
def test_a_threshold_is_a_cosine(value: float) -> None:
    with pytest.raises(BadInput, match=r"--ampipe-condense.*Use for example --ampipe-condense 0\.9"):
        AMPipeConfig(pipeline=Pipeline.of(4), condense=value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"condense": 0.9, "pipeline": Pipeline.of(4, exchange=Exchange.RANKS)},
            "Use --ampipe-exchange rows, or leave --ampipe-condense out.",
        ),
        (
            {"condense": 0.9, "pipeline": Pipeline.of(2, memory="keep/redispatch")},
            "Use --ampipe-memory rebuild, or leave --ampipe-condense out.",
        ),
    ],
)
def test_settings_that_cannot_be_combined(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput) as caught:
        AMPipeConfig(**settings)
    assert message in str(caught.value)
