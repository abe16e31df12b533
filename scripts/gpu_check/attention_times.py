"""The step that times and compares the attention kernels of the GPU, also those of flash-attn's packages.

A separate process: ``python -m gpu_check.attention_times``, started by :mod:`.steps`. A kernel that cannot be
used is named with the reason, such as a package that is not installed. FlashAttention 4 compiles for long, so
it is the last one, and the result is written after each case.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ampipe import compat
from megatron_ampipe.attention.kernels import FLASH_KERNELS, KERNELS, LATENT, WINDOW, Needs, why_not
from megatron_ampipe.schedule import Span
from megatron_ampipe.schedule.chunks import Documents
from megatron_ampipe.tools.measuring import machine, result

ALLOWED = 2**-5
"""Largest difference of outputs and gradients of two kernels in bf16, relative to the largest value."""
_CPU_KERNELS = ("cpu-flash", "exact-pieces", "sdpa")
_WARMUP, _REPEATS = 3, 10


@dataclass(frozen=True, slots=True)
class Case:
    """A call of attention.

    Attributes:
        name: In the table.
        rows: Of the chunk.
        first_row: Rows before it.
        documents: How many documents share the sequence.
        window: Keys before its own that a row sees, None for all.
        head_size: Of queries and keys.
        value_size: Head size of values.
        heads: Query heads.
        groups: Heads of keys and values.
    """

    name: str
    rows: int
    first_row: int = 0
    documents: int = 1
    window: int | None = None
    head_size: int = 128
    value_size: int = 128
    heads: int = 32
    groups: int = 8


CASES = (
    Case("8,192 rows", 8192),
    Case("the last of four chunks", 2048, 6144),
    Case("a window of 1,024", 8192, window=1024),
    Case("eight documents", 8192, documents=8),
    Case("latent attention", 8192, head_size=192, value_size=128, heads=16, groups=16),
)


def main() -> int:
    """Time all kernels in all cases, and write what was found."""
    parser = argparse.ArgumentParser(prog="attention_times", description="Time the attention kernels.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is for tests of this")
    parser.add_argument("--shorter", metavar="N", type=int, default=1, help="use an N-th of all rows")
    parser.add_argument("--json", type=Path, required=True, help="receives what was found")
    chosen = parser.parse_args()
    found: list[dict[str, Any]] = []
    for case in CASES:
        rows, first_row = case.rows // chosen.shorter, case.first_row // chosen.shorter
        found.append(measure(replace(case, rows=rows, first_row=first_row), device=chosen.device))
        versions = machine.versions()
        result.write({"versions": versions, "allowed": ALLOWED, "cases": found}, chosen.json)
    return 0


def measure(case: Case, *, device: str) -> dict[str, Any]:
    """Time the kernels in one case, forward and backward.

    Returns:
        The fields of the case; ``kernels``: for each one ``ms``, ``range_ms`` (of all repeats), ``host_us``
        (until everything is issued) and ``difference`` from the first one; ``control``: the first one, timed
        again after all others; ``unusable``: why others are not used.
    """
    kernels, unusable = _usable(case, device=device)
    torch.manual_seed(1)
    tensors, gradient = _inputs(case, device=device)
    measured: dict[str, dict[str, Any]] = {}
    first: list[Tensor] | None = None
    # The sort is stable.
    for kernel in sorted(kernels, key=lambda name: name == "flash-attn-4"):
        passes = _passes(case, kernel, tensors, gradient)
        got = [x.detach() for x in passes()]
        first = got if first is None else first
        differences = [
            (x.float() - y.float()).abs().max() / y.float().abs().max()
            for x, y in zip(got, first, strict=True)
        ]
        # Unlike Python's maximum, torch's is not a number if one of them is not.
        difference = torch.stack(differences).max().item()
        measured[kernel] = {**_timed(passes, on_cuda=device == "cuda"), "difference": difference}
    control = None
    if measured:
        again = _passes(case, next(iter(measured)), tensors, gradient)
        control = _timed(again, on_cuda=device == "cuda")
    return {**asdict(case), "kernels": measured, "control": control, "unusable": unusable}


def _usable(case: Case, *, device: str) -> tuple[Sequence[str], dict[str, str]]:
    """The kernels that can be used, and why others cannot."""
    if device == "cpu":
        names = [name for name in _CPU_KERNELS if name == "sdpa" or case.window is None]
        return [name for name in names if name != "cpu-flash" or case.head_size == case.value_size], {}
    features = [WINDOW] * (case.window is not None) + [LATENT] * (case.head_size != case.value_size)
    # As one call for each document, cuDNN is measured too.
    needs = Needs(head_size=case.head_size, value_size=case.value_size, features=tuple(features))
    reasons = {name: why_not(name, compat.current_gpu(), needs) for name in FLASH_KERNELS}
    unusable = {name: reason for name, reason in reasons.items() if reason is not None}
    return [name for name, reason in reasons.items() if reason is None], unusable


def _inputs(case: Case, *, device: str) -> tuple[list[Tensor], Tensor]:
    num_keys = case.first_row + case.rows
    shapes = (
        (case.rows, 1, case.heads, case.head_size),
        (num_keys, 1, case.groups, case.head_size),
        (num_keys, 1, case.groups, case.value_size),
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tensors = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]
    return tensors, torch.randn(case.rows, 1, case.heads * case.value_size, device=device, dtype=dtype)


def _passes(
    case: Case, kernel: str, tensors: list[Tensor], gradient: Tensor
) -> Callable[[], tuple[Tensor, ...]]:
    """A function that runs forward and backward, and returns the output and all gradients."""
    num_keys = case.first_row + case.rows
    span = Span(0, case.rows, case.first_row)
    options: dict[str, Any] = {} if case.window is None else {"window": case.window}
    if case.documents > 1:
        # Of lengths that differ, and are not multiples of a tile.
        squares = [index**2 for index in range(case.documents)]
        starts = tuple(num_keys * square // case.documents**2 for square in squares)
        options["documents"] = Documents((starts,), num_keys, own_positions=True)

    def passes() -> tuple[Tensor, ...]:
        scale = case.head_size**-0.5
        output = KERNELS[kernel](*tensors, spans=(span,), scale=scale, **options)
        return output, *torch.autograd.grad(output, tensors, gradient)

    return passes


def _timed(passes: Callable[[], object], *, on_cuda: bool) -> dict[str, Any]:
    """The median time and the range of both passes, and the median of the host until they are issued."""
    times_ms, host_us = [], []
    for number in range(_WARMUP + _REPEATS):
        if on_cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        passes()
        issued = time.perf_counter()
        if on_cuda:
            torch.cuda.synchronize()
        ended = time.perf_counter()
        if number >= _WARMUP:
            times_ms.append(1e3 * (ended - begin))
            host_us.append(1e6 * (issued - begin))
    return {
        "ms": statistics.median(times_ms),
        "range_ms": [min(times_ms), max(times_ms)],
        "host_us": statistics.median(host_us),
    }


if __name__ == "__main__":
    sys.exit(main())
