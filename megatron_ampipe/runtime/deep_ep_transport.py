"""The token exchange of one chunk through DeepEP: a token goes once to every rank that has experts for it.

DeepEP's buffer counts tokens, permutes them by rank and exchanges them in one call. Its host waits in it for
the number of received tokens, and the call waits for the transfers before it, unless the number was exchanged
earlier. Not run on the hardware that DeepEP needs; tests use a stand-in of its interface
(``tests/deep_ep_standin.py``). Called by ``layers``.

Shapes: ``T`` tokens of this rank, ``R`` received tokens, ``D`` hidden size, ``K`` experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from megatron_ampipe.runtime.collectives import Transfer


class DeepEPTransport:
    """A :class:`~.collectives.Transport` that keeps DeepEP's handle of its chunk.

    Every call is asynchronous on the device, and ordered by the stream that issues it. The first dispatch
    blocks the host if it is not known how many tokens will arrive.

    Args:
        buffer: ``deep_ep.Buffer`` of the ranks that exchange tokens. It copies what it receives to new
            tensors, so chunks in flight share nothing.
        experts: ``[T, K]`` int64, the experts of each token; -1 for none.
        num_experts: Of all ranks.
        num_received: ``R``; None if it is not known. DeepEP takes it within a node alone.
        tokens_per_expert: As in the attributes, if ``R`` is known.

    Attributes:
        received_experts: ``[R, K]`` int64, local experts of the received tokens; -1 for those of other ranks.
        tokens_per_expert: Received tokens for each local expert, known on the host.
    """

    merges: ClassVar = False

    def __init__(
        self,
        buffer: Any,
        experts: Tensor,
        *,
        num_experts: int,
        num_received: int | None = None,
        tokens_per_expert: Sequence[int] = (),
    ) -> None:
        self._buffer, self._experts, self._num_experts = buffer, experts, num_experts
        self._num_received = num_received
        self._handle: Any = None
        self.received_experts: Tensor
        self.tokens_per_expert = tokens_per_expert

    def dispatch(self, tensors: Sequence[Tensor]) -> Transfer:
        """Tokens ``[T, D]`` and fp32 probabilities ``[T, K]`` to ``[R, D]`` and ``[R, K]``.

        In the backward pass of the combine the gradients ``[T, D]`` alone, along the same ways.
        """
        if len(tensors) == 1:
            received, *_ = self._buffer.dispatch(tensors[0].contiguous(), handle=self._handle)
            return Transfer((received[: self._num_received],), uses=tensors_among(self._handle))
        tokens, probs = tensors
        per_rank, per_node, per_expert, goes_to, _ = self._buffer.get_dispatch_layout(
            self._experts, self._num_experts
        )
        is_told = self._num_received is not None
        # To DeepEP, 0 says that the number is not known: one row is received that no rank has sent.
        told = {"num_worst_tokens": max(1, self._num_received or 0)} if is_told else {}
        received, experts, weights, counted, self._handle, _ = self._buffer.dispatch(
            tokens.contiguous(),
            topk_idx=self._experts,
            topk_weights=probs.contiguous(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=goes_to,
            num_tokens_per_expert=per_expert,
            **told,
        )
        self.received_experts = experts[: self._num_received]
        if not is_told:
            self.tokens_per_expert = counted
        counted = (per_rank, per_node, per_expert, goes_to)
        uses = (self._experts, self.received_experts, *tensors_among(counted), *tensors_among(self._handle))
        return Transfer((received[: self._num_received], weights[: self._num_received]), uses=uses)

    def combine(self, tensors: Sequence[Tensor]) -> Transfer:
        """Expert outputs ``[R, D]``, summed over the ranks of a token, to ``[T, D]``.

        In the backward pass of the dispatch also gradients of the probabilities, ``[R, K]`` to ``[T, K]``.
        """
        if self._num_received == 0:
            tensors = [tensor.new_zeros((1, *tensor.shape[1:])) for tensor in tensors]
        tokens, *weights = tensors
        given = {"topk_weights": weights[0].float().contiguous()} if weights else {}
        combined, of_weights, _ = self._buffer.combine(tokens.contiguous(), handle=self._handle, **given)
        outputs = (combined, of_weights) if weights else (combined,)
        return Transfer(outputs, uses=tensors_among(self._handle))


def tensors_among(values: Sequence[Any]) -> tuple[Tensor, ...]:
    """The tensors of a handle."""
    return tuple(value for value in values if isinstance(value, Tensor))
