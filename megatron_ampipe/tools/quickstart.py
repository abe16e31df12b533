"""Trains a small GPT-MoE on real text over a slow link, with Megatron's layers and with AMPipe, and compares.

What ``scripts/quickstart.sh`` runs. Both trainings are Megatron's own loop, started through the entry point
that users launch, and differ in AMPipe's flags alone. Ranks, link and times are those of
``ampipe bench --end-to-end``: one process for each of two ranks, on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megatron_ampipe.errors import AMPipeError, BadInput, RunFailed
from megatron_ampipe.files import outputs
from megatron_ampipe.files.shipped import configs_folder
from megatron_ampipe.files.timeline import Timeline
from megatron_ampipe.tools import quickstart_report
from megatron_ampipe.tools.measuring import machine, training
from megatron_ampipe.tools.measuring.machine import cores_of
from megatron_ampipe.tools.measuring.network import LinkChoice, choose_link
from megatron_ampipe.tools.measuring.ranks import signals_as_interrupts
from megatron_ampipe.tools.measuring.training import Curve, TrainingJob

REPOSITORY = Path(__file__).resolve().parents[2]
LINK = "100mbit"
"""Real where a network can be made, else emulated."""
WARMUP = 3
"""Iterations at the beginning of each training whose times do not count."""
NUM_RANKS = 2

CONFIGS = [str(configs_folder() / name) for name in ("models/tiny.yaml", "runs/quickstart.yaml")]
"""What both runs train and how."""

_MODULE = "megatron_ampipe.tools.quickstart"
_TIMEOUT_S = 300.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both trainings, print them side by side, write ``summary.json``; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    chosen = _parser().parse_args(words)
    console = Console()
    try:
        with signals_as_interrupts():
            if chosen.iterations <= WARMUP:
                raise BadInput(
                    "--iterations",
                    chosen.iterations,
                    rule=f"the first {WARMUP} iterations are not timed, so at least {WARMUP + 1} are needed",
                    remedy="Use --iterations 12.",
                )
            choice = choose_link(chosen.link or LINK, may_emulate=chosen.link is None)
            if choice.prefix:
                # This process becomes the root of a user namespace and begins again, knowing its link.
                command = [*choice.prefix, sys.executable, "-m", _MODULE, *words, "--link", choice.link.text]
                os.execvp(command[0], command)
            return _compare(choice, chosen, console)
    except AMPipeError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("quickstart: interrupted; run it again, the data is kept", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quickstart.sh",
        description="Train a small GPT-MoE on the source of Python's standard library, with two processes "
        "that a slow link connects, once with Megatron's own layers and once with AMPipe from the same seed. "
        "Compare speed and losses.",
    )
    parser.add_argument("--degree", type=int, default=4, help="chunks of the AMPipe run (default: 4)")
    parser.add_argument("--iterations", type=int, default=12, help="training iterations (default: 12)")
    parser.add_argument(
        "--link",
        help="what connects the processes: a rate such as 50mbit (a real network between network "
        f"namespaces), emulated:RATE, or none (default: {LINK}, emulated where no network can be made)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=REPOSITORY / "runs" / "quickstart",
        help="folder for data, logs and results (default: runs/quickstart in the checkout)",
    )
    return parser


def _compare(choice: LinkChoice, chosen: argparse.Namespace, console: Console) -> int:
    folder, degree, iterations = chosen.output.resolve(), chosen.degree, chosen.iterations
    before = machine.hardware()
    quickstart_report.show_link(console, choice)
    data, traces, timeline = folder / "data" / "stdlib", folder / "trace", folder / "timeline"
    _ampipe("data", "--output", str(data))
    flags = (
        *("--ampipe-config", *CONFIGS),
        *("--train-iters", str(iterations), "--lr-warmup-iters", str(min(20, iterations // 3))),
        *("--data-path", str(data), "--data-cache-path", str(folder / "data" / "cache")),
    )
    stock = TrainingJob(
        flags=(*flags, "--ampipe-degree", "1"),
        # The attention kernel of AMPipe's layers: Megatron's own is slower on a CPU.
        stock_attends_as="fp32",
        link=choice.link,
        num_ranks=NUM_RANKS,
        timeout_s=_TIMEOUT_S,
        cores=cores_of(NUM_RANKS),
    )
    pipelined = dataclasses.replace(
        stock,
        flags=(*flags, "--ampipe-degree", str(degree), "--ampipe-trace-dir", str(traces)),
        stock_attends_as=None,
    )
    runs = [("baseline", "Megatron", stock), ("ampipe", f"AMPipe, degree {degree}", pipelined)]
    logs = {name: folder / f"{name}.log" for name, *_ in runs}
    curves = {
        name: train(title, job, iterations=iterations, log=logs[name], console=console)
        for name, title, job in runs
    }
    _ampipe("draw", str(traces), "--output", str(timeline))
    summary = quickstart_report.summarize(choice, warmup=WARMUP, logs=logs, **curves) | {
        "degree": degree,
        "hidden_share": Timeline.read_chrome(traces / "rank0.trace.json").hidden_share,
        "timeline": str(timeline.with_suffix(".png")),
        "load_average_before": before["load_average"][0],
        "usable_cores": before["usable_cores"],
    }
    path = folder / "summary.json"
    outputs.write_text(path, json.dumps(summary, indent=2) + "\n")
    quickstart_report.show_runs(console, summary)
    quickstart_report.check_losses(summary)
    quickstart_report.show_result(console, summary, choice, path=path)
    return 0


def train(title: str, job: TrainingJob, *, iterations: int, log: Path, console: Console) -> Curve:
    """Run one training with a progress bar.

    Args:
        title: What to show next to the bar.
        job: What to run.
        iterations: How many it logs.
        log: Receives everything that the ranks print.
        console: Where the bar is drawn.

    Raises:
        RunFailed: the training did not end well.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    columns = (TextColumn("{task.description:<18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Rarely: on two cores, what is drawn takes time from the ranks.
    with Progress(
        *columns, TextColumn("{task.fields[loss]}"), console=console, refresh_per_second=2
    ) as progress:
        bar = progress.add_task(title, total=iterations, loss="starting")

        def on_iteration(loss: float) -> None:
            progress.update(bar, advance=1, loss=f"loss {loss:.4f}")

        try:
            return training.run(job, iterations=iterations, title=title, on_iteration=on_iteration, log=log)
        except RunFailed as error:
            raise RunFailed(f"{title}: {error}\nThe whole log is {log}") from error


def _ampipe(*arguments: str) -> None:
    """Run an ``ampipe`` command; its output goes to the terminal."""
    done = subprocess.run([sys.executable, "-m", "megatron_ampipe.cli", *arguments])
    if done.returncode != 0:
        raise RunFailed(f"'ampipe {arguments[0]}' ended with code {done.returncode}; its message is above")


if __name__ == "__main__":
    sys.exit(main())
