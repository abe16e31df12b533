"""Trains a small model with Megatron's own loop on the GPU, stock and with AMPipe, and compares the losses.

A separate process for each family: ``python -m gpu_check.trained FAMILY``. One rank. All kinds of a family
run at the same time, so nothing is timed. Started by :mod:`.steps`.
"""

from __future__ import annotations

import argparse
import operator
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ampipe.errors import DifferenceFound, RunFailed

ITERATIONS = 8
STOCK = "stock"


@dataclass(frozen=True, slots=True)
class Family:
    """Trainings that differ in AMPipe alone.

    Attributes:
        words: Megatron's arguments, in addition to those of all families.
        kinds: Further arguments of each training with AMPipe.
        tolerance: Largest relative difference of the language model's losses from the stock training's; ten
            times as much is allowed of those of balance, for which rounding decides between experts.
        needs: Modules that it imports.
    """

    words: str
    kinds: dict[str, str]
    tolerance: float
    needs: tuple[str, ...] = ()


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
_IN_CHUNKS = {"degree 4": "--ampipe-degree 4", "partners": "--ampipe-partner"}
_DELAYED = {"weight gradients apart": "--ampipe-degree 4 --ampipe-schedule joined"}
_ENGINE = ("transformer_engine.pytorch",)
FAMILIES = {
    # Training amplifies the rounding in which the runs differ. Measured on an H200 in eight iterations: 2e-7,
    # and in 16 and 8 bits 3e-4 (2e-7 in the first).
    "local": Family(_AS_WRITTEN, _IN_CHUNKS, 1e-5),
    "Megatron-FSDP": Family(
        _AS_WRITTEN + "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
        "--use-distributed-optimizer --ckpt-format fsdp_dtensor --untie-embeddings-and-output-weights "
        "--calculate-per-token-loss",
        {"degree 4": "--ampipe-degree 4"},
        1e-5,
    ),
    "Transformer Engine": Family(
        _FUSED + "--num-layers 4",
        {
            **_IN_CHUNKS,
            **_DELAYED,
            "recompute": "--ampipe-degree 4 --recompute-granularity selective "
            "--recompute-modules layernorm moe_act",
            "CUDA graphs": "--ampipe-degree 4 --cuda-graph-impl transformer_engine "
            "--cuda-graph-modules attn moe_router moe_preprocess",
        },
        1e-3,
        _ENGINE,
    ),
    "hybrid model": Family(
        _FUSED + "--hybrid-layer-pattern *EE*-E --normalization RMSNorm",
        _IN_CHUNKS,
        1e-3,
        _ENGINE,
    ),
    "FP8": Family(
        _FUSED + "--num-layers 4 --fp8-format e4m3 --fp8-recipe blockwise",
        _IN_CHUNKS | _DELAYED,
        1e-3,
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
_LINE = re.compile(r"iteration +\d+/.*lm loss: ([0-9.E+-]+).*load_balancing_loss: ([0-9.E+-]+)")
_REASON = re.compile(
    r"^(?:\[rank\d+\]: )?(\w+(?:Error|Exception|Missing|Input|Refused): .*|ampipe: .*)", re.M
)


def main() -> int:
    """Train each kind of a family, and write what was found."""
    parser = argparse.ArgumentParser(prog="trained", description="Train a small model on this machine's GPU.")
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--json", type=Path, required=True, help="receives the losses")
    parser.add_argument("--arguments", default="", help="more of Megatron's, for tests of this")
    chosen = parser.parse_args()
    family = FAMILIES[chosen.family]
    kinds = {STOCK: ""} | family.kinds
    with ThreadPoolExecutor(len(kinds)) as pool:
        trained = pool.map(
            lambda kind: _train(kind, f"{family.words} {kinds[kind]} {chosen.arguments}"), kinds
        )
        losses = dict(zip(kinds, trained, strict=True))
    ended = {name: of_kind for name, of_kind in losses.items() if not isinstance(of_kind, str)}
    failed = {name: why for name, why in losses.items() if isinstance(why, str)}
    stock = ended.pop(STOCK, None)
    if stock is None:
        raise RunFailed(f"stock, {chosen.family}: {failed[STOCK]}")
    differences = {name: _differences(stock, of_kind) for name, of_kind in ended.items()}
    allowed = [family.tolerance, 10 * family.tolerance]
    document: dict[str, Any] = {
        "family": chosen.family,
        "losses": {STOCK: stock} | ended,
        "differences": differences,
        "failed": failed,
        "allowed": allowed,
    }
    # The steps are read before what this needs is unpacked.
    from megatron_ampipe.tools.measuring import result

    result.write(document, chosen.json)
    if not all(all(map(operator.le, found, allowed)) for found in differences.values()):
        return DifferenceFound.exit_code
    return RunFailed.exit_code if failed else 0


def _train(kind: str, words: str) -> list[list[float]] | str:
    """The losses of every iteration, or why there are none."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"),
        *("-m", "megatron_ampipe.pretrain_gpt", *shlex.split(TRAINING), *shlex.split(words)),
    ]
    print(f"{kind}: {shlex.join(command)}", flush=True)
    lines = []
    # Where Transformer Engine is installed, Megatron's routers would multiply fp32 in TF32.
    environment = os.environ | {"NVIDIA_TF32_OVERRIDE": "0"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            print(f"{kind}: {line}", end="", flush=True)
    said = "".join(lines)
    losses = [[float(loss) for loss in line.groups()] for line in _LINE.finditer(said)]
    if process.returncode == 0 and losses:
        return losses
    reasons = _REASON.findall(said) or [line.strip() for line in lines[-1:]]
    return f"ended with {process.returncode}: {''.join(reasons[:1])[:200]}"


def _differences(expected: list[list[float]], found: list[list[float]]) -> list[float]:
    """The largest relative one of each kind of loss."""
    pairs = zip(zip(*expected, strict=True), zip(*found, strict=True), strict=True)
    return [max(abs(a - b) / abs(a) for a, b in zip(*of_kind, strict=True)) for of_kind in pairs]


if __name__ == "__main__":
    sys.exit(main())
