"""How sequences are split into chunks."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ampipe.errors import BadInput
from megatron_ampipe.schedule import Chunk, Pipeline, Span, chunk_sequence, parse_shares


def lengths(chunks: tuple[Chunk, ...]) -> list[int]:
    return [sum(span.length for span in chunk.hidden) for chunk in chunks]


@given(st.integers(1, 60_000), st.integers(1, 32))
def test_chunks_cover_the_sequence_in_order_and_differ_by_a_quarter_at_most(rows: int, degree: int) -> None:
    degree = min(degree, rows)
    chunks = chunk_sequence(rows, degree=degree)
    found = lengths(chunks)
    assert len(found) == degree and min(found) > 0
    assert Chunk.joined(chunks) == Chunk(hidden=(Span(0, rows, 0),), queries=(Span(0, rows, 0),))
    if rows // degree >= 4 * 128:
        ends = list(itertools.accumulate(found))[:-1]
        assert [end for end in ends if end % 128] == []
        assert max(found) - min(found) <= 128 <= min(found) / 4
    else:
        assert max(found) - min(found) <= 1
        assert found == sorted(found, reverse=True)


def test_shares_go_to_the_nearest_tile_where_every_chunk_has_four() -> None:
    assert lengths(chunk_sequence(4096, degree=3, shares=(0.3, 0.3, 0.4))) == [1280, 1152, 1664]
    assert lengths(chunk_sequence(4100, degree=2, shares=(0.5, 0.5))) == [2048, 2052]
    assert lengths(chunk_sequence(4096, degree=2, shares=(0.9, 0.1))) == [3686, 410]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_shares_go_to_the_nearest_row(rows: list[int]) -> None:
    shares = [part / sum(rows) for part in rows]
    assert lengths(chunk_sequence(sum(rows), degree=len(rows), shares=shares)) == rows


@pytest.mark.parametrize("degree", [0, 11])
def test_a_degree_that_leaves_a_chunk_empty_is_refused(degree: int) -> None:
    with pytest.raises(BadInput, match="between 1 and the number of rows of the sequence on one rank"):
        chunk_sequence(10, degree=degree)


def test_a_share_without_a_row_is_refused_with_one_that_has() -> None:
    with pytest.raises(BadInput, match=r"chunk 1 would have none of the 10 rows .* at least 0\.1") as refused:
        chunk_sequence(10, degree=3, shares=(0.5, 0.01, 0.49))
    assert refused.value.name == "--ampipe-chunks"


def test_a_backward_degree_cuts_every_share_further() -> None:
    assert lengths(Pipeline.of(2, backward_degree=4, shares=(0.75, 0.25)).chunks(16)) == [6, 6, 2, 2]
    assert lengths(Pipeline.of(4, backward_degree=2).chunks(16)) == [4] * 4


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"degree": 4, "backward_degree": 3}, "--ampipe-backward-degree 3: must be a divisor or a multiple"),
        ({"degree": 4, "backward_degree": 0}, "--ampipe-backward-degree 0: must be a divisor or a multiple"),
        ({"degree": 4, "shares": (0.5, 0.5)}, r"--ampipe-degree 4: is not the number of shares .*\(2\)"),
        ({"degree": 0}, "--ampipe-degree 0: must be a whole number"),
    ],
)
def test_pipelines_that_do_not_go_together_are_refused(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(BadInput, match=rule):
        Pipeline.of(**settings)


@pytest.mark.parametrize("text", ["0.5,half", "", "0.5,0.6", "1.2,-0.2", "nan,1", "inf,1"])
def test_bad_shares_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match="is not a list of numbers above 0 with a sum of 1"):
        parse_shares(text, flag="--ampipe-chunks")


def test_shares_are_scaled_to_a_sum_of_one() -> None:
    assert parse_shares("0.33,0.33,0.33", flag="--chunks") == pytest.approx((1 / 3, 1 / 3, 1 / 3))
