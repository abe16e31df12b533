"""Trains with condensed tokens and with fp8 on the wire, next to exact training: table and picture.

Four layers of the quick start's model, made smaller (hidden size 64, sequences of 256 bytes in two chunks),
on the quick start's text, one process for each training, one after the other. Trainings of one seed see the
same text in the same order. What is in the file already is not trained again.

    ampipe data --output runs/stdlib
    python docs/measured/condense.py train runs/stdlib docs/measured/results/condense.json [SEED ...]
    python docs/measured/condense.py show docs/measured/results/condense.json docs/images/condense.png
"""

from __future__ import annotations

import json
import os
import re
import socket
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SETTINGS = {
    "exact": (),
    "condense 0.99": ("--ampipe-condense", "0.99"),
    "wire fp8": ("--ampipe-wire", "fp8"),
    "condense 0.9": ("--ampipe-condense", "0.9"),
    "condense 0.999": ("--ampipe-condense", "0.999"),
    "condense 0.97": ("--ampipe-condense", "0.97"),
    "condense 0.95": ("--ampipe-condense", "0.95"),
}
SEEDS = (1, 2, 3)
ITERATIONS, INTERVAL = 2000, 50
LAST = 4
"""How many intervals at the end the final loss is the mean of."""
FLAGS = [
    *("--ampipe-config", "tiny", "--ampipe-degree", "2", "--hidden-size", "64", "--ffn-hidden-size", "128"),
    *("--seq-length", "256", "--max-position-embeddings", "256", "--split", "99,1,0"),
    *("--micro-batch-size", "1", "--global-batch-size", "1", "--lr", "1e-3", "--lr-decay-style", "constant"),
    *("--lr-warmup-iters", "20", "--adam-eps", "1e-5", "--clip-grad", "1.0"),
    *("--eval-interval", "1000000", "--eval-iters", "0"),
]
_LOSS = re.compile(r"iteration +(\d+)/.* lm loss: (\S+) \|")
_SHARE = re.compile(r"ampipe at iteration +(\d+) .*condensed share: ([0-9.]+)")


def main() -> None:
    """Train or show, as the command line says."""
    if sys.argv[1] == "train":
        train(sys.argv[2], Path(sys.argv[3]), [int(seed) for seed in sys.argv[4:]] or SEEDS)
    else:
        show(json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3]))


def train(data: str, output: Path, seeds: Sequence[int]) -> None:
    """Run what the file does not have yet; add each training to it. Several may run at once."""
    for seed in seeds:
        for name, flags in SETTINGS.items():
            key = f"{name}, seed {seed}"
            if key in _read(output)["runs"]:
                continue
            run = {"setting": name, "seed": seed, **_run([*flags, "--seed", str(seed)], data)}
            found = _read(output)
            found["runs"][key] = run
            output.write_text(json.dumps(found) + "\n")


def _read(output: Path) -> dict[str, Any]:
    if output.exists():
        found: dict[str, Any] = json.loads(output.read_text())
        return found
    return {"flags": FLAGS, "iterations": ITERATIONS, "interval": INTERVAL, "runs": {}}


def _run(flags: list[str], data: str) -> dict[str, list[float]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    one = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    done = subprocess.run(
        [
            *(sys.executable, "-m", "megatron_ampipe.pretrain_gpt", *FLAGS, *flags),
            *("--train-iters", str(ITERATIONS), "--log-interval", str(INTERVAL)),
            *("--data-path", data, "--data-cache-path", f"{data}-cache"),
        ],
        env={**os.environ, **one, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
    losses = {int(iteration): float(loss) for iteration, loss in _LOSS.findall(done.stdout)}
    shares = {int(iteration): float(share) for iteration, share in _SHARE.findall(done.stdout)}
    logged = range(INTERVAL, ITERATIONS + 1, INTERVAL)
    return {
        "lm_loss": [losses[i] for i in logged],
        "condensed_share": [shares[i] for i in logged if i in shares],
    }


def final_loss(run: dict[str, Any]) -> float:
    """The mean loss of the last intervals."""
    return statistics.fmean(run["lm_loss"][-LAST:])


def show(found: dict[str, Any], picture: Path) -> None:
    """Print the table, draw the curves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = list(found["runs"].values())
    exact = {run["seed"]: final_loss(run) for run in runs if run["setting"] == "exact"}
    print(f"exact training, final loss by seed: {', '.join(f'{loss:.4f}' for loss in exact.values())}")
    print(
        "| setting | seeds | rows not sent | final loss | difference from exact training of the same seed |"
    )
    print("|---|---|---|---|---|")
    figure, (curves, final) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name in sorted(SETTINGS, key=lambda name: (name.split()[0] != "exact", name)):
        of_setting = [run for run in runs if run["setting"] == name]
        if not of_setting:
            continue
        losses = [final_loss(run) for run in of_setting]
        apart = [final_loss(run) - exact[run["seed"]] for run in of_setting]
        shares = [statistics.fmean(run["condensed_share"] or [0.0]) for run in of_setting]
        share = statistics.fmean(shares)
        print(
            f"| {name} | {len(losses)} | {share:.1%} | {statistics.fmean(losses):.4f} | "
            f"{', '.join(f'{difference:+.4f}' for difference in apart) if name != 'exact' else ''} |"
        )
        steps = range(INTERVAL, ITERATIONS + 1, INTERVAL)
        mean = [
            statistics.fmean(values) for values in zip(*(run["lm_loss"] for run in of_setting), strict=True)
        ]
        (line,) = curves.plot(steps, mean, label=name, linewidth=1)
        final.scatter([100 * s for s in shares], losses, color=line.get_color(), label=name, s=18)
    curves.set(xlabel="iteration", ylabel=f"lm loss, mean of {INTERVAL} iterations and the seeds")
    final.set(xlabel="rows not sent, %", ylabel=f"lm loss, mean of the last {LAST * INTERVAL} iterations")
    curves.legend(fontsize=8)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main()
