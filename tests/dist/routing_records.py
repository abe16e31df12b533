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

    routers = {name: part for name, part in layer.named_modules() if isinstance(part, TopKRouter)}
    handles = []
    for number, (name, router) in enumerate(routers.items()):
        replay = router.router_replay
        replay.set_router_replay_action(RouterReplayAction(case.replay))
        if case.replay != "record":
            replay.set_target_indices(_prescribed(case, number))
        handles.append(router.register_forward_hook(_look_on(found, name)))
    yield found
    for handle in handles:
        handle.remove()
    for name, router in routers.items():
        if case.replay == "record":
            found[f"record of {name}"] = router.router_replay.get_recorded_indices()
        router.router_replay.clear_indices()
        router.router_replay.clear_router_replay_action()


def _prescribed(case: Case, number: int) -> torch.Tensor:
    """Experts that no router would choose: they follow one another, token by token."""
    ranks = case.parallel.get("tensor_model_parallel_size", 1) * case.parallel.get("context_parallel_size", 1)
    num_tokens, topk = case.sequence_length // ranks * case.batch, case.model["moe_router_topk"]
    first = torch.arange(num_tokens).unsqueeze(1) * 7 // 3 + number
    return (first + torch.arange(topk)) % 4


def _look_on(found: dict[str, torch.Tensor], name: str) -> Any:
    def hook(module: Any, inputs: Any, outputs: Any) -> None:
        assert f"hook of {name}" not in found, "a hook is called once for a pass"
        probs, routing_map = outputs
        found[f"hook of {name}"] = torch.cat([probs, routing_map.float()], dim=-1).detach()
        found[f"hook of {name}, rows"] = inputs[0].detach().flatten(0, 1)

    return hook
