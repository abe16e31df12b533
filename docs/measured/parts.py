"""What Megatron's own modules cost in parts of the sequence, in turns with Megatron's layer and AMPipe's.

The two blocks of ``cpu-small``, two ranks with a core each, no limit on the link. Rows named *parts* are
Megatron's layer with its projections, norms and MoE layer called once for each part of the sequence, in plain
autograd, Megatron's own all-to-all included, and with nothing of AMPipe's around them: no stage, no thread,
no schedule. Attention is not even cut. Their time has waits for exchanges in it, which a pipeline could hide;
the processor time that they take more than Megatron's layer, no order of the same calls can avoid. Rows
named *frozen* compute no gradients of weights: what ``parts 4, frozen`` takes more than ``stock, frozen``
would be left if these products were not cut, but joined at no cost. All of it once with the allocator as it
is, and once with one that keeps its memory, so that page faults do not count.

    python docs/measured/parts.py docs/measured/parts.json
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ampipe.tools.benchmark.bench_job import BenchJob
from megatron_ampipe.tools.measuring.grid import find_grid, read_grid
from megatron_ampipe.tools.measuring.rank_processes import started
from megatron_ampipe.tools.measuring.rank_worker import serve, start_torch
from megatron_ampipe.tools.measuring.variant import Cut, Variant

PARTS = (2, 4)
REPEATS, WARMUP = 16, 3
SILENCE_S = 120.0
KEEPING = {
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


class PartsJob(BenchJob):
    """A job whose ranks run this file."""

    worker = Path(__file__).stem


def main() -> None:
    """Measure with both allocators, one after the other, and write what came out."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    found: dict[str, Any] = {}
    for name, setting in (("default", {}), ("keeps memory", KEEPING)):
        os.environ.update(setting)
        found[name] = measure()
    with open(sys.argv[1], "w") as file:
        json.dump({"command": "python docs/measured/parts.py", "allocator": found}, file, indent=1)
        file.write("\n")


def measure() -> dict[str, dict[str, Any]]:
    """By case and row: how fast, and how much work, next to Megatron's layer; medians and all samples."""
    cases = tuple(read_grid(find_grid("cpu-small")).cases)
    job = PartsJob(
        cases=cases,
        schedules=(),
        cuts=(),
        link="none",
        num_ranks=2,
        pretended=False,
        device="cpu",
        repeats=REPEATS,
        warmup=WARMUP,
        seed=1,
        timeout_s=SILENCE_S,
        rendezvous="",
        cores=(0, 1),
    )
    by_rank: dict[tuple[int, int], dict[str, list[list[float]]]] = {}
    with started(job, timeout_s=SILENCE_S) as ranks:
        for rank, event in ranks.events(timeout_s=SILENCE_S):
            if event["event"] == "case":
                by_rank[event["index"], rank] = event["samples_ms"]
    found: dict[str, dict[str, Any]] = {}
    for index, case in enumerate(cases):
        first, second = by_rank[index, 0], by_rank[index, 1]
        found[case.name] = {
            name: beside(first["stock"], second["stock"], first[name], second[name]) for name in first
        }
        for name, row in found[case.name].items():
            figures = f"{row['ms']:7.1f} ms  {row['speedup']:.3f}x  {row['work']:.3f} of the work"
            print(f"{case.name:6} {name:12} {figures}", flush=True)
    return found


def beside(*samples: list[list[float]]) -> dict[str, Any]:
    """A row next to stock, from each rank's ``[time, processor time]`` of every pass, stock's first; ms."""
    stock, row = (
        [(max(a[0], b[0]), a[1] + b[1]) for a, b in zip(*pair, strict=True)]
        for pair in (samples[:2], samples[2:])
    )
    return {
        "ms": round(statistics.median(time for time, _ in row), 1),
        "speedup": round(statistics.median(s[0] / r[0] for s, r in zip(stock, row, strict=True)), 3),
        "work": round(statistics.median(r[1] / s[1] for s, r in zip(stock, row, strict=True)), 3),
        "samples_ms": [round(time, 2) for time, _ in row],
        "processor_ms": [round(work, 2) for _, work in row],
    }


def of_parts(layer: Any, count: int) -> torch.nn.Module:
    """Megatron's layer on ``count`` parts of the sequence, one after the other, on its own parameters."""

    class Parts(torch.nn.Module):
        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            return layer.named_parameters(*args, **kwargs)

        def parameters(self, recurse: bool = True) -> Any:
            return layer.parameters(recurse)

        def forward(self, hidden_states: Tensor, attention_mask: None) -> tuple[Tensor, None]:
            (one,) = layer.layers
            attention, parts = one.self_attention, hidden_states.chunk(count)
            projected = [
                attention.get_query_key_value_tensors(one.input_layernorm(rows), None)[:3] for rows in parts
            ]
            query, key, value = (torch.cat(tensors) for tensors in zip(*projected, strict=True))
            context = attention.core_attention(query, key, value, None)
            outputs = []
            for rows, attended in zip(parts, context.chunk(count), strict=True):
                residual = rows + attention.linear_proj(attended)[0]
                outputs.append(residual + one.mlp(one.pre_mlp_layernorm(residual))[0])
            return torch.cat(outputs), None

    return Parts()


def frozen(layer: Any) -> torch.nn.Module:
    """The layer without products for gradients of weights."""

    class Frozen(torch.nn.Module):
        def parameters(self, recurse: bool = True) -> Any:
            return layer.parameters(recurse)

        def forward(self, hidden_states: Tensor, attention_mask: None) -> tuple[Tensor, None]:
            weights = [parameter for parameter in layer.parameters() if parameter.dim() > 1]
            for weight in weights:
                weight.requires_grad_(False)
            try:
                return layer(hidden_states=hidden_states, attention_mask=attention_mask)
            finally:
                for weight in weights:
                    weight.requires_grad_()

    return Frozen()


def work(job: BenchJob, rank: int, answer: Callable[..., None]) -> None:
    """One rank: every row in turns, in an order that rotates."""
    start_torch(job, rank=rank)
    from megatron_ampipe.tools.benchmark.passes import _Passes
    from megatron_ampipe.tools.measuring.blocks import BlockFactory

    for index, case in enumerate(job.cases):
        factory = BlockFactory(case, rank=rank, num_ranks=job.num_ranks, on_cuda=False, seed=job.seed)
        passes = _Passes(case, rank=rank, on_cuda=False, seed=job.seed, counts_wire=False)
        rows = {"stock": factory.stock}
        rows |= {f"parts {count}": of_parts(factory.stock, count) for count in PARTS}
        for schedule in ("moe-only", "ampipe"):
            rows |= {
                f"{schedule} {count}": factory.build(Variant(schedule, Cut.of(count))) for count in PARTS
            }
        expected = passes.results(factory.stock)
        for name, layer in rows.items():
            for tensor, found in passes.results(layer).items():
                difference = (found - expected[tensor]).abs().max() / expected[tensor].abs().max()
                assert difference < 1e-4, (name, tensor, difference)
        # From here on without comparison: they have no gradients of weights.
        rows |= {f"{name}, frozen": frozen(rows[name]) for name in ("stock", f"parts {PARTS[-1]}")}
        for _ in range(WARMUP):
            for layer in rows.values():
                passes.run(layer)
        samples: dict[str, list[list[float]]] = {name: [] for name in rows}
        names = list(rows)
        for repeat in range(REPEATS):
            for step in range(len(names)):
                name = names[(repeat + step) % len(names)]
                sample = passes.run(rows[name])
                samples[name].append([1e3 * sample.wall_s, 1e3 * sample.processor_s])
            answer(event="progress")
        answer(event="case", index=index, samples_ms=samples)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main()
    else:
        serve(BenchJob.from_json, work)
