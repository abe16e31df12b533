"""Where sequences are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ampipe.errors import BadInput
from megatron_ampipe.schedule import Chunk, Span, chunk_sequence


@given(st.integers(1, 300), st.data())
def test_chunks_cover_the_sequence_evenly_and_in_order(length: int, data: st.DataObject) -> None:
    degree = data.draw(st.integers(1, length))
    chunks = chunk_sequence(length, degree=degree)
    rows = [
        row for chunk in chunks for span in chunk.hidden for row in range(span.local_start, span.local_end)
    ]
    lengths = [sum(span.length for span in chunk.hidden) for chunk in chunks]
    assert len(chunks) == degree
    assert rows == list(range(length))
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)
    assert Chunk.joined(chunks) == Chunk(hidden=(Span(0, length, 0),), queries=(Span(0, length, 0),))


def test_the_last_chunk_is_shorter_where_the_degree_does_not_divide() -> None:
    assert [chunk.hidden[0].length for chunk in chunk_sequence(10, degree=4)] == [3, 3, 2, 2]


def test_a_chunk_sees_all_earlier_keys_and_its_own() -> None:
    assert [chunk.num_keys for chunk in chunk_sequence(10, degree=4)] == [3, 6, 8, 10]


@pytest.mark.parametrize("degree", [0, -1, 11])
def test_a_degree_that_leaves_a_chunk_empty_is_refused(degree: int) -> None:
    with pytest.raises(BadInput, match="between 1 and the rows of the sequence that one rank holds"):
        chunk_sequence(10, degree=degree)


def test_joining_keeps_a_gap() -> None:
    parts = (Chunk((Span(0, 2, 0),), (Span(0, 2, 0),)), Chunk((Span(2, 2, 6),), (Span(2, 2, 6),)))
    assert Chunk.joined(parts).hidden == (Span(0, 2, 0), Span(2, 2, 6))
