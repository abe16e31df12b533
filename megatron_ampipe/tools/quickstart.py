"""Trains a small GPT-MoE on real text over a slow link, with Megatron's layers and with AMPipe, and compares.

What ``scripts/quickstart.sh`` runs. Both trainings are Megatron's own loop, with and without AMPipe's flags.
Ranks, link and times are those of ``ampipe bench --end-to-end``: one process for each of two ranks, on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from megatron_ampipe.errors import AMPipeError, DifferenceFound, RunFailed
from megatron_ampipe.files import outputs
from megatron_ampipe.files.inputs import at_least, configs_folder
from megatron_ampipe.files.timeline import Timeline
from megatron_ampipe.tools.measuring import machine, training
from megatron_ampipe.tools.measuring.link import LinkKind
from megatron_ampipe.tools.measuring.network import LinkChoice, choose_link
from megatron_ampipe.tools.measuring.ranks import signals_as_interrupts
from megatron_ampipe.tools.measuring.training import TOLERANCE, Curve, TrainingJob, loss_difference

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
_AS_FAST = 0.05
"""Speeds that differ by less are called equal."""
_ROWS = 12
_NEXT = """
next:
  your own launch: replace pretrain_gpt.py by -m megatron_ampipe.pretrain_gpt, add --ampipe-degree 4
      (docs/usage.md)
  the degree for your model and machines: ampipe plan, ampipe profile, --ampipe-degree auto
      (docs/tuning.md)
  what was measured, and how: docs/measured.md; on your machine: ampipe bench --link 200mbit
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both trainings, print them side by side, write ``summary.json``; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    chosen = _parser().parse_args(words)
    console = Console()
    try:
        with signals_as_interrupts():
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
    parser.add_argument("--degree", type=at_least(1), default=4, help="chunks of the AMPipe run (default: 4)")
    parser.add_argument(
        "--iterations",
        type=at_least(WARMUP + 1),
        default=12,
        help=f"training iterations, of which the first {WARMUP} are not timed (default: 12)",
    )
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
    link = choice.link
    _line(console, f"link: {_name(choice)}")
    if choice.why_emulated is not None:
        _line(console, f"    No real slow network can be made here: {choice.why_emulated}.")
    if link.emulated:
        _line(console, "    Emulated: every all-to-all takes longer by the time its bytes need at this rate.")
        _line(console, "    Nothing else is slowed, gradient reduction included.")
    data, traces, timeline = folder / "data" / "library", folder / "trace", folder / "timeline"
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
        cores=machine.cores_of(NUM_RANKS),
    )
    pipelined = dataclasses.replace(
        stock,
        flags=(*flags, "--ampipe-degree", str(degree), "--ampipe-trace-dir", str(traces)),
        stock_attends_as=None,
    )
    jobs = {"baseline": ("Megatron", stock), "ampipe": (f"AMPipe, degree {degree}", pipelined)}
    logs = {name: folder / f"{name}.log" for name in jobs}
    curves = {
        name: train(title, job, iterations=iterations, log=logs[name], console=console)
        for name, (title, job) in jobs.items()
    }
    _ampipe("draw", str(traces), "--output", str(timeline))
    runs: dict[str, dict[str, Any]] = {
        name: {
            "losses": list(curve.lm_loss),
            "ms": list(curve.ms),
            "median_ms": statistics.median(curve.ms[WARMUP:]),
            "log": str(logs[name]),
        }
        for name, curve in curves.items()
    }
    difference, iteration = loss_difference(curves["baseline"], curves["ampipe"])
    summary = {
        "speedup": round(runs["baseline"]["median_ms"] / runs["ampipe"]["median_ms"], 4),
        "link": {
            "kind": "real" if link.kind is LinkKind.NETWORK else str(link.kind),
            "rate_mbit_per_s": None if link.rate_bit_per_s is None else link.rate_bit_per_s / 1e6,
            "why_emulated": choice.why_emulated,
        },
        **runs,
        "warmup": WARMUP,
        "max_loss_diff": difference,
        "max_loss_diff_iteration": iteration,
        "degree": degree,
        "hidden_share": Timeline.read_chrome(traces / "rank0.trace.json").hidden_share,
        "timeline": str(timeline.with_suffix(".png")),
        "load_average_before": before["load_average"][0],
        "usable_cores": before["usable_cores"],
    }
    path = folder / "summary.json"
    outputs.write_text(path, json.dumps(summary, indent=2) + "\n")
    _show_runs(console, summary)
    # Written so that NaN is a difference.
    if not difference <= TOLERANCE:
        raise DifferenceFound(
            f"the losses differ by {difference:.1e} at iteration {iteration}, more than {TOLERANCE:.0e}: "
            "this is a defect, please report it with summary.json and both logs"
        )
    console.print(f"\n[bold]{verdict(summary['speedup'])}, same losses[/bold]", highlight=False)
    _line(console, f"    over {_name(choice)}")
    _line(
        console,
        f"    an iteration (median, without the first {WARMUP}): Megatron "
        f"{runs['baseline']['median_ms']:.0f} ms, AMPipe {runs['ampipe']['median_ms']:.0f} ms",
    )
    rounding = f"largest relative difference {difference:.1e}, which is rounding"
    _line(console, f"    losses: {rounding if difference else 'equal in every digit that Megatron logs'}")
    _line(console, f"    communication that ran during computation: {summary['hidden_share']:.0%}")
    _line(
        console, "    Both runs use the same all-to-all and attention kernel: what AMPipe gains is overlap."
    )
    if summary["load_average_before"] > summary["usable_cores"] / 2:
        _line(
            console,
            f"    The machine was busy before (load average {summary['load_average_before']}): "
            "on an idle one the difference may be larger.",
        )
    _line(console, f"\ntimeline: {summary['timeline']}\nsummary: {path}\n{_NEXT.rstrip()}")
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


def verdict(speedup: float) -> str:
    """A speedup in words."""
    if speedup >= 1 + _AS_FAST:
        return f"{speedup:.1f} times faster"
    if speedup > 1 - _AS_FAST:
        return "as fast as Megatron here"
    return f"slower here: {speedup:.2f} times Megatron's speed"


def _show_runs(console: Console, summary: Mapping[str, Any]) -> None:
    """Print the losses and times of both trainings next to each other."""
    table = Table("iteration", "Megatron", f"AMPipe, degree {summary['degree']}", "relative difference")
    stock, ampipe = summary["baseline"], summary["ampipe"]
    pairs = list(zip(stock["losses"], ampipe["losses"], strict=True))
    for index in sorted({*range(0, len(pairs), max(1, len(pairs) // _ROWS)), len(pairs) - 1}):
        expected, actual = pairs[index]
        difference = f"{abs(expected - actual) / expected:.1e}"
        table.add_row(str(index + 1), f"{expected:.6f}", f"{actual:.6f}", difference)
    table.add_section()
    table.add_row("ms, median", f"{stock['median_ms']:.0f}", f"{ampipe['median_ms']:.0f}")
    console.print(table)


def _name(choice: LinkChoice) -> str:
    if choice.link.rate_bit_per_s is None:
        return "no slow link: this machine's loopback"
    rate = f"{choice.link.rate_bit_per_s / 1e6:g} Mbit/s"
    if choice.link.emulated:
        return f"an emulated link of {rate}"
    return f"a real TCP network of {rate} between two network namespaces of this machine"


def _line(console: Console, text: str) -> None:
    """One line, whatever the terminal's width: people copy paths."""
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def _ampipe(*arguments: str) -> None:
    """Run an ``ampipe`` command; its output goes to the terminal."""
    done = subprocess.run([sys.executable, "-m", "megatron_ampipe.cli", *arguments])
    if done.returncode != 0:
        raise RunFailed(f"'ampipe {arguments[0]}' ended with code {done.returncode}; its message is above")


if __name__ == "__main__":
    sys.exit(main())
