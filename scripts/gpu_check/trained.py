"""Trains a small model with Megatron's own loop on the GPU, stock and with AMPipe, and compares the losses.

A separate process for each family: ``python -m gpu_check.trained FAMILY``. One rank. All kinds of a family
run at the same time, so nothing is timed. Started by :mod:`.steps`.
"""

from __future__ import annotations

import argparse
import math
import operator
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_check.families import FAMILIES, TRAINING
from megatron_ampipe.errors import DifferenceFound, RunFailed
from megatron_ampipe.tools.measuring import result

STOCK = "stock"
_LINE = re.compile(
    r"iteration +\d+/.*lm loss: ([0-9.E+-]+).*load_balancing_loss: ([0-9.E+-]+).*grad norm: ([0-9.]+|nan|inf)"
)
_LAST_DIGIT_OF_NORM = 1.001e-3
"""Megatron prints gradient norms with three decimals."""
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
    allowed = family.allowed
    document: dict[str, Any] = {
        "family": chosen.family,
        "losses": {STOCK: stock} | ended,
        "differences": differences,
        "failed": failed,
        "allowed": allowed,
    }
    result.write(document, chosen.json)
    if not all(all(map(operator.le, found, allowed)) for found in differences.values()):
        return DifferenceFound.exit_code
    return RunFailed.exit_code if failed else 0


def _train(kind: str, words: str) -> list[list[float]] | str:
    """Of every iteration both losses and the norm of all gradients, or why there are none."""
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
    """What :attr:`.families.Family.allowed` limits: relative, each the largest of all iterations it is about.

    The first iteration's losses come before any update, and its gradients from equal weights. Later ones also
    show what an update with wrong gradients has done.
    """
    of_model, of_balance, norms = (
        [(of_stock[place], of_kind[place]) for of_stock, of_kind in zip(expected, found, strict=True)]
        for place in range(3)
    )
    return [
        max(_relative(*pair) for pair in of_model),
        max(_relative(*pair) for pair in of_balance),
        _relative(*of_model[0]),
        max(_relative(*pair, printed=_LAST_DIGIT_OF_NORM) for pair in norms),
    ]


def _relative(expected: float, found: float, *, printed: float = 0.0) -> float:
    """The relative difference, less what the last printed digit leaves open; infinite for NaN."""
    difference = abs(expected - found)
    if math.isnan(difference):
        return math.inf
    return max(0.0, difference - printed) / abs(expected)


if __name__ == "__main__":
    sys.exit(main())
