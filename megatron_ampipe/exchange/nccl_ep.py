"""NCCL EP's exchange of one chunk (``--moe-flex-dispatcher-backend ncclep``), through Transformer Engine.

NCCL EP has one context for the process, made for a number of tokens and of received rows by its first
dispatch. The first chunk makes it for all tokens of the micro-batch: then a chunk exceeds it, which ends the
run, only where Megatron's layer would. This code has not run on the hardware that it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from megatron_ampipe.errors import BadInput
from megatron_ampipe.runtime.collectives import Transfer

if TYPE_CHECKING:
    # Only some versions have it.
    from megatron.core.transformer.moe.token_dispatcher import _NCCLEPManager

# T tokens of a chunk, D hidden size, K experts of a token, R received rows, one for each of a token's local
# experts, C rows of NCCL EP's memory for them.


class NCCLEPTransport:
    """Sends tokens through NCCL EP, and keeps the routing of a chunk. The first dispatch blocks the host.

    ``manager`` is Megatron's ``_NCCLEPManager`` of the chunk, after ``setup_metadata``; it makes the first
    call. ``num_tokens`` are those of all chunks.
    """

    tokens_per_expert: Sequence[int] = ()
    """Received rows of each local expert."""
    _context_tokens: ClassVar[int] = 0
    """The tokens for which the context of the process was made."""
    _handle: Tensor
    """The routing, which NCCL EP has written."""
    _num_received = 0
    _capacity = 0
    """``C``"""

    def __init__(self, manager: _NCCLEPManager, num_tokens: int) -> None:
        self._manager, self._num_tokens = manager, num_tokens

    def dispatch(self, tensors: Sequence[Tensor]) -> Transfer:
        """Send tokens ``[T, D]`` and fp32 probabilities ``[T, K]``, received as ``[R, D]`` and ``[R]``.

        In the backward pass of the combine, only gradients ``[T, D]``.
        """
        if len(tensors) == 1:
            gradient = tensors[0].contiguous()
            rows = gradient.new_empty((self._capacity, gradient.shape[1]))
            torch.ops.transformer_engine_ep.combine_bwd(self._handle, gradient, rows)
            return Transfer((rows[: self._num_received],), uses=(self._handle, rows))
        manager, (tokens, probs) = self._manager, tensors
        self._make_context()
        manager.token_probs = probs.contiguous()
        with torch.no_grad():
            rows = manager.dispatch(tokens.contiguous())
        self._handle, self._capacity = manager._buffer.handle_mem, len(rows)
        # The host waits here.
        self.tokens_per_expert = manager.tokens_per_expert.tolist()
        self._num_received = sum(self.tokens_per_expert)
        # Copied, because the memory for all tokens would be kept for the backward pass of every chunk.
        received = [part[: self._num_received].clone() for part in (rows, manager.dispatched_probs)]
        uses = (manager.token_indices, self._handle, manager.tokens_per_expert, rows)
        return Transfer(tuple(received), uses=uses)

    def combine(self, tensors: Sequence[Tensor]) -> Transfer:
        """Send expert outputs ``[R, D]`` back, summed over the experts of a token, to ``[T, D]``.

        In the backward pass of the dispatch, also gradients of probabilities, ``[R]`` to ``[T, K]``.
        """
        manager = self._manager
        rows, *probs = (self._padded(part) for part in tensors)
        if not probs:
            with torch.no_grad():
                combined = manager.combine(rows)
            return Transfer((combined,), uses=(self._handle, rows))
        tokens = rows.new_empty((manager.num_local_tokens, rows.shape[1]))
        token_probs = torch.empty_like(manager.token_indices, dtype=torch.float32)
        gradients = probs[0].float()
        torch.ops.transformer_engine_ep.dispatch_bwd(self._handle, rows, gradients, tokens, token_probs)
        return Transfer((tokens, token_probs), uses=(self._handle, rows, gradients))

    def _padded(self, part: Tensor) -> Tensor:
        """``[C, ...]``, as large as NCCL EP's memory; what follows the ``R`` rows is read by nobody."""
        if len(part) == self._capacity:
            return part.contiguous()
        padded = part.new_empty((self._capacity, *part.shape[1:]))
        padded[: len(part)] = part
        return padded

    def _make_context(self) -> None:
        """Make the context of the process if there is none, and let the manager use its sizes."""
        manager, own = self._manager, self._manager.num_local_tokens
        if not NCCLEPTransport._context_tokens:
            NCCLEPTransport._context_tokens = self._num_tokens
        if own > NCCLEPTransport._context_tokens:
            raise BadInput(
                "--moe-flex-dispatcher-backend",
                "ncclep",
                rule=f"a chunk has {own} tokens, and NCCL EP's only context was made for "
                f"{NCCLEPTransport._context_tokens}, those of the first micro-batch",
                remedy="Use micro-batches of one size, or --moe-flex-dispatcher-backend hybridep.",
            )
        manager.num_local_tokens = NCCLEPTransport._context_tokens
        try:
            manager._ensure_bootstrap()
        finally:
            manager.num_local_tokens = own
