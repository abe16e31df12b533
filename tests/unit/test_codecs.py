"""What travels in place of rows: wires, and which rows are sent where similar ones are condensed."""

from collections.abc import Callable

import pytest
import torch

from megatron_ampipe.block.settings import Settings, check_threshold
from megatron_ampipe.errors import BadInput
from megatron_ampipe.exchange.codecs import Condenser, TransferId, load_wire
from megatron_ampipe.launch.recording import compared_rows
from megatron_ampipe.layers.gates import load_gate
from megatron_ampipe.schedule import Direction, Exchange, Pipeline
from megatron_ampipe.schedule.pipeline import check_condense

TRIP = TransferId(1, 0, "dispatch", Direction.FORWARD)


def round_trip(name: str, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
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
    found, sent = round_trip(name, rows)
    assert sent == 50 * row_bytes
    # A value far below the largest of its row has fewer digits in fp8.
    small = rows.abs() < rows.abs().amax(dim=1, keepdim=True) * 2**-14
    error = (found - rows).abs() / rows.abs().clamp_min(1e-37)
    assert error[~small].max() <= largest * 1.001
    assert torch.equal(found[7], rows[7]) and found.dtype == dtype


def test_what_is_not_finite_stays_visible_and_no_rows_are_no_rows() -> None:
    rows = torch.ones(3, 8)
    rows[0, 2], rows[1, 5] = float("nan"), float("inf")
    found, _ = round_trip("fp8", rows)
    assert not found[:2].isfinite().all(dim=1).any()
    assert torch.equal(found[2], rows[2])
    found, sent = round_trip("fp8", torch.empty(0, 16))
    assert found.shape == (0, 16) and sent == 0


@pytest.mark.parametrize(
    ("load", "name", "message"),
    [
        (load_wire, "fp9", "Did you mean fp8?"),
        (load_wire, "int4", "is neither package.module:Class nor one of bf16, fp8"),
        (load_wire, "nowhere.at_all:Wire", "No module named 'nowhere'"),
        (load_wire, "tests.wires:Nothing", "has no attribute 'Nothing'"),
        (load_wire, "json:JSONEncoder", "is no class with the methods encode"),
        (load_gate, "", "is neither package.module:Class nor one of noisy-topk"),
        (load_gate, "cosin", "Did you mean cosine?"),
        (load_gate, "a.b.Router", "Use for example --ampipe-router cosine"),
        *((load_gate, name, "is neither package.module:Class") for name in ("a..b:Router", "a:b:c")),
        (load_gate, "tests.wires:HalvesWire", "is not a subclass of megatron.core"),
    ],
)
def test_other_names_of_classes_are_refused(load: Callable[[str], object], name: str, message: str) -> None:
    with pytest.raises(BadInput, match="--ampipe-wire" if load is load_wire else "--ampipe-router") as caught:
        load(name)
    assert message in str(caught.value)


@pytest.mark.parametrize("value", [0.0, -0.5, 1.01, float("nan")])
def test_a_threshold_is_a_cosine(value: float) -> None:
    with pytest.raises(BadInput, match=r"--ampipe-condense.*Use for example --ampipe-condense 0\.9"):
        check_threshold(value)


def test_settings_that_cannot_be_combined() -> None:
    for pipeline, remedy in (
        (Pipeline.of(4, exchange=Exchange.RANKS), "Use --ampipe-exchange rows,"),
        (Pipeline.of(2, memory="keep/redispatch"), "Use --ampipe-memory rebuild,"),
    ):
        with pytest.raises(BadInput, match=f"{remedy} or leave --ampipe-condense out"):
            check_condense(Settings(condense=0.9), pipeline)


def test_the_recorder_counts_the_rows_that_go_of_one_expert() -> None:
    generator = torch.Generator().manual_seed(3)
    batch, experts, thresholds = 2, 4, (0.6, 0.8, 0.95)
    hidden = torch.randn(30, batch, 3, generator=generator)
    hidden[10:12] = hidden[3]
    hidden[20, 0] = float("nan")
    chosen = torch.rand(30, batch, experts, generator=generator) < 0.5
    chosen[..., 1] = False
    routing_map = chosen.flatten(0, 1)
    rows = hidden.flatten(0, 1)[routing_map.T.nonzero()[:, 1]]
    sent = [
        Condenser(threshold).condense(rows, routing_map, batch=batch, counted=False).counts
        for threshold in thresholds
    ]
    for pick in range(5):
        expert = (0, 2, 3)[pick % 3]
        found = compared_rows(hidden, chosen, thresholds, pick=pick).tolist()
        assert found == [routing_map[:, expert].sum(), *(counts[expert] for counts in sent)]
    assert compared_rows(hidden, chosen, thresholds, pick=None).tolist() == [0] * 4
    assert compared_rows(hidden, chosen & False, thresholds, pick=0).tolist() == [0] * 4
