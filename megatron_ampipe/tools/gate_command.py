"""``ampipe gate``: checks router classes for ``--ampipe-router``, on a small router in one process.

docs/gates.md has what a class must promise so that chunks change nothing. Megatron is imported by ``run``.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ampipe.block.named_values import SHIPPED_GATES
from megatron_ampipe.errors import BadInput, DifferenceFound
from megatron_ampipe.files.inputs import at_least

if TYPE_CHECKING:
    from megatron.core.transformer.moe.router import TopKRouter

TOLERANCE = 1e-5
"""Largest difference of a tensor, relative to its largest entry: fp32 in another order of additions."""
_ROWS, _BATCH, _HIDDEN = 24, 2, 32
_CUTS = (8, 10, 6)
_SEED = 7
_IDS = 1000
"""Number of token ids."""
_EPILOG = """\
examples:
  ampipe gate my_package.routers:MyRouter     a class that can be imported here
  ampipe gate cosine sigmoid                  gates that AMPipe ships
  ampipe gate mine:Router --experts 64 --topk 6

Checks on one process that the choice for a token depends on that token alone, that chunks give the result of
the whole sequence with all router losses and gradients, and that every parameter has its mark for sequence
parallelism. docs/gates.md explains each. Exit code 4 if a check fails.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``ampipe gate``."""
    parser.epilog = _EPILOG
    shipped = ", ".join(SHIPPED_GATES)
    parser.add_argument(
        "names", nargs="+", metavar="CLASS", help=f"package.module:Class, or one of {shipped}"
    )
    parser.add_argument("--experts", type=at_least(1), default=8, metavar="N", help="experts (default: 8)")
    parser.add_argument(
        "--topk", type=at_least(1), default=2, metavar="N", help="experts per token (default: 2)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Check every class, print what was found, and fail if a promise is not kept.

    Raises:
        BadInput: there is no such class.
        DifferenceFound: a check failed.
    """
    if arguments.topk > arguments.experts:
        arguments.refuse(f"--topk {arguments.topk} is above --experts {arguments.experts}")
    from megatron_ampipe.launch.flags import import_megatron

    # Some libraries print to standard output when they are imported.
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(sys.stderr):
        import_megatron()
    from megatron_ampipe.layers.gates import load_gate

    # Modules of the user are found as by "python -m".
    sys.path.insert(0, "")
    gates = {name: load_gate(name) for name in arguments.names}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        failed = [name for name, gate in gates.items() if not _holds(name, gate, arguments)]
    finally:
        dist.destroy_process_group()
    if failed:
        raise DifferenceFound(f"{', '.join(failed)}: a check failed, see above.")
    return 0


def _holds(name: str, gate: type[TopKRouter], arguments: argparse.Namespace) -> bool:
    """Check a class and print what was found; checks that cannot run after a failed one are left out."""
    print(name)
    check = _GateCheck(gate, num_experts=arguments.experts, topk=arguments.topk)
    all_hold = True
    for title, part in (
        ("shapes", check.shapes),
        ("one token at a time", check.tokens),
        ("chunks", check.chunks),
        ("sequence parallelism", check.marks),
    ):
        try:
            holds, text = part()
        except BadInput as error:
            holds, text = False, f"{error.rule}. {error.remedy}"
        print(f"  {'ok' if holds else 'FAILED':6}  {title}: {text}")
        all_hold = all_hold and holds
        if title == "shapes" and not holds:
            break
    return all_hold


class _GateCheck:
    """The checks of one class; each returns whether the promise is kept, and what was found."""

    def __init__(self, gate: type[TopKRouter], *, num_experts: int, topk: int) -> None:
        self._gate, self._experts, self._topk = gate, num_experts, topk
        self._reason = getattr(gate, "needs_all_tokens", None)
        generator = torch.Generator().manual_seed(_SEED)
        self._hidden = torch.randn(_ROWS, _BATCH, _HIDDEN, generator=generator)
        self._gradient = torch.randn(_ROWS * _BATCH, num_experts, generator=generator)
        self._ids = torch.randint(_IDS, (_BATCH, _ROWS), generator=generator)

    def shapes(self) -> tuple[bool, str]:
        """Whether the outputs are those of Megatron's router."""
        shape = (_ROWS * _BATCH, self._experts)
        probs, routing_map = _route(self._router(), self._hidden)
        if tuple(probs.shape) != shape or tuple(routing_map.shape) != shape:
            found = f"{tuple(probs.shape)} and {tuple(routing_map.shape)}"
            return False, f"probs and routing map are {found}, and must be {shape}"
        if routing_map.dtype is not torch.bool:
            return False, f"the routing map is {routing_map.dtype}, and must be bool"
        if not bool(torch.isfinite(probs).all()) or bool((probs[~routing_map] != 0).any()):
            return False, "probs must be finite, and 0 where an expert is not chosen"
        fewest, most = (int(count) for count in torch.aminmax(routing_map.sum(dim=1)))
        if fewest == most == self._topk:
            return True, f"every token has {self._topk} experts"
        found = f"a token has {fewest} to {most} experts"
        return True, f"{found}; at degree 1 Megatron then needs --moe-expert-capacity-factor"

    def tokens(self) -> tuple[bool, str]:
        """Whether a change of one token leaves the choice for all others as it was."""
        router = self._router()
        expected = _route(router, self._hidden)
        for row in (0, _ROWS // 2, _ROWS - 1):
            changed, ids = self._hidden.clone(), self._ids.clone()
            changed[row, 0] = 3 - 2 * changed[row, 0]
            ids[0, row] = _IDS - 1 - ids[0, row]
            found = _route(_told(router, ids), changed)
            others = torch.arange(_ROWS * _BATCH) != row * _BATCH
            differs = (found[1] != expected[1]) | ((found[0] - expected[0]).abs() > TOLERANCE)
            wrong = differs.any(dim=1) & others
            if not bool(wrong.any()):
                continue
            if self._reason is not None:
                return True, f"not so, and the class says why: {self._reason}"
            other = int(wrong.nonzero()[0, 0]) // _BATCH
            rule = f"a change of token {row} changes the choice for token {other}"
            return False, f"{rule}; if that is meant, set needs_all_tokens to the reason"
        if self._reason is not None:
            return False, "the class sets needs_all_tokens, but no token depends on another"
        return True, "a change of one token changes the choice for that token alone"

    def chunks(self) -> tuple[bool, str]:
        """Whether chunks give what the class gives for the whole sequence, with losses and gradients."""
        if self._reason is not None:
            return True, "left out: the class compares tokens with each other"
        for training in (False, True):
            whole, chunked = self._pair(training=training)
            first, second = (_route(whole, self._hidden, seed=_SEED + more)[0] for more in (0, 1))
            draws = training and not torch.equal(first, second)
            expected, found = (self._step(router, in_chunks=router is chunked) for router in (whole, chunked))
            largest = {key: _difference(expected[key], found[key]) for key in expected}
            worst = max(largest, key=lambda key: largest[key])
            text = f"largest difference {largest[worst]:.1e}, of the {worst}"
            if largest[worst] > TOLERANCE:
                return draws, text + ": it draws random numbers, and a chunk draws other ones" * draws
        return True, text

    def marks(self) -> tuple[bool, str]:
        """Whether parameters have Megatron's mark for sequence parallelism."""
        router = self._router(sequence_parallel=True)
        missing = [
            name
            for name, parameter in router.named_parameters()
            if parameter.requires_grad and not getattr(parameter, "sequence_parallel", False)
        ]
        if missing:
            rule = "parameter.sequence_parallel = config.sequence_parallel is not set for"
            return False, f"{rule} {', '.join(missing)}: tensor-parallel ranks would diverge"
        return True, "every parameter is marked"

    def _router(
        self, kind: type[TopKRouter] | None = None, *, sequence_parallel: bool = False, **settings: Any
    ) -> Any:
        """A router of a class, by default the one that is checked."""
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.transformer_config import TransformerConfig

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
        router = (kind or self._gate)(config=config, pg_collection=groups).to("cpu")
        with torch.no_grad():
            for parameter in router.parameters():
                # Values that begin as 0 or as a constant would hide errors.
                parameter.add_(torch.rand_like(parameter) * 0.2)
        router.set_layer_number(1)
        return _told(router, self._ids)

    def _pair(self, *, training: bool) -> tuple[Any, Any]:
        """The class, and the class that routes chunks, with the same parameters and all losses."""
        from megatron_ampipe.layers.router import chunk_router_of

        settings = {
            "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
            "moe_aux_loss_coeff": [0.1, 0.1],
            "moe_z_loss_coeff": 0.1,
        }
        pair = [self._router(kind, **settings) for kind in (self._gate, chunk_router_of(self._gate))]
        pair[1].load_state_dict(pair[0].state_dict())
        return pair[0].train(training), pair[1].train(training)

    def _step(self, router: Any, *, in_chunks: bool) -> dict[str, Tensor]:
        """Outputs of a pass, and its gradients where the router trains."""
        hidden = self._hidden.clone().requires_grad_(router.training)
        with torch.set_grad_enabled(router.training):
            probs, routing_map, *rest = (_route_chunks if in_chunks else _route)(router, hidden)
            pairs = [(probs, self._gradient)]
            if in_chunks and router.training:
                pairs.append((router.block_losses(*rest), torch.zeros(())))
        # An evaluation, or a fixed choice with fixed weights, has no history.
        if pairs := [pair for pair in pairs if pair[0].requires_grad]:
            torch.autograd.backward(*zip(*pairs, strict=True))
        found = {"probs": probs.detach(), "routing map": routing_map}
        for name, tensor in (("the input", hidden), *router.named_parameters()):
            found[f"gradient of {name}"] = torch.zeros(()) if tensor.grad is None else tensor.grad
        return found


def _told(router: Any, ids: Tensor) -> Any:
    """The same router, which reads these ids ``[B, R]`` if it reads any."""
    from megatron_ampipe.layers.gates import give_token_ids

    give_token_ids(router).keep(ids)
    return router


def _route(router: Any, hidden: Tensor, *, seed: int = _SEED) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    probs, routing_map = router(hidden)
    return probs, routing_map


def _route_chunks(router: Any, hidden: Tensor) -> tuple[Any, ...]:
    from megatron_ampipe.layers.gates import TokenIdRouter

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
