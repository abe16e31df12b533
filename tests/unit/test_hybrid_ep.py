"""HybridEP as a transport: which calls it gets, in one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.transformer.moe import fused_a2a

from megatron_ampipe.exchange.flex import HybridEPTransport
from megatron_ampipe.exchange.transports import exchange_chunks


class FakeBuffer:
    """Records its calls, and returns what it is given."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def dispatch_with_permute(self, **given: Any) -> tuple[Any, ...]:
        self.calls.append({"name": "dispatch", **given})
        return given["hidden"].clone(), None, None, None, None

    def combine_with_unpermute(self, **given: Any) -> tuple[Any, ...]:
        self.calls.append({"name": "combine", **given})
        return given["hidden"].clone(), given["probs"]


COUNTS = torch.tensor([2, 1])


class FakeManager:
    """Megatron's manager of one chunk: every call counts into the same memory."""

    def __init__(self, number: int, *, fused: bool) -> None:
        self.config = SimpleNamespace(moe_permute_fusion_into_hybridep=fused)
        self.handle: Any = (torch.tensor([number]), "ways")
        self.routing_map, self.pad_multiple = torch.ones(3, 2, dtype=torch.bool), 16
        self._number = number

    def dispatch(self, tokens: torch.Tensor) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        self.tokens_per_expert = COUNTS.copy_(torch.tensor([2 + self._number, 1]))
        self.dispatched_probs = self.token_probs[:, 0]
        return tokens.repeat(2, 1)


@pytest.mark.parametrize("fused", [False, True])
def test_every_chunk_uses_its_own_handle_and_counts(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = FakeBuffer()
    monkeypatch.setattr(fused_a2a, "_hybrid_ep_buffer", buffer)
    chunks = [HybridEPTransport(FakeManager(n, fused=fused)) for n in range(2)]
    tokens, probs = torch.randn(3, 4), torch.rand(3, 2)
    sent = exchange_chunks(chunks, [[tokens, probs]] * 2, combine=False)
    assert [len(output) for output in sent.outputs] == [6, 3] * 2 and not sent.works
    assert [chunk.tokens_per_expert.tolist() for chunk in chunks] == [[2, 1], [3, 1]]
    received = torch.randn(6, 4)
    exchange_chunks(chunks, [[received]] * 2, combine=True)
    exchange_chunks(chunks, [[tokens]] * 2, combine=False)
    back = exchange_chunks(chunks, [[received, torch.rand(6).double()]] * 2, combine=True)
    assert [output.dtype for output in back.outputs] == [torch.float32] * 4
    assert [call["name"] for call in buffer.calls] == ["combine"] * 2 + ["dispatch"] * 2 + ["combine"] * 2
    assert [int(call["handle"][0]) for call in buffer.calls] == [0, 1] * 3
    assert {call["pad_multiple"] for call in buffer.calls} == {16}
    assert [call.get("num_permuted_tokens") for call in buffer.calls] == [None] * 2 + [6] * 2 + [None] * 2
    fuse = {"dispatch": "fuse_permute_dispatch", "combine": "fuse_unpermute_combine"}
    assert all(call.get(fuse[call["name"]], False) is fused for call in buffer.calls)


def test_what_the_lane_uses_is_told() -> None:
    """The lane's stream reads and writes them, so their memory must not be reused before."""
    manager = FakeManager(0, fused=False)
    sent = HybridEPTransport(manager).dispatch([torch.randn(3, 4), torch.rand(3, 2)])
    used = {id(tensor) for tensor in sent.uses}
    assert {id(manager.routing_map), id(manager.handle[0])} <= used
