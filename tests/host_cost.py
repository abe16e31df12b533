"""What a layer costs the host: tiny tensors, so that nearly all time is Python and dispatch.

On a GPU the host must issue a layer faster than the device computes it. One process stands for eight ranks;
every collective is one copy, as a launch of NCCL is one call. Counted for a forward and a backward pass of
Megatron's layer and of AMPipe's: operators and Python calls, which are the same every time, and processor
time, which is not.

    python -m tests.host_cost [REPEATS]      # a table; times are medians of so many passes in turns
    python -m tests.host_cost --by "ampipe 4"      # operators and functions that are called most
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

RANKS, LAYERS = 8, 2
STOCK = "Megatron"
VARIANTS = {
    "ampipe 2": ("ampipe", 2, 1),
    "ampipe 4": ("ampipe", 4, 1),
    "ampipe 8": ("ampipe", 8, 1),
    "ampipe 4, stack 2": ("ampipe", 4, 2),
    "moe-only 4": ("moe-only", 4, 1),
    "lancet, uncut": ("lancet", 1, 1),
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

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


def layers() -> dict[str, Callable[[], None]]:
    """A pass through each variant, by name."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    from megatron_ampipe.launch import host

    host.install()
    dist.all_to_all_single, dist.all_gather_into_tensor = _all_to_all, _all_gather
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=RANKS, create_gloo_process_groups=False
    )
    from megatron_ampipe.runtime.executors import SequentialExecutor
    from megatron_ampipe.tools.measuring.bench_job import Variant
    from megatron_ampipe.tools.measuring.blocks import BlockFactory
    from megatron_ampipe.tools.measuring.grid import Case

    case = Case(
        name="tiny",
        sequence_length=256,
        batch=1,
        hidden=64,
        heads=4,
        experts=16,
        topk=2,
        ffn=64,
        activation="swiglu",
        dtype="fp32",
    )
    factory = BlockFactory(case, rank=0, num_ranks=RANKS, on_cuda=False, seed=1, layers=LAYERS)
    built = {STOCK: factory.stock} | {
        name: factory.build(Variant.of(schedule, degree, stack=stack), executor=SequentialExecutor())
        for name, (schedule, degree, stack) in VARIANTS.items()
    }
    hidden = torch.randn(256, 1, 64, requires_grad=True)

    def run(layer: torch.nn.Module) -> None:
        output, _ = layer(hidden_states=hidden, attention_mask=None)
        output.sum().backward()

    def bound(layer: torch.nn.Module) -> Callable[[], None]:
        for _ in range(3):
            run(layer)
        return lambda: run(layer)

    return {name: bound(layer) for name, layer in built.items()}


def operators(run: Callable[[], None]) -> Counter[str]:
    """What a pass of all layers dispatches."""
    with _Operators() as counted:
        run()
    return counted.names


def python_calls(run: Callable[[], None]) -> Counter[str]:
    """The functions that a pass of all layers calls."""
    profile = cProfile.Profile()
    profile.enable()
    run()
    profile.disable()
    found: Counter[str] = Counter()
    for (file, line, name), (_, calls, *_) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        found["/".join(file.split("/")[-2:]) + f":{line} {name}"] += calls
    return found


def milliseconds(runs: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median processor time of a layer, of passes in turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            begin = time.process_time()
            run()
            times[name].append((time.process_time() - begin) * 1e3 / LAYERS)
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    """Print the table, or what one variant is made of."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("repeats", type=int, nargs="?", default=30)
    parser.add_argument("--by", metavar="VARIANT", help="print what its passes are made of")
    parser.add_argument("--json", action="store_true", help="print the ratios of both counts alone")
    chosen = parser.parse_args()
    runs = layers()
    if chosen.by:
        for count in (operators, python_calls):
            stock, ours = count(runs[STOCK]), count(runs[chosen.by])
            for name in sorted(stock | ours, key=lambda name: stock[name] - ours[name])[:60]:
                print(f"{stock[name] / LAYERS:8.1f} {ours[name] / LAYERS:8.1f}  {name}")
        return
    counts = {name: (operators(run).total(), python_calls(run).total()) for name, run in runs.items()}
    if chosen.json:
        print(
            json.dumps(
                {
                    name: [count / base for count, base in zip(found, counts[STOCK], strict=True)]
                    for name, found in counts.items()
                }
            )
        )
        return
    times = milliseconds(runs, chosen.repeats)
    print(f"{'':20}{'operators':>18}{'Python calls':>20}{'processor ms':>20}")
    for name, (dispatched, called) in counts.items():
        parts = [(dispatched / LAYERS, dispatched / counts[STOCK][0])]
        parts += [(called / LAYERS, called / counts[STOCK][1]), (times[name], times[name] / times[STOCK])]
        print(f"{name:20}" + "".join(f"{value:11.1f}{ratio:7.2f}x" for value, ratio in parts))


if __name__ == "__main__":
    main()
