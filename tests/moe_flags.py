"""What flags of Megatron's MoE layers do in chunks, and by what that is known, as data.

Not listed are those that a case of ``tests/dist/cases.py`` sets, that ``launch.flags.SWITCHED_OFF`` has, or
that have a row in ``launch.refusals.REFUSALS``. ``SAME`` flags do what they do in Megatron's layers. Means:

- ``PATH: TEXT``: the file with this text tests it;
- ``becomes FLAG``: Megatron turns it into another flag;
- ``outside: WHY``: no stage depends on it;
- ``reading: WHY``: nothing here runs it. It needs a GPU.

``REFUSED`` are others that are refused.
"""

_FLAGS = {
    "tests/dist/blocks.py: num_moe_experts": "--num-experts",
    "tests/megatron/trainings.py: --moe-layer-freq": "--moe-layer-freq",
    "tests/dist/test_memory.py: moe_ffn_hidden_size": "--moe-ffn-hidden-size",
    "tests/dist/blocks.py: moe_enable_routing_replay": "--moe-enable-routing-replay",
    "tests/dist/blocks.py: moe_router_pre_softmax": "--moe-router-pre-softmax",
    "tests/megatron/test_training.py: --moe-router-force-load-balancing": "--moe-router-force-load-balancing",
    "tests/dist/test_random.py: moe_input_jitter_eps": "--moe-input-jitter-eps",
    "tests/dist/test_flex_budget.py: moe_expert_rank_capacity_factor": "--moe-expert-rank-capacity-factor",
    "becomes --moe-flex-dispatcher-backend": "--moe-enable-deepep",
    "becomes --recompute-modules": "--moe-layer-recompute",
    "outside: what Megatron does with a checkpoint": "--moe-use-upcycling --moe-upcycling-granularity",
    "outside: Megatron updates the bias after a step": "--moe-router-bias-update-rate",
    "outside: Megatron prints what routers have logged": "--moe-per-layer-logging",
    "outside: inference runs Megatron's layers": (
        "--moe-pad-experts-for-cuda-graph-inference --inference-moe-disable-fused-quant-kernels "
        "--inference-moe-token-dispatcher-type --rl-inference-expert-model-parallel-size "
        "--rl-inference-expert-tensor-model-parallel-size"
    ),
    "reading: modules that a stage calls read it": (
        "--use-transformer-engine-op-fuser --use-grouped-gemm-for-shared-expert "
        "--moe-shared-expert-glu-interleave-size --moe-router-quantile-balancing-ema --moe-grouped-gemm "
        "--moe-single-grouped-weight --moe-single-grouped-bias --moe-apply-probs-on-input "
        "--moe-mlp-glu-interleave-size"
    ),
    "reading: a number for the library of the flex dispatcher, which Megatron's own code gives to it": (
        "--moe-flex-dispatcher-num-sms --moe-deepep-num-sms --moe-hybridep-num-sms "
        "--moe-hybridep-num-blocks-permute --moe-hybridep-num-blocks-unpermute "
        "--moe-hybridep-num-sms-preprocessing"
    ),
    "reading: Megatron traces routers by hooks, which a block calls once (parity cases of replay)": (
        "--moe-routing-trace-path --moe-routing-trace-max-training-iters "
        "--moe-routing-trace-capture-logits --moe-routing-trace-capture-hidden-states "
        "--moe-routing-trace-dump-weights"
    ),
}
SAME = {flag: means for means, flags in _FLAGS.items() for flag in flags.split()}
REFUSED = {
    "--moe-hybridep-pad-uneven-dispatch-inputs": "--moe-token-dispatcher-type",
    "--moe-ncclep-static-shape": "--moe-flex-dispatcher-backend",
    "--moe-ncclep-zero-copy": "--moe-flex-dispatcher-backend",
    "--moe-paged-stash-page-size": "--moe-paged-stash",
    "--moe-paged-stash-buffer-size-factor-cuda": "--moe-paged-stash",
    "--moe-paged-stash-buffer-size-factor-cpu": "--moe-paged-stash",
}
"""Each with the flag whose row it is, or without which it does nothing."""
