"""The largest attention scores of chunks are those of the whole sequence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_ampipe.attention import kernels
from megatron_ampipe.attention.kernels import largest_scores
from megatron_ampipe.layers.chunk_attention import ChunkAttention
from megatron_ampipe.schedule import Span
from megatron_ampipe.schedule.documents import Documents

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


class KernelOfTE(torch.nn.Module):
    """As Megatron's module around Transformer Engine's attention: keeps the largest scores over its calls."""

    current_max_attn_logits: Any = None

    def forward(self, query: Any, key: Any, value: Any, mask: None, *, attn_mask_type: Any) -> Any:
        assert attn_mask_type.name == "causal_bottom_right"
        rows = Span(0, len(query), len(key) - len(query))
        found = largest_scores(query, key, spans=(rows,), scale=0.3)
        earlier = self.current_max_attn_logits
        self.current_max_attn_logits = found if earlier is None else torch.max(earlier, found)
        return query.flatten(2)


def test_the_kernel_of_transformer_engine_keeps_them_over_chunks() -> None:
    query, key = tensors()
    core = KernelOfTE()
    config = SimpleNamespace(
        attention_dropout=0.0,
        sequence_parallel=False,
        window_size=None,
        window_attn_skip_freq=None,
        qk_clip=True,
    )
    attention: Any = SimpleNamespace(
        config=config, core_attention=core, checkpoint_core_attention=False, layer_number=1,
        hidden_size_per_attention_head=8,
    )  # fmt: skip
    attend = ChunkAttention(attention, kernel="te")
    for spans in SPANS:
        attend(query[spans[0].global_start : spans[-1].global_end], key, key, spans=spans)
    expected = plain(query, key, window=None, starts=((0,),) * 3)
    torch.testing.assert_close(core.current_max_attn_logits, expected)
