"""DeepEP as a transport: which calls it gets, and that a block with it exchanges no counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_ampipe.runtime.collectives import exchange_chunks
from megatron_ampipe.runtime.deep_ep_transport import DeepEPTransport
from megatron_ampipe.schedule import SCHEDULE_NAMES, BlockFeatures, build, check


class FakeBuffer:
    """Records its calls, and returns what it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def get_dispatch_layout(self, experts: torch.Tensor, num_experts: int) -> tuple[Any, ...]:
        self.calls.append(("layout", num_experts))
        return torch.tensor([3]), None, torch.tensor([2, 1]), torch.ones(3, 1, dtype=torch.bool), None

    def dispatch(self, tokens: torch.Tensor, handle: Any = None, **given: Any) -> tuple[Any, ...]:
        self.calls.append(("dispatch", handle))
        if handle is not None:
            assert not given
            return tokens.clone(), None, None, None, None, None
        made = (f"handle {len(self.calls)}", torch.ones(1))
        return tokens.clone(), given["topk_idx"].clone(), given["topk_weights"].clone(), [2, 1], made, None

    def combine(self, tokens: torch.Tensor, handle: Any, **given: Any) -> tuple[Any, ...]:
        self.calls.append(("combine", handle, *given))
        return tokens.clone(), given.get("topk_weights"), None


def test_every_chunk_uses_its_own_handle() -> None:
    buffer = FakeBuffer()
    experts = torch.tensor([[0], [0], [1]])
    chunks = [DeepEPTransport(buffer, experts, num_experts=2) for _ in range(2)]
    tokens, probs = torch.randn(3, 4), torch.rand(3, 1)
    sent = exchange_chunks(chunks, [[tokens, probs]] * 2, combine=False)
    assert len(sent.outputs) == 4 and not sent.works
    exchange_chunks(chunks, [[tokens]] * 2, combine=True)
    exchange_chunks(chunks, [[tokens]] * 2, combine=False)
    back = exchange_chunks(chunks, [[tokens, probs.double()]] * 2, combine=True)
    assert [output.dtype for output in back.outputs] == [torch.float32] * 4
    handles = [call[1][0] for call in buffer.calls if call[0] == "combine"]
    assert handles == ["handle 2", "handle 4"] * 2
    assert buffer.calls[4:8] == [
        (name, chunk._handle) for name in ("combine", "dispatch") for chunk in chunks
    ]


def test_what_the_lane_uses_is_told() -> None:
    """The lane's stream reads and writes them, so their memory must not be reused before."""
    transport = DeepEPTransport(FakeBuffer(), torch.tensor([[0]]), num_experts=2)
    sent = transport.dispatch([torch.randn(1, 4), torch.rand(1, 1)])
    used = {id(tensor) for tensor in sent.uses}
    assert {id(transport.received_experts), id(transport._handle[1]), id(transport._experts)} <= used


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
@pytest.mark.parametrize("degree", [1, 3])
def test_no_counts_are_exchanged(name: str, degree: int) -> None:
    features = BlockFeatures(flex=True, losses=True, chunked_qkv=True)
    schedule = build(name, degree=degree, features=features)
    check(schedule, [features])
    kinds = {stage.kind.name for stage in schedule.forward.stages}
    assert "dispatch" in kinds and "counts" not in kinds
