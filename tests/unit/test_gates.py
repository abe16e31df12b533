"""Hash layers: which experts an id has, and where the ids come from."""

import argparse
from typing import Any

import pytest
import torch

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.refusals import TOKEN_ID_REFUSALS, refuse_with_token_ids
from megatron_ampipe.layers.gates import TokenIds, hashed_experts

KNOWN = {
    (8, 2, 0): [0, 7, 7, 0, 3, 7, 5, 2, 4, 7, 5, 7],
    (5, 4, 3): [3, 2, 1, 4, 1, 3, 4, 0, 2, 1, 0, 3, 0, 1, 4, 3, 4, 3, 1, 2, 3, 4, 1, 2],
}
"""By number of experts, top-k and salt those of the six ids of a test, computed with Python's own numbers."""


@pytest.mark.parametrize("sizes", KNOWN)
def test_experts_of_an_id_are_known_for_ever(sizes: tuple[int, int, int]) -> None:
    """A training that is continued needs the experts of its beginning: these numbers must never change."""
    num_experts, topk, salt = sizes
    ids = torch.tensor([[0, 1, 2], [50_256, 128_000, 2**31]])
    experts = hashed_experts(ids, num_experts, topk, salt=salt)
    assert experts.shape == (2, 3, topk)
    assert experts.flatten().tolist() == KNOWN[sizes]


class Model(torch.nn.Module):
    """Multiplies; reads the ids in the forward and again in the backward pass, as a recompute does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.source = TokenIds()
        self.seen: list[tuple[str, int]] = []

    def forward(self, input_ids: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        self.seen.append(("forward", int(self.source.rows(1, 1))))
        hidden = self.weight * scale
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self.seen.append(("backward", int(self.source.rows(1, 1)))))
        return hidden * 3


def test_a_backward_pass_sees_the_ids_of_its_forward_pass() -> None:
    model = Model()
    model.source.watch(model)
    first = model(torch.tensor([[1]]))
    second = model(input_ids=torch.tensor([[2]]), scale=1.0)
    first.backward()
    with torch.no_grad():
        model(torch.tensor([[3]]))
    second.backward()
    passes = [("forward", 1), ("forward", 2), ("backward", 1), ("forward", 3), ("backward", 2)]
    assert model.seen == passes


def test_a_model_without_ids_is_refused() -> None:
    model = Model()
    model.source.watch(model)
    with pytest.raises(AssertionError, match="called without input_ids"):
        model(input_ids=None)


SET = {
    "pipeline_model_parallel_size": 2,
    "mtp_num_layers": 1,
    "overlap_moe_expert_parallel_comm": True,
    "cuda_graph_impl": "local",
    "mlp_chunks_for_training": 2,
}
"""A refused value of each row."""


@pytest.mark.parametrize("name", SET)
def test_rows_about_ids_refuse_at_any_degree(name: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    assert flag in {refusal.setting for refusal in TOKEN_ID_REFUSALS} and len(SET) == len(TOKEN_ID_REFUSALS)
    common: dict[str, Any] = {"ampipe_router": "hash", "moe_expert_capacity_factor": 1.0}
    refuse_with_token_ids("hash", argparse.Namespace(**common))
    with pytest.raises(BadInput, match=f"{flag} .*: with --ampipe-router hash, "):
        refuse_with_token_ids("hash", argparse.Namespace(**common | {name: SET[name]}))
