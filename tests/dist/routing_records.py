"""What Megatron's routing replay and the forward hook of a router get, for the comparison with stock."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

from tests.dist.cases import Case


@contextmanager
def watched(layer: torch.nn.Module, case: Case) -> Iterator[dict[str, torch.Tensor]]:
    """Within it the routers record, or do as they are told; afterwards the dictionary has what was seen."""
    found: dict[str, torch.Tensor] = {}
    if case.replay is None:
        yield found
        return
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    routers = dict(_routers(layer))
    handles = []
    for number, (name, router) in enumerate(routers.items()):
        replay = router.router_replay
        replay.set_router_replay_action(RouterReplayAction(case.replay))
        if case.replay != "record":
            replay.set_target_indices(_prescribed(case, number))
        handles.append(router.register_forward_hook(_look_on(found, name, recomputes=case.recompute > 0)))
    yield found
    for handle in handles:
        handle.remove()
    for name, router in routers.items():
        if case.replay == "record":
            found[f"record of {name}"] = router.router_replay.get_recorded_indices()
        router.router_replay.clear_indices()
        router.router_replay.clear_router_replay_action()


@contextmanager
def in_micro_batches(layer: torch.nn.Module, case: Case) -> Iterator[None]:
    """Within it, :func:`prescribe` and :func:`recorded` are called for each micro-batch."""
    yield
    for _, router in _routers(layer):
        if case.replay is not None:
            router.router_replay.clear_indices()
            router.router_replay.clear_router_replay_action()


def prescribe(layer: torch.nn.Module, case: Case, microbatch: int) -> None:
    """Let the routers record the choices of a micro-batch, or give them other choices for each one."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    for number, (_, router) in enumerate(_routers(layer)):
        if case.replay == "record":
            router.router_replay.set_router_replay_action(RouterReplayAction.RECORD)
        elif case.replay is not None:
            router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            router.router_replay.set_target_indices(_prescribed(case, number + microbatch))


def prescribe_again(layer: torch.nn.Module, case: Case) -> None:
    """Before a backward pass: with ``replay_backward``, routers that run again take what they had."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    for _, router in _routers(layer):
        if case.replay == "replay_backward":
            router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)


def waiting(layer: torch.nn.Module) -> list[int]:
    """How many choices each router has for later backward passes."""
    return [len(router.router_replay.replay_backward_list) for _, router in _routers(layer)]


def recorded(layer: torch.nn.Module, case: Case, microbatch: int) -> dict[str, torch.Tensor]:
    """What the routers have recorded, right after the forward pass of a micro-batch."""
    if case.replay != "record":
        return {}
    return {
        f"record {microbatch} of {name}": router.router_replay.get_recorded_indices()
        for name, router in _routers(layer)
    }


def _routers(layer: torch.nn.Module) -> list[tuple[str, Any]]:
    return [(name, part) for name, part in layer.named_modules() if isinstance(part, TopKRouter)]


def _prescribed(case: Case, number: int) -> torch.Tensor:
    """Experts that no router would choose: they follow one another, token by token."""
    ranks = case.parallel.get("tensor_model_parallel_size", 1) * case.parallel.get("context_parallel_size", 1)
    num_tokens, topk = case.sequence_length // ranks * case.batch, case.model["moe_router_topk"]
    first = torch.arange(num_tokens).unsqueeze(1) * 7 // 3 + number
    return (first + torch.arange(topk)) % 4


def _look_on(found: dict[str, torch.Tensor], name: str, *, recomputes: bool) -> Any:
    def hook(module: Any, inputs: Any, outputs: Any) -> None:
        probs, routing_map = outputs
        seen = {
            f"hook of {name}": torch.cat([probs, routing_map.float()], dim=-1).detach(),
            f"hook of {name}, rows": inputs[0].detach().flatten(0, 1),
        }
        if f"hook of {name}" in found:
            assert recomputes, "a hook is called once for a pass"
            assert all(torch.equal(found[key], value) for key, value in seen.items())
        found.update(seen)

    return hook
