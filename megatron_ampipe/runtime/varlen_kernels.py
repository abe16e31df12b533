"""Flash kernels for GPUs that take several documents of different lengths in one call.

Rows of all documents are one after another, with the bounds of each document's queries and keys. The first
document of a chunk may have begun in an earlier one and then has more keys than queries; these kernels align
causal masks to the bottom right of every document. Not run on a GPU yet. For fp16 and bf16.

Shapes as in :mod:`.attention_kernels`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_ampipe.schedule.documents import DocumentRows


@dataclass(frozen=True, slots=True)
class Bounds:
    """The documents of one call.

    Attributes:
        queries: ``[documents + 1]`` int32, where the query rows of each document begin and end.
        keys: The same of its keys.
        longest_queries: Most query rows of a document.
        longest_keys: Most keys of a document.
    """

    queries: Tensor
    keys: Tensor
    longest_queries: int
    longest_keys: int

    @classmethod
    def of(cls, rows: Sequence[DocumentRows], *, device: torch.device) -> Bounds:
        """The bounds of these rows, on the device of the tensors."""
        lengths = [[one.num_rows for one in rows], [one.num_keys for one in rows]]
        ends = [list(itertools.accumulate(parts, initial=0)) for parts in lengths]
        both = torch.tensor(ends, dtype=torch.int32)
        if device.type == "cuda":
            both = both.pin_memory().to(device, non_blocking=True)
        return cls(both[0], both[1], max(lengths[0]), max(lengths[1]))


@dataclass(frozen=True, slots=True)
class VarlenCall:
    """What a kernel is to compute, apart from its tensors.

    Attributes:
        bounds: Of the documents.
        scale: Factor on the scores.
        dropout: Probability of dropping an attention weight.
        window: How many keys before its own position a query sees; None for all of its document.
    """

    bounds: Bounds
    scale: float
    dropout: float = 0.0
    window: int | None = None

    def check_plain(self) -> None:
        """Assert that there is neither dropout nor a window."""
        assert self.dropout == 0.0 and self.window is None, "chosen for neither dropout nor window"

    def of_flash_attn(self) -> dict[str, Any]:
        """The arguments that the public functions of flash-attn 2 and 3 share."""
        return {
            "cu_seqlens_q": self.bounds.queries,
            "cu_seqlens_k": self.bounds.keys,
            "max_seqlen_q": self.bounds.longest_queries,
            "max_seqlen_k": self.bounds.longest_keys,
            "softmax_scale": self.scale,
            "causal": True,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }


VarlenFunction = Callable[[Tensor, Tensor, Tensor, VarlenCall], Tensor]
"""A flash kernel of several documents; differentiable.

Takes ``[rows, H, C]``, ``[keys, G, C]`` and ``[keys, G, V]``, returns ``[rows, H, V]``.
"""


def torch_flash_2(query: Tensor, key: Tensor, value: Tensor, call: VarlenCall) -> Tensor:
    """torch's built-in FlashAttention 2."""
    call.check_plain()
    bounds = call.bounds
    output, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        bounds.queries,
        bounds.keys,
        bounds.longest_queries,
        bounds.longest_keys,
        0.0,
        True,
        False,
        scale=call.scale,
    )
    found: Tensor = output
    return found


def flash_attn(query: Tensor, key: Tensor, value: Tensor, call: VarlenCall) -> Tensor:
    """The public function of flash-attn 2.1 or later."""
    from flash_attn import flash_attn_varlen_func

    window = (-1, -1) if call.window is None else (call.window, 0)
    output: Tensor = flash_attn_varlen_func(
        query, key, value, dropout_p=call.dropout, window_size=window, **call.of_flash_attn()
    )
    return output


def flash_attn_3(query: Tensor, key: Tensor, value: Tensor, call: VarlenCall) -> Tensor:
    """The public function of flash-attn-3, for Hopper."""
    call.check_plain()
    from flash_attn_interface import flash_attn_varlen_func

    output: Tensor = flash_attn_varlen_func(query, key, value, **call.of_flash_attn())
    return output


class _Varlen:
    """A :class:`VarlenFunction` with the arguments of :func:`.document_attention.by_document`.

    ``scale``, ``dropout`` and ``window`` are those of :class:`VarlenCall`.
    """

    def __init__(self, function: VarlenFunction) -> None:
        self._function = function

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        rows: Sequence[DocumentRows],
        **options: Any,
    ) -> Tensor:
        num_rows, batch = query.shape[:2]
        output = self._function(
            query.transpose(0, 1).flatten(0, 1),
            _visible(key, rows),
            _visible(value, rows),
            VarlenCall(Bounds.of(rows, device=query.device), **options),
        )
        return output.reshape(batch, num_rows, -1).transpose(0, 1)


def _visible(tensor: Tensor, rows: Sequence[DocumentRows]) -> Tensor:
    """The keys of all documents one after another: a view if they are so in one sequence."""
    ranges: list[tuple[int, int, int]] = []
    for one in rows:
        if ranges and ranges[-1][0] == one.sequence and ranges[-1][2] == one.first_key:
            ranges[-1] = (one.sequence, ranges[-1][1], one.last_key)
        else:
            ranges.append((one.sequence, one.first_key, one.last_key))
    parts = [tensor[first:last, sequence] for sequence, first, last in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


VARLEN_KERNELS: dict[str, Callable[..., Tensor]] = {
    "torch-flash-2": _Varlen(torch_flash_2),
    "flash-attn": _Varlen(flash_attn),
    "flash-attn-2": _Varlen(flash_attn),
    "flash-attn-3": _Varlen(flash_attn_3),
}
"""Kernels that take all documents of a chunk in one call, by their names in ``KERNELS``."""
