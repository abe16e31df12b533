"""Training runs of every parallel dimension, with AMPipe and without: the same losses and gradient norms.

Each pair of runs is two launches of Megatron's loop with the same mock data and the same seed.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.megatron.launcher import train
from tests.megatron.pairs import assert_resumed, assert_same_digits

PLAIN = ["--attention-dropout", "0", "--hidden-dropout", "0"]
EP = ["--expert-model-parallel-size", "2"]
PP = ["--pipeline-model-parallel-size", "2"]
TP = [
    "--tensor-model-parallel-size", "2", "--sequence-parallel", "--expert-tensor-parallel-size", "1",
]  # fmt: skip
CP = ["--context-parallel-size", "2", "--cp-comm-type", "p2p"]
LATENT = [
    "--multi-latent-attention", "--position-embedding-type", "rope", "--q-lora-rank", "16",
    "--kv-lora-rank", "16", "--qk-head-dim", "16", "--qk-pos-emb-head-dim", "8", "--v-head-dim", "16",
]  # fmt: skip
LLAMA = [
    "--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu",
    "--group-query-attention", "--num-query-groups", "2",
]  # fmt: skip
ALL_OVERLAPS = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]

RUNS = {
    "tp2-pp2-ep2": (8, [*TP, *PP, *EP]),
    "dp2-pp2-ep2": (8, [*PP, *EP, *ALL_OVERLAPS, *LLAMA]),
    "cp2-ep2": (2, [*CP, *EP, *LLAMA]),
    "interleaved": (
        2,
        [
            *PP, "--num-layers", "4", "--num-layers-per-virtual-pipeline-stage", "1",
            "--global-batch-size", "8",
        ],
    ),
    "latent-mtp": (2, [*EP, *LATENT, "--mtp-num-layers", "1"]),
    "tp2-experts-allgather": (
        2,
        [
            "--tensor-model-parallel-size", "2", "--sequence-parallel",
            "--expert-tensor-parallel-size", "2", "--moe-token-dispatcher-type", "allgather",
        ],
    ),
    "recompute-block": (
        2,
        [
            *EP, "--recompute-granularity", "full", "--recompute-method", "block",
            "--recompute-num-layers", "1",
        ],
    ),
}  # fmt: skip

FULL = ["--num-layers", "4", "--recompute-granularity", "full", "--recompute-method"]
RECOMPUTED_STACKS = {
    "uniform": (2, [*EP, *LLAMA, *FULL, "uniform", "--recompute-num-layers", "1"], "every layer"),
    "dense-first-mtp": (
        2,
        [
            *EP, *LLAMA, *FULL, "uniform", "--recompute-num-layers", "1", "--moe-layer-freq", "[0,1,1,1]",
            "--mtp-num-layers", "1",
        ],
        "every layer",
    ),
    "block-interleaved-overlaps": (
        4,
        [
            *PP, *FULL, "block", "--recompute-num-layers", "1", "--num-layers", "8",
            "--num-layers-per-virtual-pipeline-stage", "2", "--global-batch-size", "8", *ALL_OVERLAPS,
            "--ddp-bucket-size", "1000",
        ],
        "first 1 of a stage",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_trains_like_stock(name: str) -> None:
    num_ranks, flags = RUNS[name]
    stock = train(*PLAIN, *flags, num_ranks=num_ranks, timeout_s=800)
    ours = train(*PLAIN, *flags, "--ampipe-degree", "4", num_ranks=num_ranks, timeout_s=800)
    assert_same_digits(stock, ours, iterations=4)


@pytest.mark.parametrize("name", RECOMPUTED_STACKS)
def test_stacks_recompute_like_stock(name: str) -> None:
    num_ranks, flags, layers = RECOMPUTED_STACKS[name]
    stock = train(*PLAIN, *flags, num_ranks=num_ranks, timeout_s=800)
    pipelined = ["--ampipe-degree", "4", "--ampipe-stack", "all"]
    if "--overlap-grad-reduce" in flags:
        pipelined += ["--ampipe-grad-reduce", "placed"]
    ours = train(*PLAIN, *flags, *pipelined, num_ranks=num_ranks, timeout_s=800)
    assert re.search(rf"│ full recompute +│ {layers} ", ours.output)
    assert re.search(r"│ layers per schedule +│ all ", ours.output)
    assert_same_digits(stock, ours, iterations=4)


def test_other_overlaps_are_switched_off() -> None:
    """In fp32 Megatron would refuse the last two, if they were still set when it validates its arguments."""
    shared = [*PLAIN, *EP, "--moe-shared-expert-intermediate-size", "48"]
    overlaps = [
        "--moe-shared-expert-overlap", "--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute",
    ]  # fmt: skip
    stock, ours = train(*shared), train(*shared, *overlaps, "--ampipe-degree", "4")
    assert_same_digits(stock, ours, iterations=4)
    for flag in overlaps:
        assert re.search(rf"│ {flag} +│ switched off: ", ours.output), flag


def test_forced_load_balance_has_the_distribution_of_stock() -> None:
    """The logits are random, so no two runs are equal; the losses agree approximately."""
    flags = [*PLAIN, *EP, "--moe-router-force-load-balancing"]
    stock, ours = train(*flags), train(*flags, "--ampipe-degree", "4")
    assert "routingisrandom,whichisforbenchmarks" in re.sub(r"[\s│]", "", ours.output)
    assert sum(ours.load_balancing_loss) == pytest.approx(sum(stock.load_balancing_loss), rel=0.05)
    assert sum(ours.lm_loss) == pytest.approx(sum(stock.lm_loss), rel=0.01)
    learnt = train(*PLAIN, *EP, "--ampipe-degree", "4")
    assert ours.load_balancing_loss != learnt.load_balancing_loss, "routed by its weights"


def test_checkpoint_of_another_degree_and_layout(tmp_path: Path) -> None:
    """Saved from two ranks at degree 4, continued on two pipeline stages of two ranks at degree 2.

    Expert parallelism is the same: without it, Megatron's optimizer state has different parameter groups.
    """
    flags = [*PLAIN, *LLAMA, "--ckpt-format", "torch_dist", "--lr-decay-style", "constant"]
    unbroken = train(*flags, *EP, "--ampipe-degree", "4", "--save", str(tmp_path), "--save-interval", "2")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = train(
        *flags, *EP, *PP, "--ampipe-degree", "2", "--load", str(tmp_path), "--no-load-rng", num_ranks=4
    )
    assert_resumed(resumed, unbroken, first=3)


def test_fp16_with_loss_scaling() -> None:
    """The losses of 16-bit runs agree to 16-bit rounding, and the number of skipped steps is stock's."""
    flags = [*PLAIN, *EP, "--fp16", "--initial-loss-scale", "1024", "--loss-scale-window", "2"]
    stock, ours = train(*flags), train(*flags, "--ampipe-degree", "4")
    assert ours.lm_loss == pytest.approx(stock.lm_loss, rel=2**-10)
    assert stock.output.count("number of skipped iterations:   0") == ours.output.count(
        "number of skipped iterations:   0"
    )
