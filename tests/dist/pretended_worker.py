"""Runs a block with emulated ranks: Megatron's layer, AMPipe's, and a reference layer.

One process for all cases, which are passed on the command line as JSON. See ``tools.measuring.emulation``.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import traceback
from typing import Any

import torch
from torch import Tensor

from tests.dist.blocks import differences
from tests.dist.worker import report

RANKS = 4
FIGURES: dict[str, Any] = {
    "sequence_length": 48, "batch": 2, "hidden": 32, "heads": 4, "ffn": 64, "dtype": "fp32",
}  # fmt: skip
EXPERTS = "layers.0.mlp.experts"


REFUSED: dict[str, dict[str, Any]] = {
    "no GPU": {"expert_kind": "grouped"},
    "precision": {"expert_kind": "torch-grouped", "on_cuda": True},
    "nothing": {"expert_kind": "torch-grouped", "on_cuda": True, "dtype": "bf16"},
}


def main() -> None:
    requests = [json.loads(word) for word in sys.argv[1:]]
    emulation = _start()
    found = {}
    for request in requests:
        try:
            found[request["name"]] = _compare(request, emulation)
        except Exception:
            found[request["name"]] = {"error": traceback.format_exc()}
    found["refusals"] = {name: _refusal(**changes) for name, changes in REFUSED.items()}
    report(found)


def _refusal(**changes: Any) -> str | None:
    from megatron_ampipe.errors import AMPipeError
    from megatron_ampipe.tools.measuring import blocks
    from megatron_ampipe.tools.measuring.grid import Case

    on_cuda = changes.pop("on_cuda", False)
    case = Case(**FIGURES | {"name": "x", "experts": 4, "topk": 1, "activation": "gelu"} | changes)
    try:
        blocks.require(case, on_cuda=on_cuda)
    except AMPipeError as error:
        return f"{error.exit_code}: {error}"
    return None


def _start() -> Any:
    import megatron.core.tensor_parallel.mappings as mappings

    from megatron_ampipe.tools.measuring.link import parse_link
    from megatron_ampipe.tools.measuring.ranks import Rank, RankJob

    job = RankJob(link=parse_link("emulated:100GB/s"), num_ranks=RANKS, pretended=True)
    emulation = Rank(job, 0).start_megatron()
    # Megatron was imported before the process was forked, and holds a reference to torch's function.
    mappings.dist_all_gather_func = torch.distributed.all_gather_into_tensor
    return emulation


def _compare(request: dict[str, Any], emulation: Any) -> dict[str, Any]:
    from megatron_ampipe.tools.measuring.bench_job import Variant
    from megatron_ampipe.tools.measuring.blocks import BlockFactory
    from megatron_ampipe.tools.measuring.grid import Case

    case = Case(**FIGURES, **request)
    emulation.num_experts = case.experts
    _use_groups(RANKS)
    factory = BlockFactory(case, rank=0, num_ranks=RANKS, on_cuda=False, seed=3)
    received = _watch_received()
    stock = _results(factory.stock, case)
    report = {"zero rows": [_zero_rows(tensor) for tensor in received], "exchanges": len(received)}
    report["cuts"] = {
        str(variant): differences(stock, _results(factory.build(variant), case))
        for variant in (
            *(Variant.of("ampipe", d, backward_degree=b) for d, b in ((2, 2), (4, 4), (4, 2), (2, 4))),
            Variant.of("moe-only", 4),
        )
    }
    if case.expert_kind != "sequential":
        report["whole"] = differences(_stacked(_results(_sequential(case, factory), case)), stock)
        return report
    _use_groups(1)
    whole = BlockFactory(case, rank=0, num_ranks=1, on_cuda=False, seed=3)
    report["whole"] = differences(_folded(_results_of_whole(whole, factory, case), case), stock)
    return report


def _sequential(case: Any, factory: Any) -> torch.nn.Module:
    """The same layer and weights, with sequential experts."""
    from megatron_ampipe.tools.measuring.blocks import BlockFactory

    alone = dataclasses.replace(case, expert_kind="sequential")
    layer = BlockFactory(alone, rank=0, num_ranks=RANKS, on_cuda=False, seed=3).stock
    weights = dict(factory.stock.state_dict())
    for number in (1, 2):
        of_all = weights.pop(f"{EXPERTS}.linear_fc{number}.weight")
        for expert, weight in enumerate(of_all):
            weights[f"{EXPERTS}.local_experts.{expert}.linear_fc{number}.weight"] = weight
    layer.load_state_dict(weights, strict=True)
    return layer


def _stacked(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of single experts, stacked like those of grouped experts."""
    stacked: dict[str, Tensor] = {}
    for name, tensor in found.items():
        if not name.startswith(f"{EXPERTS}.local_experts."):
            stacked[name] = tensor
            continue
        _, _, rest = name.removeprefix(f"{EXPERTS}.local_experts.").partition(".")
        earlier = [stacked[f"{EXPERTS}.{rest}"]] if f"{EXPERTS}.{rest}" in stacked else []
        stacked[f"{EXPERTS}.{rest}"] = torch.cat([*earlier, tensor.unsqueeze(0)])
    return stacked


def _use_groups(expert_ranks: int) -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=expert_ranks, create_gloo_process_groups=False
    )


def _watch_received() -> list[Tensor]:
    """A list to which every later exchange appends its output."""
    received: list[Tensor] = []
    exchange = torch.distributed.all_to_all_single

    def watched(output: Tensor, *arguments: Any, **options: Any) -> Any:
        handle = exchange(output, *arguments, **options)
        received.append(output)
        return handle

    torch.distributed.all_to_all_single = watched
    return received


def _zero_rows(tensor: Tensor) -> int:
    return int((tensor.reshape(tensor.shape[0], -1) == 0).all(dim=1).sum())


def _results(layer: torch.nn.Module, case: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    shape = (case.sequence_length, case.batch, case.hidden)
    hidden = torch.randn(shape, generator=generator).requires_grad_()
    gradient = torch.randn(shape, generator=generator)
    for parameter in layer.parameters():
        parameter.grad = None
        parameter.main_grad = torch.zeros_like(parameter)
    output, _ = layer(hidden_states=hidden, attention_mask=None)
    output.backward(gradient)
    assert hidden.grad is not None
    found = {"output": output.detach(), "input gradient": hidden.grad}
    for name, parameter in layer.named_parameters():
        found[name] = parameter.main_grad + (0 if parameter.grad is None else parameter.grad)
    return found


def _results_of_whole(whole: Any, factory: Any, case: Any) -> dict[str, Tensor]:
    """The results of one rank with all experts; those of other ranks have this rank's weights, negated."""
    local = case.experts // RANKS
    weights = factory.stock.state_dict()
    own = [name for name in weights if name.startswith(f"{EXPERTS}.local_experts.") and "_extra" not in name]
    assert len(own) == 2 * local
    for name in own:
        number, _, rest = name.removeprefix(f"{EXPERTS}.local_experts.").partition(".")
        for rank in range(1, RANKS):
            other = f"{EXPERTS}.local_experts.{rank * local + int(number)}.{rest}"
            weights[other] = -weights[name]
    whole.stock.load_state_dict(weights, strict=True)
    return _results(whole.stock, case)


def _folded(found: dict[str, Tensor], case: Any) -> dict[str, Tensor]:
    """The gradients of all experts, converted to gradients of the weights that they are made of."""
    local = case.experts // RANKS
    folded: dict[str, Tensor] = {}
    for name, tensor in found.items():
        if not name.startswith(f"{EXPERTS}.local_experts."):
            folded[name] = tensor
            continue
        number, _, rest = name.removeprefix(f"{EXPERTS}.local_experts.").partition(".")
        of_own = f"{EXPERTS}.local_experts.{int(number) % local}.{rest}"
        signed = tensor if int(number) < local else -tensor
        folded[of_own] = folded[of_own] + signed if of_own in folded else signed
    return folded


if __name__ == "__main__":
    main()
