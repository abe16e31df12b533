"""Rows over the ranks that share an expert: each gets those of all, and what they compute of a row is added.

With tensor-parallel experts, every such rank computes a part of each expert, for the tokens that have arrived
at any of them. So an all-gather goes before the experts and a reduce-scatter after them; each is the adjoint
of the other. Ranks have different numbers of rows. Both are exchanges of rows with every other rank, which
sends as many bytes as a ring does and needs no padding; sums are taken by the receiver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ampipe.runtime import collectives
from megatron_ampipe.runtime.collectives import Transfer

# T rows of this rank, G rows of all ranks.


@dataclass(frozen=True, slots=True)
class RowGather:
    """The gather of one chunk; a :class:`~.collectives.Transport` whose combine is a reduce-scatter.

    Attributes:
        rows: Rows of each rank of ``group``, in rank order.
        group: The ranks that share an expert, at least 2.
    """

    merges: ClassVar = True
    rows: Sequence[int]
    group: dist.ProcessGroup

    @property
    def input_splits(self) -> Sequence[int]:
        """See :class:`~.collectives.MergedTransport`."""
        return (self.rows[self.group.rank()],)

    @property
    def output_splits(self) -> Sequence[int]:
        """See :class:`~.collectives.MergedTransport`."""
        return self.rows

    @classmethod
    def merged(cls, transports: Sequence[RowGather]) -> RowGather:
        """See :class:`~.collectives.MergedTransport`."""
        return cls(
            [sum(rows) for rows in zip(*(one.rows for one in transports), strict=True)], transports[0].group
        )

    def dispatch(self, tensors: Sequence[Tensor]) -> Transfer:
        """Each ``[T, ...]`` to ``[G, ...]``, the rows of the first rank first."""
        received = [tensor.new_empty((sum(self.rows), *tensor.shape[1:])) for tensor in tensors]
        works = [
            work
            for tensor, output in zip(tensors, received, strict=True)
            for work in self._send_to_all(tensor.contiguous(), output)
        ]
        return Transfer.of(received, works)

    def _send_to_all(self, tensor: Tensor, output: Tensor) -> Sequence[dist.Work | None]:
        count = self.group.size()
        parts = list(output.split_with_sizes(list(self.rows)))
        if tensor.is_cuda:
            return [dist.all_to_all(parts, [tensor] * count, group=self.group)]
        return collectives.send_receive([tensor] * count, parts, self.group)

    def combine(self, tensors: Sequence[Tensor]) -> Transfer:
        """Each ``[G, ...]`` to ``[T, ...]``, summed over ranks; 16-bit numbers are added in fp32.

        The ranks are added in their order.
        """
        count, own = self.group.size(), self.rows[self.group.rank()]
        sent = collectives.exchange_rows(tensors, send=self.rows, receive=[own] * count, group=self.group)
        outputs = tuple(tensor.new_empty((own, *tensor.shape[1:])) for tensor in tensors)

        def unpack() -> None:
            for received, output in zip(sent.outputs, outputs, strict=True):
                parts = received.view(count, own, *received.shape[1:])
                narrow = output.dtype in (torch.bfloat16, torch.float16)
                if narrow:
                    output.copy_(parts.sum(dim=0, dtype=torch.float32))
                else:
                    torch.sum(parts, dim=0, out=output)

        if sent.works:
            return replace(sent, outputs=outputs, unpack=unpack, uses=sent.outputs)
        unpack()
        return Transfer(outputs, uses=sent.outputs)
