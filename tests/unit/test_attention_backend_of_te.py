"""Transformer Engine chooses a backend of attention once per shape; a stand-in counts its choices."""

import dataclasses
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core")
from megatron_ampipe import compat
from megatron_ampipe.attention.kernels import Kernel
from megatron_ampipe.layers.chunk_attention import ChunkAttention
from megatron_ampipe.schedule import Span


@dataclasses.dataclass
class AttentionParams:
    """As in Transformer Engine."""

    max_seqlen_q: int
    max_seqlen_kv: int
    is_training: bool
    fp8_meta: dict[str, Any]


class Attention:
    """Megatron's attention of Transformer Engine: how it remembers its choice."""

    training = True

    def __init__(self, latest: dict[str, Any]) -> None:
        self.latest, self.choices = latest, 0
        self.fp8_meta = {"recipe": "first"}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: None, **_: Any) -> Tensor:
        params = AttentionParams(len(query), len(key), self.training, self.fp8_meta)
        latest = self.latest
        if latest["attention_params"] is None or params != latest["attention_params"]:
            latest |= {"attention_params": params, "backend_selection_requires_update": True}
        if latest["backend_selection_requires_update"]:
            self.choices += 1
            latest |= {"backend": (len(query), len(key)), "backend_selection_requires_update": False}
        assert latest["backend"] == (len(query), len(key))
        return query.flatten(2)


@pytest.fixture
def latest(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    made = types.ModuleType("transformer_engine.pytorch.attention.dot_product_attention")
    made._attention_backends = {"attention_params": None, "backend_selection_requires_update": False}
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.attention"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, made.__name__, made)
    compat._backend_of_transformer_engine.cache_clear()
    yield made._attention_backends
    compat._backend_of_transformer_engine.cache_clear()
    compat._BACKENDS_BY_SHAPE.clear()


def attend(*cores: Attention, degree: int = 4) -> None:
    """All chunks of all layers, as a forward pass calls them."""
    rows = torch.zeros(8 * degree, 1, 2, 4)
    for core in cores:
        layer = ChunkAttention.__new__(ChunkAttention)
        layer._core = core
        for start in range(0, 8 * degree, 8):
            spans = (Span(local_start=start, global_start=start, length=8),)
            Kernel(layer._transformer_engine)(rows[start : start + 8], rows, rows, spans=spans, scale=1.0)


def test_it_chooses_once_per_shape_and_layer_and_anew_for_other_parameters(latest: dict[str, Any]) -> None:
    first, second = Attention(latest), Attention(latest)
    for _ in range(3):
        attend(first, second)
    assert (first.choices, second.choices) == (4, 4)
    first.training = False
    attend(first)
    assert first.choices == 8
    first.fp8_meta["recipe"] = "second"
    attend(first)
    assert first.choices == 12
