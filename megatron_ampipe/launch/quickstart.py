"""Trains a small GPT-MoE on real text twice, with Megatron's own layers and with AMPipe, and compares.

What ``scripts/quickstart.sh`` runs. Both runs are ordinary ``torchrun -m megatron_ampipe.pretrain_gpt``
launches of ``configs/models/tiny.yaml`` that differ in AMPipe's flags alone; nothing here reaches into them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from megatron_ampipe.errors import AMPipeError, DifferenceFound, RunFailed
from megatron_ampipe.shipped import configs_folder
from megatron_ampipe.timeline import Timeline

REPOSITORY = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-4
"""Largest relative difference of the losses that still counts as the same curve."""
_ITERATION = re.compile(r"iteration\s+(\d+)/\s*\d+ .*?\blm loss: ([0-9.E+-]+)")

CONFIGS = [str(configs_folder() / name) for name in ("models/tiny.yaml", "runs/quickstart.yaml")]
"""What both runs train and how."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both trainings, print them side by side, write ``summary.json``; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="quickstart.sh",
        description="Train a 4-layer GPT-MoE on the source of Python's standard library, with two processes, "
        "once with Megatron's own layers and once with AMPipe from the same seed, and compare the losses.",
    )
    parser.add_argument("--degree", type=int, default=4, help="chunks of the AMPipe run (default: 4)")
    parser.add_argument("--iterations", type=int, default=60, help="training iterations (default: 60)")
    parser.add_argument(
        "--output",
        type=Path,
        default=REPOSITORY / "runs" / "quickstart",
        help="folder for data, logs and results (default: runs/quickstart in the checkout)",
    )
    chosen = parser.parse_args(arguments)
    try:
        return _compare(chosen.output.resolve(), degree=chosen.degree, iterations=chosen.iterations)
    except AMPipeError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("quickstart: interrupted; run it again, the data is kept", file=sys.stderr)
        return 130


def _compare(folder: Path, *, degree: int, iterations: int) -> int:
    console = Console()
    data = folder / "data" / "stdlib"
    _ampipe("data", "--output", str(data))
    traces = folder / "trace"
    common = [
        *("--ampipe-config", *CONFIGS),
        *("--train-iters", str(iterations), "--lr-warmup-iters", str(min(20, iterations // 3))),
        *("--data-path", str(data), "--data-cache-path", str(folder / "data" / "cache")),
    ]
    baseline = train("Megatron", common, log=folder / "baseline.log", iterations=iterations, console=console)
    pipelined = train(
        f"AMPipe, degree {degree}",
        [*common, "--ampipe-degree", str(degree), "--ampipe-trace-dir", str(traces)],
        log=folder / "ampipe.log",
        iterations=iterations,
        console=console,
    )
    timeline = folder / "timeline"
    _ampipe("draw", str(traces), "--output", str(timeline))
    summary = {
        "degree": degree,
        "baseline": {"losses": baseline, "log": str(folder / "baseline.log")},
        "ampipe": {"losses": pipelined, "log": str(folder / "ampipe.log")},
        "max_loss_diff": _largest_difference(baseline, pipelined),
        "hidden_share": Timeline.read_chrome(traces / "rank0.trace.json").hidden_share,
        "timeline": str(timeline.with_suffix(".png")),
    }
    _write(folder / "summary.json", summary)
    _show(console, summary, summary_path=folder / "summary.json")
    if not summary["max_loss_diff"] <= TOLERANCE:
        raise DifferenceFound(
            f"the losses differ by {summary['max_loss_diff']:.1e}, more than {TOLERANCE:.0e}: "
            "this is a defect, please report it with summary.json and both logs"
        )
    return 0


def train(
    title: str, arguments: Sequence[str], *, log: Path, iterations: int, console: Console
) -> list[float]:
    """Run one training on two processes, with a progress bar.

    Args:
        title: What to show beside the bar.
        arguments: Megatron's and AMPipe's flags.
        log: Receives everything the run prints.
        iterations: How many losses to expect.
        console: Where the bar is drawn.

    Returns:
        The ``lm loss`` of every iteration.

    Raises:
        RunFailed: the run did not end well, or some loss is missing.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "megatron_ampipe.pretrain_gpt", *arguments),
    ]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | os.environ
    losses: list[float] = []
    tail: deque[str] = deque(maxlen=30)
    columns = (TextColumn("{task.description:<18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        log.open("w") as stream,
        Progress(*columns, TextColumn("{task.fields[loss]}"), console=console) as progress,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
        ) as process,
    ):
        bar = progress.add_task(title, total=iterations, loss="starting")
        assert process.stdout is not None
        try:
            for line in process.stdout:
                stream.write(line)
                tail.append(line)
                if found := _ITERATION.search(line):
                    losses.append(float(found[2]))
                    progress.update(bar, completed=len(losses), loss=f"loss {losses[-1]:.4f}")
        except BaseException:
            process.terminate()
            raise
    if process.returncode != 0 or len(losses) != iterations:
        raise RunFailed(
            f"the {title} run ended with code {process.returncode} after {len(losses)} of {iterations} "
            f"iterations. The end of {log}:\n{''.join(tail)}"
        )
    return losses


def _ampipe(*arguments: str) -> None:
    """Run an ``ampipe`` command; what it says goes to the terminal."""
    done = subprocess.run([sys.executable, "-m", "megatron_ampipe.cli", *arguments])
    if done.returncode != 0:
        raise RunFailed(f"'ampipe {arguments[0]}' ended with code {done.returncode}; its message is above")


def _largest_difference(expected: Sequence[float], found: Sequence[float]) -> float:
    """The largest relative difference of two loss curves."""
    return max(abs(a - b) / abs(a) for a, b in zip(expected, found, strict=True))


def _write(path: Path, document: dict[str, Any]) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(document, indent=2) + "\n")
    os.replace(partial, path)


def _show(console: Console, summary: dict[str, Any], *, summary_path: Path) -> None:
    table = Table("iteration", "Megatron", f"AMPipe, degree {summary['degree']}", "relative difference")
    pairs = list(zip(summary["baseline"]["losses"], summary["ampipe"]["losses"], strict=True))
    step = max(1, len(pairs) // 12)
    for index in sorted({*range(0, len(pairs), step), len(pairs) - 1}):
        expected, found = pairs[index]
        table.add_row(
            str(index + 1), f"{expected:.6f}", f"{found:.6f}", f"{abs(expected - found) / expected:.1e}"
        )
    console.print(table)
    console.print(f"largest relative difference of the losses: {summary['max_loss_diff']:.1e}")
    console.print(f"communication hidden behind computation:   {summary['hidden_share']:.0%}")
    # One line each, whatever the terminal's width: people copy paths.
    for name, path in (("timeline", summary["timeline"]), ("summary", summary_path)):
        console.print(f"{name}: {path}", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
