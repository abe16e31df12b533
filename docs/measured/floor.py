"""What Megatron's own modules cost in parts of the sequence, with nothing of AMPipe's around them.

One process with one core, the block of ``cpu-small`` with the two experts that one rank has there, fp32. The
MoE half (norm, router, dispatcher, experts, residual) and the projections (norm, queries, keys and values,
output projection, residual) run forward and backward on the whole sequence and on 2, 4 and 8 parts, in plain
autograd: no schedule, no collective, no thread. Attention is not cut, its time is there for scale. All once
with the allocator as it is, and once with one that keeps its memory, so that no page fault is counted in.

    python docs/measured/floor.py docs/measured/floor.json
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

PARTS = (1, 2, 4, 8)
REPEATS, WARMUP = 25, 5
KEEPING = {
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}


def main() -> None:
    """Measure with both allocators, one after the other, and write what came out."""
    found = {}
    for name, setting in (("default", {}), ("keeps memory", KEEPING)):
        done = subprocess.run(
            [sys.executable, __file__], env=os.environ | ALONE | setting, stdout=subprocess.PIPE, check=True
        )
        found[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, json.dumps(found[name], indent=1))
    with open(sys.argv[1], "w") as file:
        json.dump({"command": "python docs/measured/floor.py", "processor_ms": found}, file, indent=1)


def measure() -> dict[str, dict[str, float]]:
    """By module and number of parts: milliseconds of the processor and page faults, medians."""
    os.sched_setaffinity(0, {0})
    import torch
    from torch import Tensor

    from megatron_ampipe.tools.benchmark.grid import find_grid, read_grid
    from megatron_ampipe.tools.benchmark.job import Job
    from megatron_ampipe.tools.benchmark.worker import start_torch

    case = dataclasses.replace(read_grid(find_grid("cpu-small")).cases[0], experts=2)
    job = Job(
        cases=(case,),
        schedules=(),
        cuts=(),
        link="none",
        num_ranks=1,
        pretended=False,
        device="cpu",
        repeats=REPEATS,
        warmup=WARMUP,
        seed=1,
        timeout_s=60,
        rendezvous=tempfile.mktemp(),
        cores=(0,),
    )
    start_torch(job, rank=0)
    from megatron_ampipe.tools.benchmark.blocks import BlockFactory

    layer = BlockFactory(case, rank=0, num_ranks=1, on_cuda=False, seed=1).stock
    attention = layer.self_attention
    shape = (case.sequence_length, case.batch, case.hidden)
    hidden, gradient = torch.randn(shape), torch.randn(shape)

    def moe(rows: Tensor) -> Tensor:
        return rows + layer.mlp(layer.pre_mlp_layernorm(rows))[0]

    def projections(rows: Tensor) -> Tensor:
        query, key, value = attention.get_query_key_value_tensors(layer.input_layernorm(rows), None)
        return rows + attention.linear_proj((query + key + value).flatten(2))[0]

    def core(rows: Tensor) -> Tensor:
        heads = rows.view(*rows.shape[:2], case.heads, -1)
        return attention.core_attention(heads, heads, heads, None)

    def run(module: Callable[[Tensor], Tensor], parts: int) -> tuple[float, int]:
        for parameter in layer.parameters():
            parameter.grad = None
            parameter.main_grad.zero_()
        gc.collect()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        begin = time.thread_time()
        outputs = [module(rows.detach().requires_grad_()) for rows in hidden.chunk(parts)]
        for output, of_output in reversed(list(zip(outputs, gradient.chunk(parts), strict=True))):
            output.backward(of_output)
        taken = time.thread_time() - begin
        return 1e3 * taken, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults

    found: dict[str, dict[str, float]] = {}
    for module, cuts in ((moe, PARTS), (projections, PARTS), (core, (1,))):
        samples: dict[int, list[tuple[float, int]]] = {parts: [] for parts in cuts}
        for _ in range(WARMUP + REPEATS):
            for parts in cuts:
                samples[parts].append(run(module, parts))
        for parts, of_parts in samples.items():
            times, faults = zip(*of_parts[WARMUP:], strict=True)
            found[f"{module.__name__} in {parts}"] = {
                "ms": round(statistics.median(times), 1),
                "page_faults": statistics.median(faults),
            }
    return found


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main()
    else:
        print(json.dumps(measure()))
