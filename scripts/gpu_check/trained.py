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
from pathlib import Path
from typing import Any

from gpu_check.families import FAMILIES, TRAINING
from megatron_ampipe.errors import DifferenceFound, RunFailed
from megatron_ampipe.tools.measuring import result

STOCK = "stock"
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
