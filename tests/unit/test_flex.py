"""DeepEP and HybridEP as transports: which calls they get, and what is compiled once."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")


from megatron_ampipe.errors import BadInput
from megatron_ampipe.exchange.flex import DeepEPTransport, FlexChunk, HybridEPTransport
from megatron_ampipe.exchange.nccl_ep import NCCLEPTransport


class FakeBuffer:
    """Returns what it is given; the stand-in of tests/deep_ep_standin.py checks what a call says."""

    def get_dispatch_layout(self, experts: torch.Tensor, num_experts: int) -> tuple[Any, ...]:
        return torch.tensor([3]), None, torch.tensor([2, 1]), torch.ones(3, 1, dtype=torch.bool), None

    def dispatch(self, tokens: torch.Tensor, **given: Any) -> tuple[Any, ...]:
        made = ("handle", torch.ones(1))
        return tokens.clone(), given["topk_idx"].clone(), given["topk_weights"].clone(), [2, 1], made, None


def test_what_the_lane_uses_is_told() -> None:
    """The lane's stream reads and writes them, so their memory must not be reused before."""
    transport = DeepEPTransport(FakeBuffer(), torch.tensor([[0]]), num_experts=2)
    sent = transport.dispatch([torch.randn(1, 4), torch.rand(1, 1)])
    used = {id(tensor) for tensor in sent.uses}
    assert {id(transport.received_experts), id(transport._handle[1]), id(transport._experts)} <= used
    manager = FakeManager()
    sent = HybridEPTransport(manager).dispatch([torch.randn(3, 4), torch.rand(3, 2)])
    assert {id(manager.routing_map), id(manager.handle[0])} <= {id(tensor) for tensor in sent.uses}


class FakeManager:
    """Megatron's manager of one chunk."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(moe_permute_fusion_into_hybridep=False)
        self.handle: Any = (torch.tensor([0]), "ways")
        self.routing_map, self.pad_multiple = torch.ones(3, 2, dtype=torch.bool), 16

    def dispatch(self, tokens: torch.Tensor) -> torch.Tensor:
        self.tokens_per_expert = torch.tensor([2, 1])
        self.dispatched_probs = self.token_probs[:, 0]
        return tokens.repeat(2, 1)


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


def test_nccl_eps_context_is_made_for_all_chunks_and_for_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.moe import fused_a2a

    library, made = SimpleNamespace(_BOOTSTRAPPED=False), []
    monkeypatch.setattr(fused_a2a, "te_ep", library, raising=False)
    monkeypatch.setattr(NCCLEPTransport, "_context_tokens", 0)
    manager: Any = SimpleNamespace(num_local_tokens=8)

    def bootstrap() -> None:
        made.append(manager.num_local_tokens)
        library._BOOTSTRAPPED = True

    manager._ensure_bootstrap = bootstrap
    NCCLEPTransport(manager, 32)._make_context()
    # The sizes of a later pass are those of the context, too.
    NCCLEPTransport(manager, 64)._make_context()
    assert made == [32, 32] and manager.num_local_tokens == 8
    manager.num_local_tokens = 48
    with pytest.raises(BadInput, match="a chunk has 48 tokens, and NCCL EP's only context was made for 32"):
        NCCLEPTransport(manager, 96)._make_context()
