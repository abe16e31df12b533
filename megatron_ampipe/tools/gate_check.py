"""Tests what a router class must promise so that chunks change nothing, on a small router.

The promises are in docs/gates.md. Needs Megatron imported and a process group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_ampipe.errors import BadInput
from megatron_ampipe.layers.gates import TokenIdRouter, give_token_ids
from megatron_ampipe.layers.router import chunk_router_of

TOLERANCE = 1e-5
"""Largest difference of a tensor, relative to its largest entry: fp32 in another order of additions."""
_ROWS, _BATCH, _HIDDEN = 24, 2, 32
_CUTS = (8, 10, 6)
_SEED = 7
_IDS = 1000
"""Number of token ids."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        name: What was checked.
        holds: Whether the promise is kept.
        text: What was found.
    """

    name: str
    holds: bool
    text: str


def check_gate(gate: type[TopKRouter], *, num_experts: int, topk: int) -> Iterator[Finding]:
    """Check a class; a check that cannot run after a failed one is left out.

    Args:
        gate: The class.
        num_experts: Experts of the router that is built.
        topk: Experts per token.
    """
    check = _GateCheck(gate, num_experts=num_experts, topk=topk)
    shape = check.shapes()
    yield shape
    if not shape.holds:
        return
    for name, run in (
        ("one token at a time", check.tokens),
        ("chunks", check.chunks),
        ("training step", check.losses),
        ("gradients", check.gradients),
        ("sequence parallelism", check.marks),
    ):
        try:
            yield Finding(name, *run())
        except BadInput as error:
            yield Finding(name, False, f"{error.rule}. {error.remedy}")


class _GateCheck:
    def __init__(self, gate: type[TopKRouter], *, num_experts: int, topk: int) -> None:
        self._gate, self._experts, self._topk = gate, num_experts, topk
        self._device = "cuda" if torch.cuda.is_available() and dist.get_backend() == "nccl" else "cpu"
        generator = torch.Generator().manual_seed(_SEED)
        self._hidden = torch.randn(_ROWS, _BATCH, _HIDDEN, generator=generator).to(self._device)
        self._gradient = torch.randn(_ROWS * _BATCH, num_experts, generator=generator).to(self._device)
        self._ids = torch.randint(_IDS, (_BATCH, _ROWS), generator=generator).to(self._device)

    def shapes(self) -> Finding:
        """Whether the outputs are those of Megatron's router."""
        name, shape = "shapes", (_ROWS * _BATCH, self._experts)
        probs, routing_map = _route(self._router(), self._hidden)
        if tuple(probs.shape) != shape or tuple(routing_map.shape) != shape:
            found = f"{tuple(probs.shape)} and {tuple(routing_map.shape)}"
            return Finding(name, False, f"probs and routing map are {found}, and must be {shape}")
        if routing_map.dtype is not torch.bool:
            return Finding(name, False, f"the routing map is {routing_map.dtype}, and must be bool")
        if not bool(torch.isfinite(probs).all()) or bool((probs[~routing_map] != 0).any()):
            return Finding(name, False, "probs must be finite, and 0 where an expert is not chosen")
        counts = routing_map.sum(dim=1)
        if int(counts.min()) == int(counts.max()) == self._topk:
            return Finding(name, True, f"every token has {self._topk} experts")
        found = f"a token has {int(counts.min())} to {int(counts.max())} experts"
        return Finding(name, True, f"{found}; at degree 1 Megatron then needs --moe-expert-capacity-factor")

    def tokens(self) -> tuple[bool, str]:
        """Whether a change of one token leaves the choice for all others as it was."""
        router = self._router()
        expected = _route(router, self._hidden)
        reason = getattr(self._gate, "needs_all_tokens", None)
        for row in (0, _ROWS // 2, _ROWS - 1):
            changed, ids = self._hidden.clone(), self._ids.clone()
            changed[row, 0] = 3 - 2 * changed[row, 0]
            ids[0, row] = _IDS - 1 - ids[0, row]
            found = _route(_told(router, ids), changed)
            others = torch.arange(_ROWS * _BATCH, device=changed.device) != row * _BATCH
            differs = (found[1] != expected[1]) | ((found[0] - expected[0]).abs() > TOLERANCE)
            wrong = differs.any(dim=1) & others
            if not bool(wrong.any()):
                continue
            if reason is not None:
                return True, f"not so, and the class says why: {reason}"
            other = int(wrong.nonzero()[0, 0]) // _BATCH
            rule = f"a change of token {row} changes the choice for token {other}"
            return False, f"{rule}; if that is meant, set needs_all_tokens to the reason"
        if reason is not None:
            return False, "the class sets needs_all_tokens, but no token depends on another"
        return True, "a change of one token changes the choice for that token alone"

    def chunks(self) -> tuple[bool, str]:
        """Whether an evaluation in chunks gives what the class gives for the whole sequence."""
        if getattr(self._gate, "needs_all_tokens", None) is not None:
            return True, "left out: the class compares tokens with each other"
        whole, chunked = self._pair(training=False)
        with torch.no_grad():
            expected, found = _route(whole, self._hidden), _route_chunks(chunked, self._hidden)[:2]
        largest = max(_difference(a, b) for a, b in zip(expected, found, strict=True))
        return largest <= TOLERANCE, f"largest difference from the whole sequence: {largest:.1e}"

    def losses(self) -> tuple[bool, str]:
        """Whether losses and gradients of a training step in chunks are those of the whole sequence."""
        if getattr(self._gate, "needs_all_tokens", None) is not None:
            return True, "left out: the class compares tokens with each other"
        whole, chunked = self._pair(training=True)
        draws = not torch.equal(
            _route(whole, self._hidden)[0], _route(whole, self._hidden, seed=_SEED + 1)[0]
        )
        expected, found = (self._step(router, in_chunks=router is chunked) for router in (whole, chunked))
        largest = {key: _difference(expected[key], found[key]) for key in expected}
        worst = max(largest, key=lambda key: largest[key])
        text = f"largest difference {largest[worst]:.1e}, of the {worst}"
        if largest[worst] > TOLERANCE and draws:
            return True, f"{text}: it draws random numbers, and a chunk draws other ones"
        return largest[worst] <= TOLERANCE, text

    def gradients(self) -> tuple[bool, str]:
        """Whether the input and every parameter receive a gradient."""
        router = self._pair(training=True)[0]
        if not _route(router, self._hidden)[0].requires_grad and not list(router.parameters()):
            return True, "none: the choice is fixed, and there is nothing to train"
        found = self._step(router, in_chunks=False)
        missing = [name for name, value in found.items() if "gradient" in name and not bool(value.any())]
        if missing:
            return False, f"zero or none: {', '.join(missing)}"
        return True, "the input and every trainable parameter receive one"

    def marks(self) -> tuple[bool, str]:
        """Whether parameters have Megatron's mark for sequence parallelism."""
        router = self._router(sequence_parallel=True)
        missing = [
            name
            for name, parameter in router.named_parameters()
            if parameter.requires_grad and not getattr(parameter, "sequence_parallel", False)
        ]
        if missing:
            rule = (
                f"parameter.sequence_parallel = config.sequence_parallel is not set for {', '.join(missing)}"
            )
            return False, f"{rule}: tensor-parallel ranks would diverge"
        return True, "every parameter is marked"

    def _router(
        self, kind: type[TopKRouter] | None = None, *, sequence_parallel: bool = False, **settings: Any
    ) -> Any:
        """A router of a class, by default the one that is checked."""
        config = TransformerConfig(
            num_layers=1,
            hidden_size=_HIDDEN,
            num_attention_heads=4,
            num_moe_experts=self._experts,
            moe_router_topk=self._topk,
            moe_router_pre_softmax=self._topk == 1,
            add_bias_linear=False,
            **{"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, **settings},
        )
        # TransformerConfig refuses it without tensor parallelism.
        config.sequence_parallel = sequence_parallel
        group = dist.group.WORLD
        groups = ProcessGroupCollection(tp=group, cp=group, tp_cp=group, tp_dp_cp=group)
        torch.manual_seed(_SEED)
        router = (kind or self._gate)(config=config, pg_collection=groups).to(self._device)
        with torch.no_grad():
            for parameter in router.parameters():
                # Values that begin as 0 or as a constant would hide errors.
                parameter.add_(torch.rand_like(parameter) * 0.2)
        router.set_layer_number(1)
        return _told(router, self._ids)

    def _pair(self, *, training: bool) -> tuple[Any, Any]:
        """The class, and the class that routes chunks, with the same parameters and all losses."""
        settings = {
            "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
            "moe_aux_loss_coeff": [0.1, 0.1],
            "moe_z_loss_coeff": 0.1,
        }
        pair = [self._router(kind, **settings) for kind in (self._gate, chunk_router_of(self._gate))]
        pair[1].load_state_dict(pair[0].state_dict())
        return pair[0].train(training), pair[1].train(training)

    def _step(self, router: Any, *, in_chunks: bool) -> dict[str, Tensor]:
        """Outputs and gradients of one training step."""
        hidden = self._hidden.clone().requires_grad_()
        if in_chunks:
            probs, routing_map, packed, block = _route_chunks(router, hidden)
            pairs = [(probs, self._gradient), (router.block_losses(packed, block), torch.zeros(()))]
        else:
            probs, routing_map = _route(router, hidden)
            pairs = [(probs, self._gradient)]
        # A fixed choice with fixed weights has no history.
        if pairs := [pair for pair in pairs if pair[0].requires_grad]:
            torch.autograd.backward(*zip(*pairs, strict=True))
        none = torch.zeros((), device=probs.device)
        found = {"probs": probs.detach(), "routing map": routing_map}
        found["gradient of the input"] = none if hidden.grad is None else hidden.grad
        for name, parameter in router.named_parameters():
            if parameter.requires_grad:
                found[f"gradient of {name}"] = none if parameter.grad is None else parameter.grad
        return found


def _told(router: Any, ids: Tensor) -> Any:
    """The same router, which reads these ids ``[B, R]`` if it reads any."""
    give_token_ids(router).keep(ids)
    return router


def _route(router: Any, hidden: Tensor, *, seed: int = _SEED) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    probs, routing_map = router(hidden)
    return probs, routing_map


def _route_chunks(router: Any, hidden: Tensor) -> tuple[Any, ...]:
    torch.manual_seed(_SEED)
    block = router.begin_block(hidden.shape[0] * hidden.shape[1], per_chunk=False)
    ids: list[Any] = [None] * len(_CUTS)
    if isinstance(router, TokenIdRouter):
        ids = list(router.id_source.rows(*hidden.shape[:2]).split(_CUTS))
    routed = [
        router(rows, block=block, chunk=index, token_ids=ids[index])
        for index, rows in enumerate(hidden.split(_CUTS))
    ]
    return *(torch.cat(parts) for parts in zip(*routed, strict=True)), block


def _difference(expected: Tensor, found: Tensor) -> float:
    expected, found = expected.double(), found.double()
    return float((expected - found).abs().max() / expected.abs().max().clamp_min(1e-12))
