"""Samples of what one rank computes: matrix products, core attention, passes over memory, permutation.

The sizes are those of a block's stages, whole and cut into up to 16 chunks. All ranks measure at the same
time, as they compute in training. Called by :mod:`.measure`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_ampipe.runtime.attention import KERNELS
from megatron_ampipe.schedule import Span
from megatron_ampipe.tools.benchmark.blocks import DTYPES
from megatron_ampipe.tools.benchmark.grid import Case
from megatron_ampipe.tools.profiling.samples import Sample
from megatron_ampipe.tools.profiling.timing import Stopwatch

CUTS = (1, 2, 4, 8, 16)
"""Into how many parts the rows of a block are cut, to get smaller sizes."""


class ComputeSamples:
    """Measures the computation of a block on this rank.

    Args:
        case: The block.
        kernel: Name of the attention kernel.
        watch: Times.
    """

    def __init__(self, case: Case, *, kernel: str, watch: Stopwatch) -> None:
        self._case, self._watch = case, watch
        self._kernel = KERNELS[kernel]
        self._where = {"device": "cuda" if watch.on_cuda else "cpu", "dtype": DTYPES[case.dtype]}
        self._element_bytes = DTYPES[case.dtype].itemsize
        self._head_size = case.head_size or case.hidden // case.heads

    def products(self) -> Iterator[Sample]:
        """Each matrix product of the block; of its backward pass the mean of its two products."""
        case = self._case
        groups = case.query_groups or case.heads
        up = case.ffn * (2 if case.activation == "swiglu" else 1)
        shapes = {
            (case.hidden, (case.heads + 2 * groups) * self._head_size),
            (case.heads * self._head_size, case.hidden),
            (case.hidden, up),
            (case.ffn, case.hidden),
        }
        for k, n in sorted(shapes):
            weight = self._random(n, k)
            for rows in self._rows():
                inputs, gradient = self._random(rows, k), self._random(rows, n)
                forward = self._watch.median_us(lambda x=inputs, w=weight: x @ w.t())
                backward = self._watch.median_us(lambda x=inputs, w=weight, g=gradient: (g @ w, g.t() @ x))
                columns = {
                    "alpha_us": 1.0,
                    "beta_us_per_gflop": 2e-9 * rows * k * n,
                    "weights_us_per_million": 1e-6 * k * n,
                }
                yield Sample("gemm", columns, forward)
                yield Sample("gemm", columns, backward / 2)

    def attention(self) -> Iterator[Sample]:
        """Chunks at the front, in the middle and at the end of the sequence."""
        case, length = self._case, self._case.sequence_length
        groups = case.query_groups or case.heads
        scale = self._head_size**-0.5
        for cut in CUTS:
            rows = length // cut
            for start in sorted({0, (cut // 2) * rows, (cut - 1) * rows}):
                end = start + rows
                query = self._random(rows, case.batch, case.heads, self._head_size).requires_grad_()
                key, value = (
                    self._random(end, case.batch, groups, self._head_size).requires_grad_() for _ in range(2)
                )
                spans = (Span(0, rows, start),)

                def attend(
                    q: Tensor = query, k: Tensor = key, v: Tensor = value, s: object = spans
                ) -> Tensor:
                    return self._kernel(q, k, v, spans=s, scale=scale)

                pairs = end * (end + 1) // 2 - start * (start + 1) // 2
                gflops = 4e-9 * pairs * case.batch * case.heads * self._head_size
                merged = (
                    rows * case.batch * case.heads * self._head_size * self._element_bytes if start else 0
                )
                output = attend()
                gradient = torch.randn_like(output)
                for direction, work, operation in (
                    ("forward", gflops, attend),
                    (
                        "backward",
                        2.5 * gflops,
                        lambda o=output, q=query, k=key, v=value, g=gradient: torch.autograd.grad(
                            o, (q, k, v), g, retain_graph=True
                        ),
                    ),
                ):
                    columns = {
                        "alpha_us": 1.0,
                        "beta_us_per_gflop": work,
                        "merge_us_per_mb": 1e-6 * merged,
                    }
                    yield Sample(f"attention.{direction}", columns, self._watch.median_us(operation))

    def memory(self) -> Iterator[Sample]:
        """Adding two tensors into a third, as a residual is added."""
        for rows in self._rows():
            left, right = (self._random(rows, self._case.hidden) for _ in range(2))
            time = self._watch.median_us(lambda x=left, y=right: x + y)
            yield self._of_bytes("memory", 3 * left.nbytes, time)

    def permutation(self) -> Iterator[Sample]:
        """Rows into another order and back, the mean of the two."""
        for rows in self._rows():
            tokens = self._random(rows * self._case.topk, self._case.hidden)
            order = torch.randperm(len(tokens)).to(tokens.device)
            there = self._watch.median_us(lambda x=tokens, o=order: x.index_select(0, o))
            back = self._watch.median_us(lambda x=tokens, o=order: torch.zeros_like(x).index_add_(0, o, x))
            yield self._of_bytes("permute", 2 * tokens.nbytes, (there + back) / 2)

    def _rows(self) -> list[int]:
        tokens = self._case.sequence_length * self._case.batch
        return sorted({tokens // cut for cut in CUTS if tokens >= cut})

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, **self._where)  # type: ignore[arg-type]

    @staticmethod
    def _of_bytes(family: str, size: int, us: float) -> Sample:
        return Sample(family, {"alpha_us": 1.0, "beta_us_per_mb": 1e-6 * size}, us)
