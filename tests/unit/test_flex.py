"""DeepEP and HybridEP as transports: which calls they get, and who counts the tokens."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.transformer.moe import fused_a2a

from megatron_ampipe.exchange.flex import DeepEPTransport, FlexChunk, HybridEPTransport
from megatron_ampipe.exchange.transports import exchange_chunks
from megatron_ampipe.schedule.features import counts_inside


class FakeBuffer:
    """Returns what it is given."""

    def get_dispatch_layout(self, experts: torch.Tensor, num_experts: int) -> tuple[Any, ...]:
        return torch.tensor([3]), None, torch.tensor([2, 1]), torch.ones(3, 1, dtype=torch.bool), None

    def dispatch(self, tokens: torch.Tensor, handle: Any = None, **given: Any) -> tuple[Any, ...]:
        if handle is not None:
            assert not given
            return tokens.clone(), None, None, None, None, None
        made = ("handle", torch.ones(1))
        self.told = given.get("num_worst_tokens", 0)
        counted = [] if self.told else [2, 1]
        return tokens.clone(), given["topk_idx"].clone(), given["topk_weights"].clone(), counted, made, None

    def combine(self, tokens: torch.Tensor, handle: Any, **given: Any) -> tuple[Any, ...]:
        return tokens.clone(), given.get("topk_weights"), None


def test_what_the_lane_uses_is_told() -> None:
    """The lane's stream reads and writes them, so their memory must not be reused before."""
    transport = DeepEPTransport(FakeBuffer(), torch.tensor([[0]]), num_experts=2)
    sent = transport.dispatch([torch.randn(1, 4), torch.rand(1, 1)])
    used = {id(tensor) for tensor in sent.uses}
    assert {id(transport.received_experts), id(transport._handle[1]), id(transport._experts)} <= used


def test_it_is_told_how_many_rows_arrive() -> None:
    """Otherwise its host waits for its count, and that for the transfers before it."""
    buffer = FakeBuffer()
    told = DeepEPTransport(buffer, torch.tensor([[0]]), num_experts=2, told=(3, [1, 2]))
    told.dispatch([torch.randn(1, 4), torch.rand(1, 1)])
    assert buffer.told == 3 and told.tokens_per_expert == [1, 2]
    # DeepEP takes a 0 for an unknown number.
    none = DeepEPTransport(buffer, torch.tensor([[0]]), num_experts=2, told=(0, [0, 0]))
    sent = none.dispatch([torch.randn(1, 4), torch.rand(1, 1)])
    assert buffer.told == 1 and none.tokens_per_expert == [0, 0]
    assert [len(part) for part in (*sent.outputs, none.received_experts)] == [0, 0, 0]
    assert len(none.dispatch([torch.randn(1, 4)]).outputs[0]) == 0
    assert none.combine(sent.outputs).outputs[0].shape == (1, 4)
    unknown = DeepEPTransport(buffer, torch.tensor([[0]]), num_experts=2)
    unknown.dispatch([torch.randn(1, 4), torch.rand(1, 1)])
    assert buffer.told == 0 and unknown.tokens_per_expert == [2, 1]


@pytest.mark.parametrize(
    ("dispatcher", "backend", "ranks", "tensor", "inside"),
    [
        ("alltoall", "deepep", 64, 1, False),
        ("flex", "deepep", 8, 1, False),
        ("flex", "deepep", 8, 2, True),
        ("flex", "deepep", 16, 1, True),
        ("flex", "hybridep", 2, 1, True),
    ],
)
def test_who_counts(dispatcher: str, backend: str, ranks: int, tensor: int, inside: bool) -> None:
    settings = SimpleNamespace(
        moe_token_dispatcher_type=dispatcher,
        moe_flex_dispatcher_backend=backend,
        expert_model_parallel_size=ranks,
        expert_tensor_parallel_size=tensor,
    )
    assert counts_inside(settings) is inside


def chunks_of(num_layers: int, degree: int, *, config: Any) -> list[Any]:
    """Dispatchers of the chunks of several layers, as one pass makes them."""
    from megatron.core.transformer.moe import token_dispatcher

    chunks = []
    for _ in range(num_layers):
        layer = FlexChunk.__new__(FlexChunk)
        layer.config, layer.tp_size, layer.ep_size, layer.num_local_experts = config, 1, 2, 2
        manager = layer._comm_manager = token_dispatcher._DeepepManager.__new__(
            token_dispatcher._DeepepManager
        )
        manager.num_experts, manager.router_topk, manager.capacity_factor = 4, 2, None
        chunks += [copy.copy(layer) for _ in range(degree)]
    return chunks


def test_no_layer_compiles_what_another_has_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron compiles ``dispatch_preprocess``, whose dispatcher is another object in every chunk."""
    from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher
    from torch._dynamo.testing import CompileCounter

    monkeypatch.setattr(torch._dynamo.config, "disable", False)
    counter = CompileCounter()
    stock = MoEFlexTokenDispatcher.dispatch_preprocess
    compiled = torch.compile(getattr(stock, "_torchdynamo_orig_callable", stock), backend=counter)
    monkeypatch.setattr(MoEFlexTokenDispatcher, "dispatch_preprocess", compiled)
    config = SimpleNamespace(
        moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep",
        expert_model_parallel_size=2, expert_tensor_parallel_size=1,
    )  # fmt: skip
    degree, found = 4, []
    for number, chunk in enumerate(chunks_of(3, degree, config=config)):
        rows = (8, 8, 7, 9)[number % degree]
        probs = torch.rand(rows, 4, requires_grad=True)
        hidden = torch.randn(rows, 1, 16, requires_grad=True).clone()
        tokens, chosen = chunk.dispatch_preprocess(hidden, probs > 0.5, probs.softmax(1))
        assert tokens.shape == (rows, 16) and chosen.shape == (rows, 2)
        found.append(counter.frame_count)
    # Once for the first number of rows, and once for any.
    assert found == [1, 1] + [2] * (len(found) - 2)


class FakeHybridBuffer:
    """Records its calls, and returns what it is given."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def dispatch_with_permute(self, **given: Any) -> tuple[Any, ...]:
        self.calls.append(given)
        return given["hidden"].clone(), None, None, None, None

    def combine_with_unpermute(self, **given: Any) -> tuple[Any, ...]:
        self.calls.append(given)
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
    buffer = FakeHybridBuffer()
    monkeypatch.setattr(fused_a2a, "_hybrid_ep_buffer", buffer)
    chunks = [HybridEPTransport(FakeManager(n, fused=fused)) for n in range(2)]
    tokens, probs = torch.randn(3, 4), torch.rand(3, 2)
    sent = exchange_chunks(chunks, [[tokens, probs]] * 2, combine=False)
    assert [len(output) for output in sent.outputs] == [6, 3] * 2 and not sent.works
    assert [chunk.tokens_per_expert.tolist() for chunk in chunks] == [[2, 1], [3, 1]]
    exchange_chunks(chunks, [[tokens]] * 2, combine=False)
    back = exchange_chunks(chunks, [[torch.randn(6, 4), torch.rand(6).double()]] * 2, combine=True)
    assert [output.dtype for output in back.outputs] == [torch.float32] * 4
    assert [int(call["handle"][0]) for call in buffer.calls] == [0, 1] * 2
    assert {call["pad_multiple"] for call in buffer.calls} == {16}
    assert [call.get("num_permuted_tokens") for call in buffer.calls] == [6] * 2 + [None] * 2
    fuse = ["fuse_permute_dispatch"] * 2 + ["fuse_unpermute_combine"] * 2
    assert [call.get(name, False) for call, name in zip(buffer.calls, fuse, strict=True)] == [fused] * 4


def test_what_the_lane_uses_of_hybrid_ep_is_told() -> None:
    """The lane's stream reads and writes them, so their memory must not be reused before."""
    manager = FakeManager(0, fused=False)
    sent = HybridEPTransport(manager).dispatch([torch.randn(3, 4), torch.rand(3, 2)])
    used = {id(tensor) for tensor in sent.uses}
    assert {id(manager.routing_map), id(manager.handle[0])} <= used
