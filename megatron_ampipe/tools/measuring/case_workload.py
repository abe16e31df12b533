"""The block of a benchmark's case, as the planner needs it: for ``ampipe profile`` and ``ampipe bench``."""

from __future__ import annotations

from megatron_ampipe.plan.workload import Workload
from megatron_ampipe.tools.measuring.grid import Case


def workload_of_case(case: Case, *, num_ranks: int, fused_gradients: bool) -> Workload:
    """What :mod:`.blocks` builds for a case: local layers, no router losses.

    Args:
        case: The block.
        num_ranks: Over which the experts are spread.
        fused_gradients: Whether linear layers add their weights' gradients to ``main_grad`` themselves.
    """
    head_size = case.head_size or case.hidden // case.heads
    key_value_width = 2 * (case.query_groups or case.heads) * head_size
    return Workload(
        sequence_length=case.sequence_length,
        batch=case.batch,
        hidden=case.hidden,
        heads=case.heads,
        head_size=head_size,
        value_size=head_size,
        projections=((case.hidden, case.heads * head_size + key_value_width),),
        key_value_width=key_value_width,
        experts=case.experts,
        topk=case.topk,
        ffn=case.ffn,
        gated=case.activation == "swiglu",
        shared_ffn=case.shared_ffn,
        capacity=case.capacity,
        dtype=case.dtype,
        fused_gradients=fused_gradients,
        grouped=case.expert_kind != "sequential",
        expert=num_ranks,
        splits_weights=case.expert_kind == "sequential",
    )
