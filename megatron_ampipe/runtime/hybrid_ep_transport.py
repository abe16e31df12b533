"""The token exchange of one chunk through HybridEP, which also permutes the tokens by expert.

HybridEP's buffer counts tokens, exchanges them and puts them into the order of the experts in one call, so
that a chunk has no ``counts`` stage and ``expert`` permutes nothing. Not run on the hardware that HybridEP
needs; tests use a stand-in of its interface (``tests/hybrid_ep_standin.py``). Called by ``layers``.

Shapes: ``T`` tokens of this rank, ``R`` received rows (one for each of a token's local experts), ``D`` hidden
size, ``E`` experts of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.runtime.deep_ep_transport import tensors_among


class HybridEPTransport:
    """A :class:`~.collectives.Transport` that keeps HybridEP's handle of its chunk.

    Every call is asynchronous on the device, and runs on the stream that issues it. The first dispatch blocks
    the host until the number of received rows is known. HybridEP exchanges through a separate memory, which
    the calls use one after another, and returns new tensors: chunks in flight share nothing.

    Args:
        manager: Megatron's ``_HybridEPManager`` of the chunk, after ``setup_metadata``: it makes the first
            call, with Megatron's settings. Its routing map is ``[T, E]`` bool.
        buffer: Finds ``deep_ep.HybridEPBuffer``, through which that call was made.

    Attributes:
        tokens_per_expert: ``[local experts]`` int64 on the host, received rows of each local expert.
    """

    merges: ClassVar = False

    def __init__(self, manager: Any, *, buffer: Callable[[], Any]) -> None:
        self._manager, self._buffer = manager, buffer
        self._fuses = bool(manager.config.moe_permute_fusion_into_hybridep)
        self._handle: Any = None
        self._num_received = 0
        self.tokens_per_expert: Tensor

    def dispatch(self, tensors: Sequence[Tensor]) -> Transfer:
        """Tokens ``[T, D]`` and fp32 probabilities ``[T, E]`` to ``[R, D]`` and ``[R]``.

        In the backward pass of the combine the gradients ``[T, D]`` alone, along the same ways.
        """
        if len(tensors) == 1:
            received, *_ = self._buffer().dispatch_with_permute(
                hidden=tensors[0].contiguous(),
                scaling_factor=None,
                num_permuted_tokens=self._num_received,
                **self._options("fuse_permute_dispatch"),
            )
            return Transfer((received,), uses=tensors_among(self._handle))
        manager = self._manager
        tokens, probs = tensors
        manager.token_probs = probs.contiguous()
        with torch.no_grad():
            received = manager.dispatch(tokens.contiguous())
        self._handle, self._num_received = manager.handle, received.shape[0]
        # Nothing promises that the next call counts into other memory.
        self.tokens_per_expert = manager.tokens_per_expert.clone()
        uses = (manager.routing_map, *tensors_among(self._handle))
        return Transfer((received, manager.dispatched_probs), uses=uses)

    def combine(self, tensors: Sequence[Tensor]) -> Transfer:
        """Expert outputs ``[R, D]``, summed over the experts of a token, to ``[T, D]``.

        In the backward pass of the dispatch also gradients of the probabilities, ``[R]`` to ``[T, E]``.
        """
        tokens, *probs = tensors
        combined, of_probs = self._buffer().combine_with_unpermute(
            hidden=tokens.contiguous(),
            probs=probs[0].float().contiguous() if probs else None,
            **self._options("fuse_unpermute_combine"),
        )
        outputs = (combined, of_probs) if probs else (combined,)
        return Transfer(outputs, uses=tensors_among(self._handle))

    def _options(self, fuse: str) -> dict[str, Any]:
        """As in the first call; older versions of HybridEP have no name for the fused kernels."""
        options = {"handle": self._handle, "pad_multiple": self._manager.pad_multiple}
        return options | ({fuse: True} if self._fuses else {})
