"""Runs a block with emulated ranks: Megatron's layer, AMPipe's, and a reference layer.

One process for all cases, which are passed on the command line as JSON. See ``tools.measuring.emulation``.
"""

from __future__ import annotations

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


def main() -> None:
    requests = [json.loads(word) for word in sys.argv[1:]]
    emulation = _start()
    found = {}
    for request in requests:
        try:
            found[request["name"]] = _compare(request, emulation)
        except Exception:
            found[request["name"]] = {"error": traceback.format_exc()}
    report(found)


def _start() -> Any:
    import megatron.core.tensor_parallel.mappings as mappings

    from megatron_ampipe.tools.benchmark.bench_job import BenchJob
    from megatron_ampipe.tools.measuring.rank_worker import start_torch
    from megatron_ampipe.tools.measuring.variant import Cut

    emulation = start_torch(
        BenchJob(
            cases=(),
            schedules=("ampipe",),
            cuts=(Cut.of(2),),
            link="emulated:100GB/s",
            num_ranks=RANKS,
            pretended=True,
            device="cpu",
            repeats=1,
            warmup=0,
            seed=1,
            timeout_s=60,
            rendezvous="",
            cores=(),
        ),
        rank=0,
    )
    # Megatron was imported before the process was forked, and holds a reference to torch's function.
    mappings.dist_all_gather_func = torch.distributed.all_gather_into_tensor
    return emulation


def _compare(request: dict[str, Any], emulation: Any) -> dict[str, Any]:
    from megatron_ampipe.tools.measuring.blocks import BlockFactory
    from megatron_ampipe.tools.measuring.grid import Case
    from megatron_ampipe.tools.measuring.variant import Cut, Variant

    case = Case(**FIGURES, **request)
    emulation.num_experts = case.experts
    _use_groups(RANKS)
    factory = BlockFactory(case, rank=0, num_ranks=RANKS, on_cuda=False, seed=3)
    received = _watch_received()
    stock = _results(factory.stock, case)
    report = {"zero rows": [_zero_rows(tensor) for tensor in received], "exchanges": len(received)}
    report["cuts"] = {
        f"{schedule} {cut}": differences(stock, _results(factory.build(Variant(schedule, cut)), case))
        for schedule, cut in (
            *(("ampipe", Cut.of(*degrees)) for degrees in ((2,), (4,), (4, 2), (2, 4))),
            ("moe-only", Cut.of(4)),
        )
    }
    _use_groups(1)
    whole = BlockFactory(case, rank=0, num_ranks=1, on_cuda=False, seed=3)
    report["whole"] = differences(_folded(_results_of_whole(whole, factory, case), case), stock)
    return report


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
