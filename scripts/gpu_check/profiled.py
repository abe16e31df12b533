"""The step that profiles one block on the GPU: overlap, host synchronisation, host time per stage, memory.

A separate process: ``python -m gpu_check.profiled``. The block, its weights and the
emulated link are those of ``ampipe bench``; peers are emulated. Started by :mod:`.steps`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from gpu_check.torch_trace import MARK, read_profile
from megatron_ampipe.tools.measuring import result
from megatron_ampipe.tools.measuring.bench_job import STOCK, BenchJob, Variant
from megatron_ampipe.tools.measuring.grid import Case, find_grid, read_grid
from megatron_ampipe.tools.measuring.network import parse_link
from megatron_ampipe.tools.measuring.ranks import Rank

DEGREE = 4
"""Of the profiled pass."""
_RANKS = 8
_WARMUP = 3
_TIMED = 5
"""Passes in which the host's time to issue every stage is measured."""
_ALLOCATOR = {
    "reserved_bytes": "reserved_bytes.all.peak",
    "inactive_bytes": "inactive_split_bytes.all.peak",
    "retries": "num_alloc_retries",
}
"""What is kept of ``torch.cuda.memory_stats()``: what the allocator held, what of that was in pieces, and how
often it had to give memory back."""


def main() -> int:
    """Profile, and write what was found."""
    parser = argparse.ArgumentParser(prog="profiled", description="Profile one block on this machine's GPU.")
    parser.add_argument("--grid", default="mixtral")
    parser.add_argument("--case", default="mixtral-8k")
    parser.add_argument("--link", required=True, help="an emulated one")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is for tests of this")
    parser.add_argument("--trace", type=Path, required=True, help="receives the profiler's trace, compressed")
    parser.add_argument("--json", type=Path, required=True, help="receives what was found")
    chosen = parser.parse_args()
    (case,) = read_grid(find_grid(chosen.grid), only=chosen.case)
    result.write(examine(_job(case, chosen.link, chosen.device), trace=chosen.trace), chosen.json)
    return 0


def _job(case: Case, link: str, device: Any) -> BenchJob:
    return BenchJob(
        cases=(case,),
        variants=((Variant(STOCK), *(Variant.of("ampipe", degree) for degree in (2, DEGREE, 8))),),
        link=parse_link(link),
        num_ranks=min(_RANKS, case.experts),
        emulates_peers=True,
        device=device,
        repeats=1,
        warmup=_WARMUP,
        seed=1,
        timeout_s=60,
    )


def examine(job: BenchJob, *, trace: Path) -> dict[str, Any]:
    """Run the block of a job as Megatron's and as AMPipe's.

    Args:
        job: One case; schedules and cuts of which the peak memory is wanted.
        trace: Receives the profiler's trace of AMPipe at :data:`DEGREE`.

    Returns:
        ``case``, ``kernel``, ``degree``, ``peak_bytes`` and ``allocator`` by variant, ``issued_us`` (by
        direction and kind, the host's time to issue a stage while the device is busy), and the fields of
        :class:`.Profile`.
    """
    rank = Rank(job, 0)
    emulation = rank.start_megatron()
    assert emulation is not None, "--link has to be an emulated one"
    (case,) = job.cases
    emulation.num_experts = case.experts
    # Megatron may be imported only now.
    from megatron_ampipe.tools.measuring.blocks import BlockFactory

    on_cuda = job.device == "cuda"
    factory = BlockFactory(rank, case)
    block = _MarkedPasses(case, on_cuda=on_cuda, seed=job.seed)
    peaks: dict[str, int | None] = {}
    allocator: dict[str, dict[str, int]] = {}
    for variant in job.variants[0]:
        layer = factory.stock if variant.schedule == STOCK else factory.build(variant)
        for _ in range(job.warmup):
            block.run(layer)
        peaks[str(variant)] = block.peak_bytes(layer)
        stats = torch.cuda.memory_stats() if on_cuda else {}
        allocator[str(variant)] = {name: stats[key] for name, key in _ALLOCATOR.items() if key in stats}
    pipelined = factory.build(Variant.of("ampipe", DEGREE))
    for _ in range(job.warmup):
        block.run(pipelined)
    timed = factory.build_timed(Variant.of("ampipe", DEGREE), num_passes=_TIMED)
    for number in range(_TIMED):
        timed.timer.recorder.start_iteration(number)
        block.run(timed)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities) as recorded:
        block.run(pipelined)
    found = read_profile(_export(recorded, trace))
    return {
        "case": case.name,
        "link": job.link.text,
        "kernel": factory.kernel,
        "why_cycles": emulation.why_cycles,
        "degree": DEGREE,
        "peak_bytes": peaks,
        "allocator": allocator,
        "issued_us": timed.timer.issued_us(),
        **asdict(found),
    }


class _MarkedPasses:
    """Passes through layers, always of the same input and output gradient."""

    def __init__(self, case: Case, *, on_cuda: bool, seed: int) -> None:
        from megatron_ampipe.tools.measuring.blocks import DTYPES

        self._on_cuda = on_cuda
        generator = torch.Generator().manual_seed(seed)
        shape = (case.sequence_length, case.batch, case.hidden)
        self._hidden, self._gradient = (
            torch.randn(shape, generator=generator).to("cuda" if on_cuda else "cpu", DTYPES[case.dtype])
            for _ in range(2)
        )

    def run(self, layer: torch.nn.Module) -> None:
        """Forward and backward, both marked for the profiler; returns when the device is done."""
        layer.zero_grad(set_to_none=True)
        hidden = self._hidden.detach().requires_grad_()
        with record_function(MARK.format(direction="forward")):
            output, _ = layer(hidden_states=hidden, attention_mask=None)
        with record_function(MARK.format(direction="backward")):
            output.backward(self._gradient)
        if self._on_cuda:
            torch.cuda.synchronize()

    def peak_bytes(self, layer: torch.nn.Module) -> int | None:
        """Of a pass, above what was held before it; None on a CPU, which does not say."""
        layer.zero_grad(set_to_none=True)
        if not self._on_cuda:
            self.run(layer)
            return None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.run(layer)
        return torch.cuda.max_memory_allocated() - before


def _export(recorded: Any, target: Path) -> dict[str, Any]:
    """Keep the trace, compressed, under its name when it is whole; and read it."""
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(plain))
        text = plain.read_bytes()
    partial = target.with_name(f".{target.name}.partial")
    try:
        partial.write_bytes(gzip.compress(text))
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    trace: dict[str, Any] = json.loads(text)
    return trace


if __name__ == "__main__":
    sys.exit(main())
