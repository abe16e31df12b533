"""Trains a small GPT-MoE on real text over a slow link, with Megatron's layers and with AMPipe, and compares.

``scripts/quickstart.sh`` runs it. Both trainings are Megatron's own loop, with and without AMPipe's flags.
Ranks, link and times are those of ``ampipe bench --end-to-end``: one process for each of two ranks, on a CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from megatron_ampipe.errors import INTERRUPTED, AMPipeError, RunFailed
from megatron_ampipe.files import outputs
from megatron_ampipe.files.inputs import at_least, configs_folder
from megatron_ampipe.files.outputs import Report, ReportView
from megatron_ampipe.files.timeline import Timeline
from megatron_ampipe.tools.measuring import training
from megatron_ampipe.tools.measuring.network import Link, NetworkUnavailable, connected, parse_link
from megatron_ampipe.tools.measuring.ranks import signals_as_interrupts
from megatron_ampipe.tools.measuring.training import TrainingJob

REPOSITORY = Path(__file__).resolve().parents[2]
LINK = "100mbit"
"""The default link: real if a network can be made, otherwise emulated."""
WARMUP = 3
"""Iterations at the beginning of each training whose times do not count."""
NUM_RANKS = 2

CONFIGS = [str(configs_folder() / name) for name in ("models/tiny.yaml", "runs/quickstart.yaml")]
"""Configuration files of both runs."""

_NEXT = """
next:
  your own launch: replace pretrain_gpt.py by -m megatron_ampipe.pretrain_gpt, add --ampipe-degree 2
      (docs/usage.md)
  the degree for your model and machines: ampipe plan, ampipe profile, --ampipe-degree auto
      (docs/tuning.md)
  what was measured, and how: docs/measured.md; on your machine: ampipe bench --link 200mbit
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both trainings, print them side by side, write ``summary.json``; returns the exit code."""
    chosen = _parser().parse_args(arguments)
    try:
        with signals_as_interrupts():
            return _compare(*choose_link(chosen.link), chosen)
    except AMPipeError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("quickstart: interrupted; run it again, the data is kept", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quickstart.sh",
        description="Train a small GPT-MoE on the source of Python's standard library, with two processes "
        "that a slow link connects, once with Megatron's own layers and once with AMPipe from the same seed. "
        "Compare speed and losses.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    iterations = f"training iterations, of which the first {WARMUP} are not timed"
    add("--degree", type=at_least(1), default=4, help="chunks of the AMPipe run")
    add("--iterations", type=at_least(WARMUP + 1), default=12, help=iterations)
    link = (
        "what connects the processes: a rate such as 50mbit (a real network between network namespaces), "
        f"emulated:RATE, or none; if left out, {LINK}, emulated where no network can be made"
    )
    add("--link", type=parse_link, help=link)
    folder = REPOSITORY / "runs" / "quickstart"
    add("--output", type=Path, default=folder, help="folder for data, logs and results")
    return parser


def choose_link(wanted: Link | None) -> tuple[Link, str | None]:
    """The requested link, or :data:`LINK`; and why that is emulated, if it is.

    EnvironmentMissing if the requested link cannot be made here.
    """
    link = wanted or parse_link(LINK)
    if not link.is_network:
        return link, None
    try:
        with connected(link, NUM_RANKS):
            return link, None
    except NetworkUnavailable as error:
        if wanted is not None:
            raise
        return parse_link(f"emulated:{LINK}"), error.reason


@dataclass(frozen=True, slots=True)
class _Training:
    """One of the two trainings that are compared.

    Attributes:
        name: In the summary, and of its log.
        title: For people.
        flags: Those that the other training does not have.
        stock_attends_as: As in :class:`.TrainingJob`.
    """

    name: str
    title: str
    flags: tuple[str, ...]
    stock_attends_as: str | None


def _compare(link: Link, why_emulated: str | None, chosen: argparse.Namespace) -> int:
    folder = chosen.output.resolve()
    traces, timeline = folder / "trace", folder / "timeline"
    _say_link(link, why_emulated)
    flags = _common_flags(folder, chosen.iterations)
    ampipe_flags = ("--ampipe-degree", str(chosen.degree), "--ampipe-trace-dir", str(traces))
    # Megatron's layers get the attention kernel of AMPipe's: their own is slower on a CPU.
    stock = _Training("baseline", "Megatron", ("--ampipe-degree", "1"), stock_attends_as="fp32")
    ampipe = _Training("ampipe", f"AMPipe, degree {chosen.degree}", ampipe_flags, stock_attends_as=None)
    curves = [
        _train(each, flags, link=link, iterations=chosen.iterations, folder=folder)
        for each in (stock, ampipe)
    ]
    _ampipe("draw", str(traces), "--output", str(timeline))
    stock_run, ampipe_run = (
        _run_of(curve, folder / f"{each.name}.log")
        for each, curve in zip((stock, ampipe), curves, strict=True)
    )
    difference, iteration = training.loss_difference(*curves)
    summary: Report = {
        "speedup": round(stock_run["median_ms"] / ampipe_run["median_ms"], 4),
        "link": _described(link, why_emulated),
        stock.name: stock_run,
        ampipe.name: ampipe_run,
        "warmup": WARMUP,
        "max_loss_diff": difference,
        "max_loss_diff_iteration": iteration,
        "degree": chosen.degree,
        "hidden_share": Timeline.read_chrome(traces / "rank0.trace.json").hidden_share,
        "timeline": str(timeline.with_suffix(".png")),
    }
    path = folder / "summary.json"
    outputs.write_text(path, json.dumps(summary, indent=2) + "\n")
    training.check_same(*curves, what=f"see {path} and both logs: the loss of AMPipe")
    _say_result(summary, link, stock=stock_run, ampipe=ampipe_run)
    print(f"timeline: {summary['timeline']}\nsummary: {path}\n{_NEXT.rstrip()}")
    return 0


def _say_link(link: Link, why_emulated: str | None) -> None:
    print(f"link: {_name(link)}")
    if why_emulated is not None:
        print(f"    No real slow network can be made here: {why_emulated}.")
    if link.emulated:
        print("    Emulated: every all-to-all takes longer by the time its bytes need at this rate.")
        print("    Nothing else is slowed, gradient reduction included.")


def _common_flags(folder: Path, iterations: int) -> tuple[str, ...]:
    """The flags of both trainings; makes their data if there is none."""
    data = folder / "data" / "library"
    if not data.with_suffix(".idx").exists():
        _ampipe("data", "--output", str(data), "--force")
    return (
        *("--ampipe-config", *CONFIGS),
        *("--train-iters", str(iterations), "--lr-warmup-iters", str(min(20, iterations // 3))),
        *("--data-path", str(data), "--data-cache-path", str(folder / "data" / "cache")),
    )


def _train(
    chosen: _Training, flags: Sequence[str], *, link: Link, iterations: int, folder: Path
) -> training.Curve:
    log = folder / f"{chosen.name}.log"
    log.unlink(missing_ok=True)
    job = TrainingJob(
        flags=(*flags, *chosen.flags),
        stock_attends_as=chosen.stock_attends_as,
        link=link,
        num_ranks=NUM_RANKS,
    )
    with tqdm(total=iterations, desc=chosen.title, leave=False, disable=None) as bar:
        return training.run(job, iterations=iterations, title=chosen.title, on_iteration=bar.update, log=log)


def _run_of(curve: training.Curve, log: Path) -> Report:
    """A training in the summary."""
    return {
        "losses": curve.lm_loss,
        "ms": curve.ms,
        "median_ms": statistics.median(curve.ms[WARMUP:]),
        "log": str(log),
    }


def _described(link: Link, why_emulated: str | None) -> Report:
    """The link in the summary."""
    return {
        "kind": "real" if link.is_network else ("emulated" if link.emulated else "none"),
        "rate_mbit_per_s": None if link.rate_bit_per_s is None else link.rate_bit_per_s / 1e6,
        "why_emulated": why_emulated,
    }


def _say_result(summary: ReportView, link: Link, *, stock: ReportView, ampipe: ReportView) -> None:
    first_loss, last_loss = stock["losses"][0], stock["losses"][-1]
    print(
        f"{summary['speedup']:.2f} times Megatron's speed, same losses\n"
        f"    over {_name(link)}\n"
        f"    an iteration (median, without the first {WARMUP}): Megatron {stock['median_ms']:.0f} ms, "
        f"AMPipe {ampipe['median_ms']:.0f} ms\n"
        f"    losses: {first_loss:.4f} to {last_loss:.4f}, largest relative difference "
        f"{summary['max_loss_diff']:.1e}\n"
        f"    communication that ran during computation: {summary['hidden_share']:.0%}\n"
        "    Both runs use the same all-to-all and attention kernel: what AMPipe gains is overlap.\n"
    )


def _name(link: Link) -> str:
    if link.rate_bit_per_s is None:
        return "no slow link: this machine's loopback"
    rate = f"{link.rate_bit_per_s / 1e6:g} Mbit/s"
    if link.emulated:
        return f"an emulated link of {rate}"
    return f"a real TCP network of {rate} between two network namespaces of this machine"


def _ampipe(*arguments: str) -> None:
    """Run an ``ampipe`` command; its output goes to the terminal, after the output of this command."""
    sys.stdout.flush()
    done = subprocess.run([sys.executable, "-m", "megatron_ampipe.cli", *arguments])
    if done.returncode != 0:
        raise RunFailed(f"'ampipe {arguments[0]}' ended with code {done.returncode}; its message is above")


if __name__ == "__main__":
    sys.exit(main())
