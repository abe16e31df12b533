"""Trains a small model with Megatron's own loop on the GPU, stock and with AMPipe, and compares the losses.

A separate process for each family: ``python -m gpu_check.trained FAMILY``. One rank, or several that share
the GPU. Kinds of a family run at the same time, so nothing is timed. Started by :mod:`.steps`.
"""

from __future__ import annotations

import argparse
import math
import operator
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_check import ranks
from gpu_check.families import FAMILIES, TRAINING, Family
from megatron_ampipe.errors import DifferenceFound, RunFailed
from megatron_ampipe.tools.measuring import machine, result

STOCK = "stock"
_LAUNCHES_AT_ONCE = 2
_LINE = re.compile(
    r"iteration +\d+/.*lm loss: ([0-9.E+-]+).*load_balancing_loss: ([0-9.E+-]+).*grad norm: ([0-9.]+|nan|inf)"
)
_REPEATS = re.compile(r"fixed rows: (\d+) steps with budgets, (\d+) of them repeated")
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
    parser.add_argument("--kinds", default="", help="words, separated by commas: kinds whose name has one")
    parser.add_argument("--on", choices=("cuda", "cpu"), default="cuda")
    chosen = parser.parse_args()
    family, words = FAMILIES[chosen.family], chosen.kinds.split(",")
    kinds = {name: more for name, more in family.kinds.items() if any(word in name for word in words)}
    kinds = {STOCK: ""} | kinds
    nccl = ranks.installed_nccl() if family.ranks > 1 and chosen.on == "cuda" else None
    # Ranks that wait for one another take turns on the device.
    at_once = len(kinds) if family.ranks == 1 else _LAUNCHES_AT_ONCE
    with ThreadPoolExecutor(at_once) as pool:
        trained = pool.map(
            lambda kind: _train(kind, f"{family.words} {kinds[kind]} {chosen.arguments}", family, nccl),
            kinds,
        )
        losses = dict(zip(kinds, trained, strict=True))
    ended = {name: found.losses for name, found in losses.items() if not isinstance(found, str)}
    repeats = {
        name: found.repeats
        for name, found in losses.items()
        if not isinstance(found, str) and found.repeats is not None
    }
    failed = {name: why for name, why in losses.items() if isinstance(why, str)}
    stock = ended.pop(STOCK, None)
    if stock is None:
        raise RunFailed(f"stock, {chosen.family}: {failed[STOCK]}")
    differences = {name: _differences(stock, of_kind) for name, of_kind in ended.items()}
    allowed = family.allowed
    document: dict[str, Any] = {
        "family": chosen.family,
        "versions": machine.versions(),
        "losses": {STOCK: stock} | ended,
        "differences": differences,
        "failed": failed,
        "allowed": allowed,
        "repeats": repeats,
    }
    result.write(document, chosen.json)
    if not all(all(map(operator.le, found, allowed)) for found in differences.values()):
        return DifferenceFound.exit_code
    return RunFailed.exit_code if failed else 0


@dataclass(frozen=True, slots=True)
class Trained:
    """A training that has ended well.

    Attributes:
        losses: Of every iteration both losses and the norm of all gradients.
        repeats: With fixed rows, how many steps had budgets, and how many of them were repeated.
    """

    losses: list[list[float]]
    repeats: tuple[int, int] | None


def _train(kind: str, words: str, family: Family, nccl: tuple[int, int] | None) -> Trained | str:
    """What a training has logged, or why it has failed."""
    exceeds = kind in family.exceeds
    num_ranks = family.ranks
    entry = "gpu_check.small_budget" if exceeds else "megatron_ampipe.pretrain_gpt"
    training = ("-m", entry, *shlex.split(TRAINING), *shlex.split(words))
    # Where Transformer Engine is installed, Megatron's routers would multiply fp32 in TF32.
    more = {"NVIDIA_TF32_OVERRIDE": "0"}
    if num_ranks > 1:
        code, said = _train_on_ranks(kind, training, num_ranks, nccl, more)
    else:
        code, said = _train_alone(kind, training, more)
    losses = [[float(loss) for loss in line.groups()] for line in _LINE.finditer(said)]
    if code == 0 and losses:
        repeats = _repeats(said)
        if exceeds and (repeats is None or repeats[1] != 1):
            return f"one step should have been repeated; steps with budgets, and repeated ones: {repeats}"
        return Trained(losses, repeats)
    reasons = _REASON.findall(said) or [line.strip() for line in said.splitlines()[-1:]]
    return f"ended with {code}: {''.join(reasons[:1])[:200]}"


def _repeats(said: str) -> tuple[int, int] | None:
    """How many steps had budgets, and how many of them were repeated, as a training says in the end."""
    found = _REPEATS.search(said)
    return None if found is None else (int(found[1]), int(found[2]))


def _train_alone(kind: str, training: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """The exit code, and all that it said."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    command = [*launcher, *training]
    print(f"{kind}: {shlex.join(command)}", flush=True)
    lines = []
    with subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            print(f"{kind}: {line}", end="", flush=True)
    return process.returncode, "".join(lines)


def _train_on_ranks(
    kind: str,
    training: Sequence[str],
    num_ranks: int,
    nccl: tuple[int, int] | None,
    environment: Mapping[str, str],
) -> tuple[int, str]:
    """Likewise of several ranks, started without torchrun: to it, ranks of a device would be an error."""
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = str(free.getsockname()[1])
        meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, **environment}
        timeout = ("--distributed-timeout-minutes", "1")
        launch = ranks.Launch((sys.executable, *training, *timeout), num_ranks, nccl, Path(folder), meeting)
        processes = launch.start()
        try:
            while None in (codes := [process.poll() for process in processes]):
                if any(codes):
                    # The others notice, or are ended.
                    time.sleep(ranks.GRACE_S)
                    break
                time.sleep(0.1)
        finally:
            ranks.end(processes)
        said = [launch.log(rank).read_text(errors="replace") for rank in range(num_ranks)]
    for rank, text in enumerate(said):
        print(f"--- {kind}, rank {rank}\n{text}", flush=True)
    wrong = [process.returncode for process in processes if process.returncode]
    return (wrong or [0])[0], "\n".join(said)


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
