"""Estimates the peak memory of one block's activations, in bytes, by degree.

Counts tensors saved for the backward pass, which do not depend on the degree, and temporary tensors of
the backward pass, which do: in the experts' backward pass the gradients of two chunks, and later the sums of
the gradients of keys and values. Not counted: weights and gradients that Megatron's own layer has too, the
optimizer, other layers, rounding by the allocator.
"""

from __future__ import annotations

from megatron_ampipe.plan.workload import Workload

SUM_BYTES = 4


def peak_bytes(workload: Workload, *, forward_degree: int, backward_degree: int) -> float:
    """Peak of one block's activations during its backward pass.

    Args:
        workload: The block.
        forward_degree: Number of chunks of the forward pass; 1 is Megatron's own layer.
        backward_degree: Number of chunks of the backward pass.
    """
    element = workload.element_bytes
    kept, in_flight = _kept(workload) * element, _in_flight(workload) * element
    keys = workload.sequence_length * workload.batch * workload.key_value_width / workload.tensor
    if max(forward_degree, backward_degree) == 1:
        return kept + max(in_flight, keys * element)
    peak = kept + max(in_flight * min(2, backward_degree) / backward_degree, keys * (SUM_BYTES + element))
    if not workload.fused_gradients:
        # Megatron's own layer has one gradient for each weight; sums over chunks are in fp32.
        peak += (SUM_BYTES - element) * _weights(workload)
    return peak


def _kept(workload: Workload) -> float:
    """Number of elements that are saved for the backward pass."""
    tokens = workload.rows * workload.batch
    gathered = tokens * workload.tensor
    width = (workload.heads * (workload.head_size + workload.value_size)) / workload.tensor
    keys = workload.sequence_length * workload.batch * workload.key_value_width / workload.tensor
    received = _received(workload)
    inner = workload.ffn / workload.expert_tensor
    experts = received * (workload.hidden + (3 if workload.gated else 2) * inner)
    shared = 0.0
    if workload.shared_ffn is not None:
        shared = gathered * (3 if workload.gated else 2) * workload.shared_ffn / workload.tensor
    # Input, residual and outputs of both norms; queries and attention output; scores; combined rows.
    rows = tokens * (4 * workload.hidden + workload.experts) + gathered * width
    return rows + keys + experts + shared + tokens * workload.topk * workload.hidden


def _in_flight(workload: Workload) -> float:
    """Number of elements of gradients that are sent or wait to be sent, without chunks."""
    inner = workload.ffn / workload.expert_tensor
    return _received(workload) * (2 * workload.hidden + (2 if workload.gated else 1) * inner)


def _received(workload: Workload) -> float:
    load = workload.imbalance if workload.capacity is None else min(workload.capacity, workload.imbalance)
    return workload.rows * workload.batch * workload.topk * load * workload.expert_tensor


def _weights(workload: Workload) -> float:
    inner = workload.ffn / workload.expert_tensor
    experts = workload.local_experts * workload.hidden * inner * (3 if workload.gated else 2)
    attention = sum(k * n for k, n in workload.projections) + (
        workload.heads * workload.value_size * workload.hidden
    )
    return experts + attention / workload.tensor
