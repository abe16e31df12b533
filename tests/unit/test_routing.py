"""Files of a recorded routing: what they say, what is refused, and what ``ampipe`` makes of them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ampipe.errors import BadInput
from megatron_ampipe.plan.block import even_rows
from megatron_ampipe.plan.recorded_routing import LayerRouting, RoutingRecord, read_routing, with_routing
from tests.conftest import Command
from tests.plan_cases import sized_block

# Two sequences of 4 tokens in two chunks, two experts for each token, four experts. The tokens of the first
# sequence choose 01 01 | 02 03, those of the second 01 23 | 23 23.
LAYER = LayerRouting(
    layer=2,
    counts=(((2, 2, 0, 0), (2, 0, 1, 1)), ((1, 1, 1, 1), (0, 0, 2, 2))),
    arrivals={2: ((4, 2), (1, 3))},
    rows_compared=16,
    rows_left={0.9: 8, 0.99: 12},
)
RECORD = RoutingRecord(
    iteration=5,
    num_experts=4,
    ranks=2,
    batch=1,
    ranks_per_sequence=1,
    hidden_size=8,
    tokens=(2, 2),
    layers=(LAYER,),
)


def written(folder: Path, *records: RoutingRecord) -> Path:
    for record in records:
        record.write(folder)
    return folder


def eight_experts(folder: Path) -> Path:
    """A record of four tokens that choose experts 0 and 1 of eight: one rank of four gets all."""
    counts = (((4, 4, 0, 0, 0, 0, 0, 0),),)
    layer = LayerRouting(
        layer=1,
        counts=counts,
        arrivals={2: ((4, 0),), 4: ((4, 0, 0, 0),)},
        rows_compared=8,
        rows_left={0.9: 2, 0.99: 8},
    )
    record = dataclasses.replace(RECORD, num_experts=8, ranks=4, tokens=(4,), layers=(layer,))
    return written(folder, record)


def test_a_folder_is_read_as_it_was_written(tmp_path: Path) -> None:
    later = dataclasses.replace(RECORD, iteration=10)
    written(tmp_path, later, RECORD)
    (tmp_path / ".iteration-00000015.json.7.partial").write_text("{")
    assert read_routing(tmp_path, flag="DIR").records == (RECORD, later)


@pytest.mark.parametrize(
    "change",
    [{"format": "ampipe-routing-1"}, {"num_experts": 0}, {"tokens": []}, {"layers": []}, {"layers": [{}]}],
    ids=str,
)
def test_other_files_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    written(tmp_path, RECORD)
    path = tmp_path / "iteration-00000005.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(BadInput, match="is not a file of a recorded routing"):
        read_routing(tmp_path, flag="DIR")


def test_a_folder_without_files_or_with_two_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="has no file of a recorded routing"):
        read_routing(tmp_path, flag="DIR")
    written(tmp_path, RECORD, dataclasses.replace(RECORD, iteration=6, hidden_size=16))
    with pytest.raises(BadInput, match="has files of several models"):
        read_routing(tmp_path, flag="DIR")


def test_the_command_shows_them(tmp_path: Path, ampipe: Command) -> None:
    written(tmp_path, RECORD)
    shown = ampipe("routing", tmp_path).out
    assert "the busiest of 2 ranks has 1.000 times the mean of a sequence" in shown
    assert f"2 ranks or nodes: 1.250 rows per token ({even_rows(4, 2, 2):.3f} if" in shown
    assert "50.0% at 0.9, 25.0% at 0.99" in shown
    assert "4 ranks or nodes: 2.000 rows per token (2.000 if" in shown
    # Experts have 5, 3, 4 and 4 of 16 rows.
    assert "busiest of 4 ranks has 1.250 times the mean" in ampipe("routing", tmp_path, "--ranks", "4").out
    error = ampipe("routing", tmp_path, "--ranks", "3", code=2).err
    assert "--ranks 3 does not divide the 4 experts; use 1, 2, 4" in error


def test_a_block_takes_the_figures(tmp_path: Path) -> None:
    found, said = with_routing(sized_block(experts=8, expert=4), eight_experts(tmp_path))
    assert found.imbalance == 4 and found.rows_to(4) == 1
    assert found.rows_to(3) == even_rows(8, 2, 3), (
        "for numbers that were not recorded, experts are evenly used"
    )
    assert said[0].startswith("imbalance 4.000 of 4 ranks: 1 iterations")
    with pytest.raises(BadInput, match="is of 8 experts, and the model has 16"):
        with_routing(sized_block(experts=16), tmp_path)


def test_budgets_are_of_pairs_of_ranks_or_of_receivers(tmp_path: Path, ampipe: Command) -> None:
    """In one iteration the ranks have exchanged their sequences: every rank receives what it did before."""
    first, second = [[[1000 * count for count in chunk] for chunk in part] for part in LAYER.counts]
    layers = [dataclasses.replace(LAYER, counts=counts) for counts in ((first, second), (second, first))]
    for iteration in range(1, 7):
        layer = layers[iteration == 5]
        dataclasses.replace(RECORD, iteration=iteration, tokens=(2000, 2000), layers=(layer,)).write(tmp_path)
    said = ampipe("routing", tmp_path, "--rows-margin", 1).out
    assert "fixed, alltoall: 1 of 4 recorded iterations exceed a budget" in said
    assert "fixed, HybridEP: 0 of 4 recorded iterations exceed a budget" in said
    error = ampipe("routing", tmp_path, "--rows-margin", 0.5, code=2).err
    assert "--rows-margin 0.5: is not a factor from 1 to 100" in error
    assert "captured again after 1" in said and "captured again after 0" in said
