"""Estimates the peak memory of a pass through consecutive blocks, in bytes, by degree and memory strategy.

The peak is at one of two moments of the backward pass. When it begins, every block still keeps all that its
backward needs, and the experts of the last one hold one chunk's gradients. When it ends, one block is left,
and gradients of parameters have gathered. What is kept depends on the modules: Megatron's local ones keep
more than those of Transformer Engine, which fuse operations. Not counted: weights, the optimizer, rounding by
the allocator, and, unless ``gathers``, gradients of parameters that Megatron has too.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ampipe.plan.workload import Workload
from megatron_ampipe.schedule import KEEP, STRATEGIES, of_chunks

SUM_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Modules:
    """What a row of a block keeps, as tensors of 4, or else of ``Workload.element_bytes`` bytes.

    Attributes:
        norms_wide: Tensors of the hidden size with 4 bytes, of both norms together.
        norms: Tensors of the hidden size, likewise; with the residual stream itself.
        inner_gated: Tensors of an expert's width of a gated expert.
        inner: Likewise of one without a gate.
        routing_bytes: Bytes for each expert, and for each expert of a token.
        combined: Rows that came back from the experts are kept for the gradient of their probabilities.
        gradient_bytes: Of the gradients inside an expert that exist at the same time, for each unit of the
            width of its first product. In 16 bit, local modules multiply by the probability in fp32.
    """

    norms_wide: int
    norms: int
    inner_gated: int
    inner: int
    routing_bytes: tuple[int, int]
    combined: bool
    gradient_bytes: int


_FUSED = _Modules(0, 4, 3, 2, (2, 0), combined=True, gradient_bytes=4)
"""Transformer Engine, by reading."""
_LOCAL = {
    4: _Modules(0, 6, 6, 3, (13, 20), combined=False, gradient_bytes=8),
    2: _Modules(4, 2, 6, 3, (13, 20), combined=False, gradient_bytes=12),
}
"""Megatron's local modules by bytes of an element, counted tensor by tensor (docs/memory.md)."""


def peak_bytes(
    workload: Workload,
    *,
    forward_degree: int,
    backward_degree: int,
    num_layers: int = 1,
    memory: str = KEEP,
    local: bool = False,
    gathers: bool = False,
) -> float:
    """Peak of the activations of consecutive blocks.

    Args:
        workload: One of the blocks; all have experts.
        forward_degree: Number of chunks of the forward pass; 1 is Megatron's own layer.
        backward_degree: Number of chunks of the backward pass.
        num_layers: How many blocks a pass goes through before the first is differentiated.
        memory: What the experts keep, see ``Pipeline.memory``.
        local: Blocks of Megatron's local modules, not of Transformer Engine's.
        gathers: Gradients of parameters stay until the end of the pass, as in ``ampipe bench``.
    """
    stock = max(forward_degree, backward_degree) == 1
    chunks, element = backward_degree, workload.element_bytes
    modules = _LOCAL[element] if local else _FUSED
    dense, arrived, inner = _kept(workload, modules)
    names = of_chunks(memory)
    restored = [STRATEGIES[names[chunk * len(names) // chunks]] for chunk in range(chunks)]
    # Of each chunk, of the experts: what is kept; and what is restored right before it is differentiated, of
    # a redispatch while the next chunk's tokens are permuted and on their way.
    of_experts = [
        (arrived * ("redispatch" not in one) + inner * ("rebuild" not in one)) / chunks for one in restored
    ]
    again = [(3 * arrived * ("redispatch" in one) + inner * ("rebuild" in one)) / chunks for one in restored]
    kept = dense + sum(of_experts)
    # The last chunk comes first; by then, what the others have kept is there.
    restoring = max(again[chunk] - sum(of_experts[chunk + 1 :]) for chunk in range(chunks))
    experts, attention = _weights(workload)
    sum_bytes = element if stock or workload.fused_gradients else SUM_BYTES
    # Of the chunk whose experts are differentiated: what was restored, and gradients before each product.
    of_chunk = restoring
    received = _received(workload)
    width = workload.ffn / workload.expert_tensor * (2 if workload.gated else 1)
    calls = 1 if workload.grouped else workload.local_experts
    of_chunk += received * (workload.hidden * element + modules.gradient_bytes * width / calls) / chunks
    # Gradients on their way to the experts: those of two chunks wait, or all of them without chunks.
    of_chunk += received * workload.hidden * element * min(1.0, 2 / chunks)
    rows = workload.rows * workload.batch * workload.hidden * element
    keys = workload.sequence_length * workload.batch * workload.key_value_width / workload.tensor
    # Weights' gradients of the experts gather while their first chunk gives back what it kept.
    leaving = (arrived + inner) / chunks
    summed = 0.0 if workload.fused_gradients else sum_bytes * experts
    begin = num_layers * kept + rows + of_chunk + max(0.0, summed - leaving)
    sums = keys * (element if stock else SUM_BYTES + element)
    all_summed = 0.0 if workload.fused_gradients else sum_bytes * (experts + attention)
    gathered = element * (experts + attention) * (num_layers - 1) if gathers else 0.0
    end = gathered + rows + dense + max(summed + (kept - dense) + of_chunk, all_summed + sums)
    return max(begin, end)


def _kept(workload: Workload, modules: _Modules) -> tuple[float, float, float]:
    """Bytes that are saved for the backward pass: outside the experts, of what arrives, and inside them."""
    tokens = workload.rows * workload.batch
    gathered = tokens * workload.tensor
    element = workload.element_bytes
    width = (workload.heads * (workload.head_size + workload.value_size)) / workload.tensor
    keys = workload.sequence_length * workload.batch * workload.key_value_width / workload.tensor
    per_row: float = (modules.norms * element + modules.norms_wide * 4) * workload.hidden
    per_row += modules.routing_bytes[0] * workload.experts + modules.routing_bytes[1] * workload.topk
    if modules.combined:
        per_row += workload.rows_per_token * workload.hidden * element
    shared = 0.0
    if workload.shared_ffn is not None:
        count = modules.inner_gated if workload.gated else modules.inner
        shared = gathered * count * workload.shared_ffn / workload.tensor
    # Of attention also the log-sum-exp of each head.
    attended = gathered * (width * element + 4 * workload.heads / workload.tensor)
    dense = tokens * per_row + attended + (keys + shared) * element
    received = _received(workload)
    inner = (modules.inner_gated if workload.gated else modules.inner) * workload.ffn / workload.expert_tensor
    return dense, received * (workload.hidden * element + 4), received * inner * element


def _received(workload: Workload) -> float:
    load = workload.imbalance if workload.capacity is None else min(workload.capacity, workload.imbalance)
    return workload.rows * workload.batch * workload.topk * load * workload.expert_tensor


def _weights(workload: Workload) -> tuple[float, float]:
    """Weights of the local experts, and those of attention."""
    inner = workload.ffn / workload.expert_tensor
    experts = workload.local_experts * workload.hidden * inner * (3 if workload.gated else 2)
    attention = sum(k * n for k, n in workload.projections) + (
        workload.heads * workload.value_size * workload.hidden
    )
    return experts, attention / workload.tensor
