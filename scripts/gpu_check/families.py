"""The trainings of the GPU check: what each family adds to Megatron's arguments. See :mod:`.trained`."""

from __future__ import annotations

from dataclasses import dataclass

ITERATIONS = 8


@dataclass(frozen=True, slots=True)
class Family:
    """Trainings that differ in AMPipe alone.

    Attributes:
        words: Megatron's arguments, in addition to those of all families.
        kinds: Further arguments of each training with AMPipe.
        tolerance: Largest relative difference of the language model's losses from the stock training's over
            all iterations.
        norm_tolerance: Largest relative difference of a gradient norm.
        needs: Modules that it imports.
        ranks: Processes of each training, all on one device.
        exceeds: Kinds in which one step exceeds a budget of fixed rows, see :mod:`.small_budget`.
    """

    words: str
    kinds: dict[str, str]
    tolerance: float
    norm_tolerance: float
    needs: tuple[str, ...] = ()
    ranks: int = 1
    exceeds: tuple[str, ...] = ()

    @property
    def allowed(self) -> list[float]:
        """Limits of relative differences, in the order of :data:`COMPARED`."""
        # Rounding decides between experts, which the losses of balance count.
        return [self.tolerance, 10 * self.tolerance, FIRST_LOSS_TOLERANCE, self.norm_tolerance]


COMPARED = ("losses", "losses of balance", "first loss", "gradient norms")
"""What a training is compared by."""
FIRST_LOSS_TOLERANCE = 1e-5
"""Of the first loss, before any update. On an H200 2e-7 in fp32, bf16 and FP8 (docs/log/2026-11-26.md)."""
_IN_FP32 = (1e-5, 1e-4)
_IN_BF16 = (1e-3, 1e-2)
"""Tolerances of losses and of gradient norms. That of norms in bf16 has not been measured on a GPU; a
gradient that is counted once per chunk, or not at all, is far beyond it."""


_AS_WRITTEN = (
    "--num-layers 4 --transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm "
    "--no-masked-softmax-fusion --no-bias-dropout-fusion --no-bias-swiglu-fusion --no-rope-fusion "
)
_FUSED = (
    "--transformer-impl transformer_engine --bf16 --moe-grouped-gemm --moe-permute-fusion "
    "--moe-router-fusion --moe-router-dtype fp32 --no-gradient-accumulation-fusion "
    "--cross-entropy-loss-fusion --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--use-precision-aware-optimizer --main-grads-dtype fp32 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 "
)
_EXCEEDED = "degree 2, whole graphs, one budget exceeded"
_FIXED = "--ampipe-rows fixed --cuda-graph-warmup-steps 1"
_IN_CHUNKS = {"degree 4": "--ampipe-degree 4", "partners": "--ampipe-partner"}
_DELAYED = {"weight gradients apart": "--ampipe-degree 4 --ampipe-schedule joined"}
_ENGINE = ("transformer_engine.pytorch",)
FAMILIES = {
    # Training amplifies the rounding in which the runs differ. Measured on an H200 in eight iterations: 2e-7,
    # and in 16 and 8 bits 3e-4.
    "local": Family(_AS_WRITTEN, _IN_CHUNKS, *_IN_FP32),
    "Megatron-FSDP": Family(
        _AS_WRITTEN + "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
        "--use-distributed-optimizer --ckpt-format fsdp_dtensor --untie-embeddings-and-output-weights "
        "--calculate-per-token-loss",
        {"degree 4": "--ampipe-degree 4"},
        *_IN_FP32,
    ),
    "Transformer Engine": Family(
        _FUSED + "--num-layers 4",
        {
            **_IN_CHUNKS,
            **_DELAYED,
            "recompute": "--ampipe-degree 4 --recompute-granularity selective "
            "--recompute-modules layernorm moe_act",
            "memory": "--ampipe-degree 4 --ampipe-memory rebuild",
            "CUDA graphs": "--ampipe-degree 4 --cuda-graph-impl transformer_engine "
            "--cuda-graph-modules attn moe_router moe_preprocess",
        },
        *_IN_BF16,
        _ENGINE,
    ),
    "hybrid model": Family(
        _FUSED + "--hybrid-layer-pattern *EE*-E --normalization RMSNorm",
        _IN_CHUNKS,
        *_IN_BF16,
        _ENGINE,
    ),
    "gated delta net": Family(
        _FUSED + "--num-layers 4 --experimental-attention-variant gated_delta_net --linear-attention-freq 4 "
        "--normalization RMSNorm --linear-num-key-heads 8 --linear-num-value-heads 16",
        {"degree 4": "--ampipe-degree 4"},
        *_IN_BF16,
        (*_ENGINE, "fla"),
    ),
    "two ranks": Family(
        _AS_WRITTEN + "--expert-model-parallel-size 2",
        {
            "degree 2": "--ampipe-degree 2",
            **_IN_CHUNKS,
            "CUDA graphs": "--ampipe-degree 4 --cuda-graph-impl local "
            "--cuda-graph-modules attn moe_router moe_preprocess",
        },
        *_IN_FP32,
        ranks=2,
    ),
    # Transformer Engine's issue 3437: without fusion, delayed weight gradients of several calls are added.
    "two ranks, weight gradients": Family(
        _FUSED + "--num-layers 4 --expert-model-parallel-size 2",
        {
            "lancet, degree 2": "--ampipe-degree 2 --ampipe-schedule lancet",
            "joined, degree 2": "--ampipe-degree 2 --ampipe-schedule joined",
        },
        *_IN_BF16,
        _ENGINE,
        ranks=2,
    ),
    # On a GPU, fixed rows need bf16.
    "two ranks, fixed rows": Family(
        _AS_WRITTEN + "--expert-model-parallel-size 2 --bf16 --moe-router-dtype fp32",
        {
            "degree 2, exact rows": "--ampipe-degree 2",
            _EXCEEDED: f"--ampipe-degree 2 {_FIXED} --cuda-graph-impl local",
            "degree 4, whole graphs": f"--ampipe-degree 4 {_FIXED} --cuda-graph-impl local",
        },
        *_IN_BF16,
        ranks=2,
        exceeds=(_EXCEEDED,),
    ),
    "two ranks, FP8": Family(
        _FUSED + "--num-layers 4 --expert-model-parallel-size 2 --fp8-format e4m3 --fp8-recipe blockwise",
        {"degree 2": "--ampipe-degree 2", **_IN_CHUNKS},
        *_IN_BF16,
        _ENGINE,
        ranks=2,
    ),
    "four ranks, pipeline": Family(
        _AS_WRITTEN + "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 1",
        _IN_CHUNKS,
        *_IN_FP32,
        ranks=4,
    ),
    "FP8": Family(
        _FUSED + "--num-layers 4 --fp8-format e4m3 --fp8-recipe blockwise",
        _IN_CHUNKS | _DELAYED,
        *_IN_BF16,
        _ENGINE,
    ),
}
TRAINING = f"""
--hidden-size 1024 --ffn-hidden-size 2048 --num-attention-heads 16 --seq-length 2048
--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 4 --lr 1e-5
--train-iters {ITERATIONS} --eval-iters 0 --eval-interval 100 --log-interval 1
--tokenizer-type NullTokenizer --vocab-size 1023 --mock-data
--num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --disable-bias-linear --swiglu
--position-embedding-type rope --hidden-dropout 0 --attention-dropout 0
"""
