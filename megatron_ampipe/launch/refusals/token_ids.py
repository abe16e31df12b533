"""What is refused with a router that reads the ids of tokens, at any degree."""

from __future__ import annotations

from megatron_ampipe.launch.refusals.refusal import Refusal

_OTHER_ROUTER = "Leave it out, or use a router that reads hidden states, such as --ampipe-router cosine."


TOKEN_ID_REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "--pipeline-model-parallel-size",
        "the ids of tokens are read for the first pipeline stage alone",
        "Use --pipeline-model-parallel-size 1, or a router that reads hidden states: --ampipe-router cosine.",
        lambda args: args.pipeline_model_parallel_size > 1,
    ),
    Refusal(
        "--mtp-num-layers",
        "layers of multi-token prediction embed later tokens than those whose ids a router gets",
        _OTHER_ROUTER,
    ),
    Refusal(
        "--overlap-moe-expert-parallel-comm",
        "a model runs two micro-batches at once, and its routers get the ids of one",
        "Leave it out; --ampipe-degree 2 overlaps the same exchanges within a micro-batch.",
    ),
    Refusal(
        "--cuda-graph-impl",
        "a captured graph would read the ids of the micro-batch with which it was captured",
        "Use --cuda-graph-impl none.",
        lambda args: args.cuda_graph_impl != "none",
    ),
    Refusal(
        "--mlp-chunks-for-training",
        "Megatron routes parts of a sequence, and does not say which",
        _OTHER_ROUTER,
        lambda args: args.mlp_chunks_for_training > 1,
    ),
)
"""Combinations that are refused with a router that reads token ids, at any degree."""
