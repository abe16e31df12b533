"""What every flag of Megatron's MoE layers does in chunks, and by what that is known, as data.

``SAME`` flags do what they do in Megatron's layers. Means:

- ``parity``: a case of ``tests/dist/cases.py`` sets it, or its field in Megatron's configuration;
- ``PATH: TEXT``: the file with this text tests it;
- ``becomes FLAG``: Megatron turns it into another flag;
- ``outside: WHY``: no stage depends on it;
- ``reading: WHY``: nothing here runs it. It needs a GPU.

``PUT_ASIDE`` flags are switched off (``launch.flags.SWITCHED_OFF``). ``REFUSED`` are those with a row in
``launch.refusals.REFUSALS``, or those that do nothing without a flag that has one.
"""

_MODULE = "reading: modules that a stage calls read it"
_LIBRARY = "reading: a number for the library of the flex dispatcher, which Megatron's own code gives to it"
_AFTER = "outside: what Megatron does with a checkpoint"
_INFERENCE = "outside: inference runs Megatron's layers"
_TRACE = "reading: Megatron traces routers by hooks, which a block calls once (parity cases of replay)"

SAME = {
    "--num-experts": "tests/dist/blocks.py: num_moe_experts",
    "--moe-layer-freq": "tests/megatron/trainings.py: --moe-layer-freq",
    "--moe-use-upcycling": _AFTER,
    "--moe-upcycling-granularity": _AFTER,
    "--moe-router-load-balancing-type": "parity",
    "--moe-aux-loss-coeff": "parity",
    "--expert-model-parallel-size": "parity",
    "--expert-tensor-parallel-size": "parity",
    "--use-transformer-engine-op-fuser": _MODULE,
    "--moe-shared-expert-intermediate-size": "parity",
    "--moe-shared-expert-gate": "parity",
    "--use-grouped-gemm-for-shared-expert": _MODULE,
    "--moe-shared-expert-glu-interleave-size": _MODULE,
    "--moe-ffn-hidden-size": "tests/dist/test_memory.py: moe_ffn_hidden_size",
    "--moe-router-topk": "parity",
    "--moe-enable-routing-replay": "tests/dist/blocks.py: moe_enable_routing_replay",
    "--moe-router-num-groups": "parity",
    "--moe-router-group-topk": "parity",
    "--moe-router-pre-softmax": "tests/dist/blocks.py: moe_router_pre_softmax",
    "--moe-router-topk-scaling-factor": "parity",
    "--moe-router-score-function": "parity",
    "--moe-router-dtype": "parity",
    "--moe-router-enable-expert-bias": "parity",
    "--moe-router-bias-update-rate": "outside: Megatron updates the bias after a step",
    "--moe-router-quantile-balancing-ema": _MODULE,
    "--moe-router-force-load-balancing": "tests/megatron/test_training.py: --moe-router-force-load-balancing",
    "--moe-grouped-gemm": _MODULE,
    "--moe-single-grouped-weight": _MODULE,
    "--moe-single-grouped-bias": _MODULE,
    "--moe-z-loss-coeff": "parity",
    "--moe-input-jitter-eps": "tests/dist/test_random.py: moe_input_jitter_eps",
    "--moe-token-dispatcher-type": "parity",
    "--moe-enable-deepep": "becomes --moe-flex-dispatcher-backend",
    "--moe-flex-dispatcher-backend": "parity",
    "--moe-permute-fusion-into-hybridep": "parity",
    "--moe-per-layer-logging": "outside: Megatron prints what routers have logged",
    "--moe-expert-capacity-factor": "parity",
    "--moe-pad-expert-input-to-capacity": "parity",
    "--moe-expert-rank-capacity-factor": "tests/dist/test_flex_budget.py: moe_expert_rank_capacity_factor",
    "--moe-pad-experts-for-cuda-graph-inference": _INFERENCE,
    "--moe-token-drop-policy": "parity",
    "--moe-layer-recompute": "becomes --recompute-modules",
    "--moe-permute-fusion": "parity",
    "--moe-router-fusion": "parity",
    "--moe-apply-probs-on-input": _MODULE,
    "--moe-latent-size": "parity",
    "--moe-flex-dispatcher-num-sms": _LIBRARY,
    "--moe-deepep-num-sms": _LIBRARY,
    "--moe-hybridep-num-sms": _LIBRARY,
    "--moe-hybridep-num-blocks-permute": _LIBRARY,
    "--moe-hybridep-num-blocks-unpermute": _LIBRARY,
    "--moe-hybridep-num-sms-preprocessing": _LIBRARY,
    "--moe-mlp-glu-interleave-size": _MODULE,
    "--inference-moe-disable-fused-quant-kernels": _INFERENCE,
    "--inference-moe-token-dispatcher-type": _INFERENCE,
    "--rl-inference-expert-model-parallel-size": _INFERENCE,
    "--rl-inference-expert-tensor-model-parallel-size": _INFERENCE,
    "--moe-routing-trace-path": _TRACE,
    "--moe-routing-trace-max-training-iters": _TRACE,
    "--moe-routing-trace-capture-logits": _TRACE,
    "--moe-routing-trace-capture-hidden-states": _TRACE,
    "--moe-routing-trace-dump-weights": _TRACE,
}
PUT_ASIDE = {
    "--overlap-moe-expert-parallel-comm",
    "--overlap-dispatch-backward-with-experts-wgrad",
    "--moe-shared-expert-overlap",
    "--moe-router-padding-for-quantization",
    "--moe-router-padding-for-fp8",
}
REFUSED = {
    "--moe-router-force-biased": "--moe-router-force-biased",
    "--expert-tensor-parallel-num-weight-shards": "--expert-tensor-parallel-num-weight-shards",
    "--moe-hybridep-pad-uneven-dispatch-inputs": "--moe-token-dispatcher-type",
    "--moe-ncclep-static-shape": "--moe-flex-dispatcher-backend",
    "--moe-ncclep-zero-copy": "--moe-flex-dispatcher-backend",
    "--save-tokens-per-expert-interval": "--save-tokens-per-expert-interval",
    "--moe-paged-stash": "--moe-paged-stash",
    "--moe-paged-stash-page-size": "--moe-paged-stash",
    "--moe-paged-stash-buffer-size-factor-cuda": "--moe-paged-stash",
    "--moe-paged-stash-buffer-size-factor-cpu": "--moe-paged-stash",
}
"""Each with the flag whose row it is."""
