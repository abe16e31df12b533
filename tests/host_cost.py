"""What a layer costs the host: tiny tensors, so that nearly all time is Python and dispatch.

On a GPU the host must issue a layer faster than the device computes it. One process stands for eight ranks;
every collective is one copy, as a launch of NCCL is one call, and a CUDA graph one call without contents.
``python -m tests.host_cost`` prints
operators and Python calls of a forward and a backward pass of AMPipe's layers, over those of Megatron's.
"""

import json
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ampipe.launch import connections
from tests import cuda_graph_standin
from tests.dist.worker import start_alone
from tests.plan_cases import grid_case, python_calls

RANKS, LAYERS = 8, 2
STOCK = "Megatron"
PARTIAL = "Megatron, graphs"
"""Megatron's layers with its own graphs of attention, router and what follows the experts."""
GRAPHS = "graphs"
"""In the name of a variant that has CUDA graphs."""
WHOLE = "whole graphs"
"""In the name of a variant whose passes are one graph each."""
CUT = "cut"
"""In the name of a variant whose backward passes are cut, so that reductions can start in between."""
VARIANTS = {
    "ampipe 2": ("ampipe", 2, 1),
    "ampipe 4": ("ampipe", 4, 1),
    "ampipe 8": ("ampipe", 8, 1),
    "ampipe 4, stack 2": ("ampipe", 4, 2),
    "moe-only 4": ("moe-only", 4, 1),
    "lancet, uncut": ("lancet", 1, 1),
    "ampipe 2, graphs": ("ampipe", 2, 1),
    "ampipe 4, graphs": ("ampipe", 4, 1),
    "ampipe 4, stack 2, graphs": ("ampipe", 4, 2),
    "ampipe 2, whole graphs": ("ampipe", 2, 1),
    "ampipe 4, whole graphs": ("ampipe", 4, 1),
    "ampipe 8, whole graphs": ("ampipe", 8, 1),
    "ampipe 4, stack 2, whole graphs": ("ampipe", 4, 2),
    "ampipe 4, stack 2, whole graphs, cut": ("ampipe", 4, 2),
}
"""Schedule, degree, stack."""


class _Done:
    """The handle of a collective that has ended."""

    def wait(self, *_: Any) -> bool:
        return True


def _all_to_all(output: Tensor, input: Tensor, *_: Any, async_op: bool = False, **__: Any) -> _Done | None:
    """Hand over as many rows as both have."""
    rows = min(output.shape[0], input.shape[0])
    output[:rows].copy_(input[:rows])
    return _Done() if async_op else None


def _all_gather(output: Tensor, input: Tensor, *_: Any, async_op: bool = False, **__: Any) -> _Done | None:
    """Every rank has what this one has."""
    parts = output.view(-1, *input.shape)
    parts.copy_(input.expand(parts.shape))
    return _Done() if async_op else None


class _Operators(TorchDispatchMode):
    """Counts what is dispatched."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _launch(_: Any) -> None:
    """The launch of a graph: one call and one operator."""
    _LAUNCHED.zero_()


_LAUNCHED = torch.zeros(())


def layers() -> dict[str, Callable[[], None]]:
    """A pass through each variant, by name."""
    # Megatron reads it for every product, which costs two calls more if it is set.
    os.environ.pop(connections.VARIABLE, None)
    start_alone(RANKS, expert_model_parallel_size=RANKS)
    dist.all_to_all_single, dist.all_gather_into_tensor = _all_to_all, _all_gather
    from megatron_ampipe.runtime.executors import SequentialExecutor
    from megatron_ampipe.tools.measuring.bench_job import EXACT, FIXED, Variant
    from megatron_ampipe.tools.measuring.blocks import BlockFactory
    from megatron_ampipe.tools.measuring.network import parse_link
    from megatron_ampipe.tools.measuring.prepared import learn
    from megatron_ampipe.tools.measuring.ranks import Rank, RankJob

    case = grid_case(sequence_length=256, hidden=64, experts=16, topk=2, ffn=64, activation="swiglu")
    rank = Rank(RankJob(num_ranks=RANKS, link=parse_link(None)), 0)
    factory = BlockFactory(rank, case, layers=LAYERS)
    built: dict[str, Any] = {STOCK: factory.stock}
    for name, (schedule, degree, stack) in VARIANTS.items():
        rows = FIXED if WHOLE in name else EXACT
        variant = Variant.of(schedule, degree, stack=stack, rows=rows, graphs=GRAPHS in name)
        built[name] = factory.build(variant, executor=SequentialExecutor())
        built[name].context.overlaps_reductions = CUT in name
    hidden = torch.randn(256, 1, 64, requires_grad=True)

    def run(layer: torch.nn.Module) -> None:
        output, _ = layer(hidden_states=hidden, attention_mask=None)
        output.sum().backward()

    def with_megatrons_graphs() -> Any:
        graphed = factory.build_with_graphs()
        with graphed.local_graphs.step():
            run(graphed)
        return graphed

    def bound(layer: Any) -> Callable[[], None]:
        if layer.context is not None and layer.context.fixed_rows is not None:
            learn(layer.context.fixed_rows, lambda: run(layer))
        for _ in range(3):
            run(layer)
        return lambda: run(layer)

    with cuda_graph_standin.stand_ins(), cuda_graph_standin.of_megatron():
        built[PARTIAL] = with_megatrons_graphs()
        made = {name: bound(layer) for name, layer in built.items()}
    # The stand-in would run what the graph holds.
    cuda_graph_standin.RecordedGraph.replay = _launch  # type: ignore[method-assign]
    return made


def operators(run: Callable[[], None]) -> int:
    """What a pass of all layers dispatches."""
    with _Operators() as counted:
        run()
    return counted.count


def main() -> None:
    """Print the ratios of all counts, as JSON."""
    # The fewest of three passes: on a busy machine one was seen with 65 calls more, of unknown origin.
    counts = {
        name: [operators(run), min(python_calls(run) for _ in range(3))] for name, run in layers().items()
    }
    stock = counts.pop(STOCK)
    ratios = {
        name: [ours / of_stock for ours, of_stock in zip(found, stock, strict=True)]
        for name, found in counts.items()
    }
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
