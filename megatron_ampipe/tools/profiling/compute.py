"""What one rank computes, to be timed: matrix products, core attention, passes over memory, permutation.

The sizes are those of a block's stages, whole and cut into up to 16 chunks. All ranks measure at the same
time, as they compute in training, or those that share a core in turns. Called by :mod:`.measure`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megatron_ampipe.attention.kernels import KERNELS
from megatron_ampipe.runtime.saved_tensors import HostCopies
from megatron_ampipe.schedule import Span
from megatron_ampipe.tools.measuring.blocks import DTYPES
from megatron_ampipe.tools.measuring.grid import Case
from megatron_ampipe.tools.profiling.timing import Probe

CUTS = (1, 2, 4, 8, 16)
"""Into how many parts the rows of a block are cut, to get smaller sizes."""


class Computation:
    """The computation of a block on this rank.

    Args:
        case: The block.
        kernel: Name of the attention kernel.
        on_cuda: Where it runs.
    """

    def __init__(self, case: Case, *, kernel: str, on_cuda: bool) -> None:
        self._case = case
        self._kernel = KERNELS[kernel]
        self._device, self._dtype = "cuda" if on_cuda else "cpu", DTYPES[case.dtype]
        self._head_size = case.head_size or case.hidden // case.heads
        self._groups = case.query_groups or case.heads

    def probes(self) -> Iterator[Probe]:
        """Everything to be timed."""
        width = (self._case.heads + 2 * self._groups) * self._head_size
        up = self._case.ffn * (2 if self._case.activation == "swiglu" else 1)
        shapes = {
            (self._case.hidden, width),
            (self._case.heads * self._head_size, self._case.hidden),
            (self._case.hidden, up),
            (self._case.ffn, self._case.hidden),
        }
        for rows in self._rows():
            for k, n in sorted(shapes):
                yield from self._product(rows, k, n)
            yield self._pass_over_memory(rows)
            yield self._permutation(rows)
            yield self._copy(rows)
        length = self._case.sequence_length
        for cut in CUTS:
            rows = length // cut
            # At the front, in the middle and at the end of the sequence.
            for start in sorted({0, (cut // 2) * rows, (cut - 1) * rows}):
                if rows:
                    yield from self._attention(start, start + rows)

    def _product(self, rows: int, k: int, n: int) -> Iterator[Probe]:
        """Forward, and the two of the backward pass."""
        inputs, weight, gradient = self._random(rows, k), self._random(n, k), self._random(rows, n)
        columns = {
            "alpha_us": 1.0,
            "beta_us_per_gflop": 2e-9 * rows * k * n,
            "weights_us_per_million": 1e-6 * k * n,
        }
        yield Probe("gemm", columns, lambda: inputs @ weight.t())
        yield Probe("gemm", columns, lambda: (gradient @ weight, gradient.t() @ inputs), count=2)

    def _attention(self, start: int, end: int) -> Iterator[Probe]:
        """Rows ``[start, end)`` with all keys up to them, forward and backward."""
        batch, heads, size = self._case.batch, self._case.heads, self._head_size
        query = self._random(end - start, batch, heads, size).requires_grad_()
        key, value = (self._random(end, batch, self._groups, size).requires_grad_() for _ in range(2))
        spans = (Span(0, end - start, start),)

        def attend() -> Tensor:
            return self._kernel(query, key, value, spans=spans, scale=size**-0.5)

        output = attend()
        gradient = torch.randn_like(output)
        pairs = end * (end + 1) // 2 - start * (start + 1) // 2
        gflops = 4e-9 * pairs * batch * heads * size
        columns = {
            "alpha_us": 1.0,
            "beta_us_per_gflop": gflops,
            "merge_us_per_mb": 1e-6 * output.nbytes if start else 0.0,
        }
        yield Probe("attention.forward", columns, attend)
        yield Probe(
            "attention.backward",
            # Five products instead of two.
            {**columns, "beta_us_per_gflop": 2.5 * gflops},
            lambda: torch.autograd.grad(output, (query, key, value), gradient, retain_graph=True),
        )

    def _pass_over_memory(self, rows: int) -> Probe:
        """Adding two tensors into a third, as a residual is added."""
        left, right = (self._random(rows, self._case.hidden) for _ in range(2))
        return _of_bytes("memory", 3 * left.nbytes, lambda: left + right)

    def _copy(self, rows: int) -> Probe:
        """What arrives for the experts to host memory and back, as the lane ``copy`` copies."""
        tokens = self._random(rows * self._case.topk, self._case.hidden)

        def copy() -> None:
            copies = HostCopies([tokens])
            copies.store(lambda: None).wait()
            copies.load().wait()

        return _of_bytes("copy", tokens.nbytes, copy, count=2)

    def _permutation(self, rows: int) -> Probe:
        """Rows into another order and back."""
        tokens = self._random(rows * self._case.topk, self._case.hidden)
        order = torch.randperm(len(tokens)).to(tokens.device)
        return _of_bytes(
            "permute",
            2 * tokens.nbytes,
            lambda: (
                tokens.index_select(0, order),
                torch.zeros_like(tokens).index_add_(0, order, tokens),
            ),
            count=2,
        )

    def _rows(self) -> list[int]:
        tokens = self._case.sequence_length * self._case.batch
        return sorted({tokens // cut for cut in CUTS if tokens >= cut})

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._device, dtype=self._dtype)


def _of_bytes(family: str, size: int, operation: Callable[[], object], *, count: int = 1) -> Probe:
    return Probe(family, {"alpha_us": 1.0, "beta_us_per_mb": 1e-6 * size}, operation, count=count)
