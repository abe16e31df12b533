"""The largest attention scores of chunks are those of the whole sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_ampipe.attention import kernels
from megatron_ampipe.attention.kernels import largest_scores
from megatron_ampipe.schedule import Span
from megatron_ampipe.schedule.chunks import Documents

ROWS, BATCH, HEADS, GROUPS = 24, 3, 4, 2
WHOLE = (Span(0, ROWS, 0),)
SPANS = [(Span(0, 10, 0),), (Span(10, 7, 10), Span(17, 7, 17))]


def tensors() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randn(ROWS, BATCH, HEADS, 8, generator=generator),
        torch.randn(ROWS, BATCH, GROUPS, 8, generator=generator),
    )


def plain(query: Any, key: Any, *, window: int | None, starts: Any) -> Any:
    found = torch.full((HEADS,), -torch.inf)
    for batch in range(BATCH):
        for row in range(ROWS):
            first = max(start for start in starts[batch] if start <= row)
            if window is not None:
                first = max(first, row - window)
            for head in range(HEADS):
                scores = key[first : row + 1, batch, head * GROUPS // HEADS] @ query[row, batch, head]
                found[head] = max(found[head], scores.max() * 0.3)
    return found


@pytest.mark.parametrize("most", [1, 100, 2**24])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("starts", [((0,),) * 3, ((0, 4, 19), (0, 23), (0, 1, 2, 11))], ids=["one", "many"])
def test_chunks_have_the_scores_of_the_sequence(
    most: int, window: int | None, starts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "MOST_SCORES", most)
    query, key = tensors()
    documents = None if len(starts[0]) == 1 else Documents(starts, ROWS, own_positions=True)
    parts = [
        largest_scores(
            query[spans[0].global_start : spans[-1].global_end],
            key,
            spans=spans,
            scale=0.3,
            window=window,
            documents=documents,
        )
        for spans in SPANS
    ]
    expected = plain(query, key, window=window, starts=starts)
    torch.testing.assert_close(torch.stack(parts).amax(dim=0), expected)
    assert not torch.equal(parts[0], parts[1])
