"""The step that trains a small model with Megatron's own loop on the GPU: stock, in chunks, with partners.

A separate process: ``python -m gpu_check.trained``. One rank, fp32, so that losses can be compared. Started
by :mod:`.steps`.
"""

from __future__ import annotations

import argparse
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from megatron_ampipe.errors import DifferenceFound, RunFailed
from megatron_ampipe.tools.measuring import result

ITERATIONS = 8
TOLERANCE = 1e-4
"""Relative, of losses: training amplifies the rounding in which the runs differ (measured 2e-5 in five
iterations)."""
VARIANTS = {"stock": "", "degree 4": "--ampipe-degree 4", "partners": "--ampipe-partner"}
_TRAINING = f"""
--num-layers 4 --hidden-size 1024 --ffn-hidden-size 2048 --num-attention-heads 16 --seq-length 2048
--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 4 --lr 1e-5
--train-iters {ITERATIONS} --eval-iters 0 --eval-interval 100 --log-interval 1
--tokenizer-type NullTokenizer --vocab-size 1023 --mock-data
--num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --disable-bias-linear --swiglu
--position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 --transformer-impl local
--no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion --no-bias-dropout-fusion
--no-bias-swiglu-fusion --no-rope-fusion
"""
_LINE = re.compile(
    r"iteration +\d+/.*elapsed time per iteration \(ms\): ([0-9.]+).*lm loss: ([0-9.E+-]+)"
    r".*load_balancing_loss: ([0-9.E+-]+)"
)


def main() -> int:
    """Train each kind, one after another, and write what was found."""
    parser = argparse.ArgumentParser(prog="trained", description="Train a small model on this machine's GPU.")
    parser.add_argument("--json", type=Path, required=True, help="receives losses and times")
    parser.add_argument("--arguments", default="", help="more of Megatron's, for tests of this")
    chosen = parser.parse_args()
    found = {name: _train(f"{words} {chosen.arguments}") for name, words in VARIANTS.items()}
    differences = {
        name: max(map(_difference, found["stock"]["losses"], of_kind["losses"]))
        for name, of_kind in found.items()
    }
    result.write({"kinds": found, "differences": differences, "allowed": TOLERANCE}, chosen.json)
    return DifferenceFound.exit_code if max(differences.values()) > TOLERANCE else 0


def _train(words: str) -> dict[str, Any]:
    """The losses of every iteration, and the median of its milliseconds without the first two."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"),
        *("-m", "megatron_ampipe.pretrain_gpt", *shlex.split(_TRAINING), *shlex.split(words)),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)
    lines = [tuple(map(float, line.groups())) for line in _LINE.finditer(done.stdout)]
    if done.returncode != 0 or not lines:
        raise RunFailed(f"a training with '{words.strip()}' ended with {done.returncode}")
    return {
        "losses": [losses for _, *losses in lines],
        "ms": statistics.median(ms for ms, *_ in lines[2:] or lines),
    }


def _difference(expected: list[float], found: list[float]) -> float:
    return max(abs(one - other) / abs(one) for one, other in zip(expected, found, strict=True))


if __name__ == "__main__":
    sys.exit(main())
