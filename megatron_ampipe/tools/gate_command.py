"""``ampipe gate``: checks router classes for ``--ampipe-router``, on a small router in one process.

docs/gates.md says what a class must promise so that chunks change nothing. ``run`` imports Megatron.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ampipe.block.settings import SHIPPED_GATES
from megatron_ampipe.errors import BadInput, DifferenceFound
from megatron_ampipe.tools import progress

if TYPE_CHECKING:
    from megatron.core.transformer.moe.router import TopKRouter

TOLERANCE = 1e-5
"""Largest difference of a tensor, relative to its largest entry: fp32 in another order of additions."""
_ROWS, _BATCH, _HIDDEN, _EXPERTS, _TOPK, _IDS = 24, 2, 32, 8, 2, 1000
_CUTS = (8, 10, 6)
_SEED = 7
_LOSSES = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
    "moe_aux_loss_coeff": [0.1, 0.1],
    "moe_z_loss_coeff": 0.1,
}
EPILOG = """\
examples:
  ampipe gate my_package.routers:MyRouter     a class that can be imported here
  ampipe gate cosine sigmoid                  gates that AMPipe ships

docs/gates.md explains what is checked. Exit code 4 if a check fails.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``ampipe gate``."""
    known = f"package.module:Class, or one of {', '.join(SHIPPED_GATES)}"
    parser.add_argument("names", nargs="+", metavar="CLASS", help=known)


def run(arguments: argparse.Namespace) -> int:
    """Check every class, print a report, and fail if a class breaks a promise."""
    from megatron_ampipe.launch.flags import import_megatron

    warnings.simplefilter("ignore")
    with progress.shown("ampipe gate: importing Megatron"):
        import_megatron()
    from megatron_ampipe.layers.gates import load_gate

    # The user's modules are found as with "python -m".
    sys.path.insert(0, "")
    gates = {name: load_gate(name) for name in arguments.names}
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch's stub does not export it
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    failed = []
    for name, gate in gates.items():
        try:
            print(f"ok      {name}: {_check(gate)}")
        except (BadInput, DifferenceFound) as error:
            print(f"FAILED  {name}: {error}")
            failed.append(name)
    dist.destroy_process_group()
    if failed:
        raise DifferenceFound(f"{', '.join(failed)}: a check failed, see above.")
    return 0


def _check(gate: type[TopKRouter]) -> str:
    """The report on a class; BadInput or DifferenceFound if it breaks a promise."""
    router = _router(gate)
    probs, routing_map, *_ = _route(router, _hidden())
    if not probs.shape == routing_map.shape == (_ROWS * _BATCH, _EXPERTS) or routing_map.dtype != torch.bool:
        raise DifferenceFound(f"probs and bool routing map must be {_ROWS * _BATCH} x {_EXPERTS}")
    if bool(probs[~routing_map].any()):
        raise DifferenceFound("probs must be 0 where an expert is not chosen")
    for name, parameter in router.named_parameters():
        if parameter.requires_grad and not getattr(parameter, "sequence_parallel", False):
            rule = "is not set to config.sequence_parallel; tensor-parallel ranks would diverge"
            raise DifferenceFound(f"{name}.sequence_parallel {rule}")
    fewest, most = (int(count) for count in torch.aminmax(routing_map.sum(dim=1)))
    report = f"{fewest} to {most} experts per token"
    if not fewest == most == _TOPK:
        report += ", which needs --moe-expert-capacity-factor at degree 1"
    if (reason := getattr(gate, "needs_all_tokens", None)) is not None:
        return f"{report}; not compared in chunks, because {reason}"
    return f"{report}; {_compare_chunks(gate)}"


def _compare_chunks(gate: type[TopKRouter]) -> str:
    """Compare chunks with the whole sequence: outputs, and gradients with all router losses."""
    from megatron_ampipe.layers.router import chunk_router_of

    extended = chunk_router_of(gate)  # type: ignore[arg-type]  # classes are hashable
    whole, chunked = (_router(kind, **_LOSSES) for kind in (gate, extended))
    chunked.load_state_dict(whole.state_dict())
    first, second = (_route(whole, _hidden(), seed=seed)[0] for seed in (1, 2))
    # A chunk draws other random numbers than the whole sequence; an evaluation draws none.
    draws = not torch.equal(first, second)
    for router in (whole, chunked):
        router.train(not draws)
    expected, actual = _step(whole, ()), _step(chunked, _CUTS)
    pairs = {name: (tensor.double(), actual[name].double()) for name, tensor in expected.items()}
    largest = {
        name: float((whole - parts).abs().max() / whole.abs().max().clamp_min(1e-12))
        for name, (whole, parts) in pairs.items()
    }
    worst = max(largest, key=lambda name: largest[name])
    text = f"chunks differ by at most {largest[worst]:.1e}, in the {worst}"
    if largest[worst] > TOLERANCE:
        raise DifferenceFound(f"{text}; if the choice compares tokens, set needs_all_tokens to the reason")
    return text + ", in evaluation: training draws random numbers" * draws


def _hidden() -> Tensor:
    return torch.randn(_ROWS, _BATCH, _HIDDEN, generator=torch.Generator().manual_seed(_SEED))


def _router(kind: type[TopKRouter], **settings: object) -> TopKRouter:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=_HIDDEN,
        num_attention_heads=4,
        num_moe_experts=_EXPERTS,
        moe_router_topk=_TOPK,
        add_bias_linear=False,
        **{"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, **settings},
    )
    # TransformerConfig refuses it without tensor parallelism.
    config.sequence_parallel = True
    group = dist.group.WORLD
    groups = ProcessGroupCollection(tp=group, cp=group, tp_cp=group, tp_dp_cp=group)
    torch.manual_seed(_SEED)
    router = kind(config=config, pg_collection=groups).to("cpu")
    with torch.no_grad():
        for parameter in router.parameters():
            # Values that begin as 0 or as a constant would hide errors.
            parameter.add_(torch.rand_like(parameter) * 0.2)
    router.set_layer_number(1)
    return router


def _route(
    router: TopKRouter, hidden: Tensor, cuts: tuple[int, ...] = (), *, seed: int = _SEED
) -> tuple[Tensor, ...]:
    """Route a sequence, or its chunks: probs and routing map, and for chunks the arguments of the losses."""
    from megatron_ampipe.layers.gates import TokenIdRouter, give_token_ids

    source = give_token_ids(router)
    source.keep(torch.randint(_IDS, (_BATCH, _ROWS), generator=torch.Generator().manual_seed(_SEED)))
    torch.manual_seed(seed)
    if not cuts:
        return tuple(router(hidden))
    block = router.begin_block(_ROWS * _BATCH, per_chunk=False)
    reads_ids = isinstance(router, TokenIdRouter)
    ids_of = source.rows(_ROWS, _BATCH).split(cuts) if reads_ids else [None] * len(cuts)
    routed = [
        router(rows, block=block, chunk=chunk, token_ids=ids_of[chunk])
        for chunk, rows in enumerate(hidden.split(cuts))
    ]
    return *(torch.cat(parts) for parts in zip(*routed, strict=True)), block


def _step(router: TopKRouter, cuts: tuple[int, ...]) -> dict[str, Tensor]:
    """Outputs of a pass, and its gradients if the router trains."""
    hidden = _hidden().requires_grad_(router.training)
    with torch.set_grad_enabled(router.training):
        probs, routing_map, *rest = _route(router, hidden, cuts)
        pairs = [(probs, torch.linspace(-1, 1, probs.numel()).view_as(probs))]
        if cuts and router.training:
            pairs.append((router.block_losses(*rest), torch.zeros(())))
    for output, gradient in pairs:
        # An evaluation, or a fixed choice with fixed weights, has no history.
        if output.requires_grad:
            output.backward(gradient, retain_graph=True)
    tensors = {"probs": probs.detach(), "routing map": routing_map}
    for name, tensor in (("the input", hidden), *router.named_parameters()):
        tensors[f"gradient of {name}"] = torch.zeros(()) if tensor.grad is None else tensor.grad
    return tensors
