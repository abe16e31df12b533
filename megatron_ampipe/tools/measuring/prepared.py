"""What layers need before they run as in a training: budgets of fixed rows, and captured CUDA graphs.

AMPipe's layers learn the budgets of ``--ampipe-rows fixed`` from a pass with exact rows, and capture their
graphs in a later pass. Megatron's own graphs (``--cuda-graph-impl local``) are captured after the first pass.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_ampipe.block.settings import Settings
from megatron_ampipe.errors import DifferenceFound
from megatron_ampipe.exchange.budgets import FixedRows
from megatron_ampipe.layers.context import AMPipeContext
from megatron_ampipe.tools.measuring.blocks import Layers


def prepare(layers: Layers, run: Callable[[Layers], object], *, on_cuda: bool) -> int:
    """Run passes until the next one runs as all later ones.

    Args:
        layers: Megatron's or AMPipe's; nothing happens if they have neither budgets nor graphs.
        run: Runs a forward and a backward pass.
        on_cuda: Whether graphs are in memory of a GPU.

    Returns:
        The bytes that graphs hold from now on, 0 on a CPU.
    """
    context = layers.context
    if context is None:
        if layers.local_graphs is None:
            return 0
        return growth_bytes(lambda: run(layers), on_cuda=on_cuda)
    if context.fixed_rows is not None:
        learn(context.fixed_rows, lambda: run(layers))
    if not context.graph_modules:
        return 0

    def capture() -> None:
        for _ in range(context.graph_warm_up + 1):
            run(layers)

    return growth_bytes(capture, on_cuda=on_cuda)


def learn(rows: FixedRows, run: Callable[[], object]) -> None:
    """Have all later passes use budgets, learned from one pass with the default margin."""
    rows.is_watched = True
    run()
    rows.end_step()
    rows.learn(Settings().rows_margin)
    rows.begin_step()
    rows.is_active = True


def require_budgets(context: AMPipeContext, *, device: torch.device, name: str) -> None:
    """Raise :class:`DifferenceFound` if a pass since :func:`prepare` had more rows than its budget.

    In a training the step would be repeated with exact rows; here, results lack rows. The host waits.
    """
    assert context.fixed_rows is not None
    flag = context.fixed_rows.overflow(device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    if flag.item():
        raise DifferenceFound(
            f"{name}: a pass had more rows than a budget, though all passes have the same input; such a pass "
            "lacks rows, so its times mean nothing."
        )


def growth_bytes(run: Callable[[], object], *, on_cuda: bool) -> int:
    """By how many bytes the memory grows that torch has reserved on the GPU; 0 on a CPU.

    Gradients must exist before, or they would count.
    """
    if not on_cuda:
        run()
        return 0
    before = _reserved_bytes()
    run()
    return max(_reserved_bytes() - before, 0)


def _reserved_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    reserved: int = torch.cuda.memory_reserved()
    return reserved
