"""What Megatron's own modules cost in parts of the sequence, in turns with Megatron's layer and AMPipe's.

The two blocks of ``cpu-small``, two ranks with a core each, no limit on the link. Rows named *parts* are
Megatron's layer with its projections, norms and MoE layer called once for each part of the sequence, in plain
autograd, Megatron's own all-to-all included, and with nothing of AMPipe's around them: no stage, no thread,
no schedule. Attention is not even cut. Their time has waits for exchanges in it, which a pipeline could hide;
the processor time that they take more than Megatron's layer, no order of the same calls can avoid. Rows
named *frozen* compute no gradients of weights: what one in four parts takes more than ``stock, frozen``
would be left if these products were not cut, but joined at no cost. All of it once with the allocator as it
is, and once with one that keeps its memory, so that page faults do not count.

    python docs/measured/parts.py docs/measured/results/parts.json

``--only`` measures fewer rows more often:

    python docs/measured/parts.py docs/measured/results/parts-frozen.json --cases top1 --repeats 60 \\
        --default-allocator \\
        --only stock "stock, frozen" "parts 4, frozen" "moe-only 4, frozen" "ampipe 4, frozen"
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ampipe.tools.measuring.bench_job import BenchJob, Variant
from megatron_ampipe.tools.measuring.grid import find_grid, read_grid
from megatron_ampipe.tools.measuring.network import parse_link
from megatron_ampipe.tools.measuring.ranks import Rank, run_ranks

PARTS = (2, 4)
WARMUP = 3
SCHEDULES = ("moe-only", "ampipe", "joined")
FROZEN = ", frozen"
SILENCE_S = 120.0
KEEPING = {
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsJob(BenchJob):
    """``only`` names the rows, all if it is empty."""

    only: tuple[str, ...]


def main() -> None:
    """Measure with both allocators, one after the other, and write what came out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--cases", help="of cpu-small, with commas (default: all)")
    parser.add_argument("--repeats", type=int, default=16)
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW")
    parser.add_argument("--default-allocator", action="store_true", help="not the other one")
    asked = parser.parse_args()
    found: dict[str, Any] = {}
    settings: dict[str, dict[str, str]] = {"default": {}}
    if not asked.default_allocator:
        settings["keeps memory"] = KEEPING
    for name, setting in settings.items():
        os.environ.update(setting)
        found[name] = measure(asked.cases, repeats=asked.repeats, only=tuple(asked.only))
    document = {"command": ["python", *sys.argv], "allocator": found}
    asked.file.write_text(json.dumps(document, indent=1) + "\n")


def measure(names: str | None, *, repeats: int, only: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """By case and row: how fast, and how much work, next to Megatron's layer; medians and all samples."""
    cases = read_grid(find_grid("cpu-small"), only=names)
    job = PartsJob(
        cases=cases,
        link=parse_link("none"),
        num_ranks=2,
        only=only,
        repeats=repeats,
        warmup=WARMUP,
        seed=1,
        timeout_s=SILENCE_S,
    )
    by_rank = run_ranks(job, work)
    found: dict[str, dict[str, Any]] = {}
    for index, case in enumerate(cases):
        first, second = (cases[index] for cases in by_rank)
        found[case.name] = {
            name: compared(first["stock"], second["stock"], first[name], second[name]) for name in first
        }
        for name, row in found[case.name].items():
            figures = f"{row['ms']:7.1f} ms  {row['speedup']:.3f}x  {row['work']:.3f} of the work"
            print(f"{case.name:6} {name:18} {figures}", flush=True)
        for name in [name for name in first if name.endswith(FROZEN) and name != f"stock{FROZEN}"]:
            row = found[case.name][name]
            row["left if joined at no cost"] = left = left_if_joined(found[case.name], name)
            print(f"{case.name:6} {name:18} leaves {left[1]:+.3f} ({left[0]:+.3f} to {left[2]:+.3f})")
    return found


def compared(*samples: list[list[float]]) -> dict[str, Any]:
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


def left_if_joined(rows: dict[str, dict[str, Any]], name: str) -> list[float]:
    """How much more than stock a row takes, both without gradients of weights, as a share of stock with them.

    Of processor time: 2.5 % of resampled medians, median, 97.5 %.
    """
    stock, whole, cut = (rows[one]["processor_ms"] for one in ("stock", f"stock{FROZEN}", name))
    shares = [(c - w) / s for s, w, c in zip(stock, whole, cut, strict=True)]
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(shares, k=len(shares))) for _ in range(4000))
    return [round(value, 4) for value in (medians[100], statistics.median(shares), medians[-100])]


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


def work(rank: Rank[PartsJob]) -> list[dict[str, list[list[float]]]]:
    """One rank: every row in turns, in an order that rotates; by case and row, the samples."""
    rank.start_megatron()
    from megatron_ampipe.tools.measuring.blocks import BlockFactory
    from megatron_ampipe.tools.measuring.timed_passes import Passes

    job, by_case = rank.job, []
    for case in job.cases:
        factory = BlockFactory(rank, case)
        passes = Passes(rank, case)
        rows = {"stock": factory.stock}
        rows |= {f"parts {count}": of_parts(factory.stock, count) for count in PARTS}
        for schedule in SCHEDULES:
            rows |= {f"{schedule} {count}": factory.build(Variant.of(schedule, count)) for count in PARTS}
        expected = passes.results(factory.stock)
        for name, layer in rows.items():
            for tensor, found in passes.results(layer).items():
                difference = (found - expected[tensor]).abs().max() / expected[tensor].abs().max()
                assert difference < 1e-4, (name, tensor, difference)
        # From here on without comparison: they have no gradients of weights.
        cut = [f"{name} {PARTS[-1]}" for name in ("parts", *SCHEDULES[:2])]
        rows |= {f"{name}{FROZEN}": frozen(rows[name]) for name in ("stock", *cut)}
        rows = {name: layer for name, layer in rows.items() if not job.only or name in job.only}
        for _ in range(WARMUP):
            for layer in rows.values():
                passes.run(layer)
        samples: dict[str, list[list[float]]] = {name: [] for name in rows}
        names = list(rows)
        for repeat in range(job.repeats):
            for step in range(len(names)):
                name = names[(repeat + step) % len(names)]
                begin_s = time.process_time()
                wall_s = passes.run(rows[name]).wall_s
                samples[name].append([1e3 * wall_s, 1e3 * (time.process_time() - begin_s)])
        by_case.append(samples)
    return by_case


if __name__ == "__main__":
    main()
