"""What the quick start reports: ``summary.json``, the check of the losses, the last lines.

Runs nothing. Called by :mod:`.quickstart`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_ampipe.errors import DifferenceFound
from megatron_ampipe.tools.measuring.link import LinkKind
from megatron_ampipe.tools.measuring.network import LinkChoice
from megatron_ampipe.tools.measuring.training import TOLERANCE, Curve, loss_difference

_AS_FAST = 0.05
"""Speeds that differ by less are called equal."""
_ROWS = 12
_NEXT = (
    "your own launch: replace pretrain_gpt.py by -m megatron_ampipe.pretrain_gpt, add --ampipe-degree 4",
    "    (docs/usage.md)",
    "the degree for your model and machines: ampipe plan, ampipe profile, --ampipe-degree auto",
    "    (docs/tuning.md)",
    "what was measured, and how: docs/measured.md; on your machine: ampipe bench --link 200mbit",
)


def summarize(
    choice: LinkChoice, *, baseline: Curve, ampipe: Curve, warmup: int, logs: Mapping[str, Path]
) -> dict[str, Any]:
    """What ``summary.json`` says of the link and of both trainings.

    Args:
        choice: The link.
        baseline: Megatron's training.
        ampipe: AMPipe's.
        warmup: Iterations at the beginning of a training whose times do not count.
        logs: Of both trainings, by their names here.
    """
    link = choice.link
    runs = {
        name: {
            "losses": list(curve.lm_loss),
            "ms": list(curve.ms),
            "median_ms": statistics.median(curve.ms[warmup:]),
            "log": str(logs[name]),
        }
        for name, curve in (("baseline", baseline), ("ampipe", ampipe))
    }
    difference, iteration = loss_difference(baseline, ampipe)
    return {
        "speedup": round(_median_ms(runs, "baseline") / _median_ms(runs, "ampipe"), 4),
        "link": {
            "kind": "real" if link.kind is LinkKind.NETWORK else str(link.kind),
            "rate_mbit_per_s": None if link.rate_bit_per_s is None else link.rate_bit_per_s / 1e6,
            "why_emulated": choice.why_emulated,
        },
        **runs,
        "warmup": warmup,
        "max_loss_diff": difference,
        "max_loss_diff_iteration": iteration,
    }


def check_losses(summary: Mapping[str, Any]) -> None:
    """Refuse losses that differ by more than rounding.

    Raises:
        DifferenceFound: the largest relative difference is above the tolerance of ``ampipe bench``, or NaN.
    """
    # Written so that NaN is a difference.
    if not summary["max_loss_diff"] <= TOLERANCE:
        raise DifferenceFound(
            f"the losses differ by {summary['max_loss_diff']:.1e} at iteration "
            f"{summary['max_loss_diff_iteration']}, more than {TOLERANCE:.0e}: "
            "this is a defect, please report it with summary.json and both logs"
        )


def show_link(console: Console, choice: LinkChoice) -> None:
    """Print what connects the two processes."""
    _line(console, f"link: {_name(choice)}")
    if choice.why_emulated is not None:
        _line(console, f"    No real slow network can be made here: {choice.why_emulated}.")
    if choice.link.emulated:
        _line(console, "    Emulated: every all-to-all takes longer by the time its bytes need at this rate.")
        _line(console, "    Nothing else is slowed, gradient reduction included.")


def show_runs(console: Console, summary: Mapping[str, Any]) -> None:
    """Print the losses and times of both trainings next to each other."""
    degree = summary["degree"]
    table = Table("iteration", "Megatron", f"AMPipe, degree {degree}", "relative difference")
    pairs = list(zip(summary["baseline"]["losses"], summary["ampipe"]["losses"], strict=True))
    step = max(1, len(pairs) // _ROWS)
    for index in sorted({*range(0, len(pairs), step), len(pairs) - 1}):
        expected, found = pairs[index]
        table.add_row(
            str(index + 1), f"{expected:.6f}", f"{found:.6f}", f"{abs(expected - found) / expected:.1e}"
        )
    table.add_section()
    table.add_row(
        "ms, median", f"{_median_ms(summary, 'baseline'):.0f}", f"{_median_ms(summary, 'ampipe'):.0f}"
    )
    console.print(table)


def show_result(console: Console, summary: Mapping[str, Any], choice: LinkChoice, *, path: Path) -> None:
    """Print what came out, where it is, and where to go next.

    Args:
        console: Where to.
        summary: Of :func:`summarize`, with what the quick start added.
        choice: The link.
        path: Of ``summary.json``.
    """
    difference = summary["max_loss_diff"]
    if difference == 0:
        losses = "equal in every digit that Megatron logs"
    else:
        losses = f"largest relative difference {difference:.1e}, which is rounding"
    console.print(f"\n[bold]{verdict(summary['speedup'])}, same losses[/bold]", highlight=False)
    _line(console, f"    over {_name(choice)}")
    _line(
        console,
        f"    an iteration (median, without the first {summary['warmup']}): "
        f"Megatron {_median_ms(summary, 'baseline'):.0f} ms, AMPipe {_median_ms(summary, 'ampipe'):.0f} ms",
    )
    _line(console, f"    losses: {losses}")
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
    _line(console, f"\ntimeline: {summary['timeline']}")
    _line(console, f"summary: {path}")
    _line(console, "\nnext:")
    for text in _NEXT:
        _line(console, f"  {text}")


def verdict(speedup: float) -> str:
    """A speedup in words."""
    if speedup >= 1 + _AS_FAST:
        return f"{speedup:.1f} times faster"
    if speedup > 1 - _AS_FAST:
        return "as fast as Megatron here"
    return f"slower here: {speedup:.2f} times Megatron's speed"


def _median_ms(summary: Mapping[str, Any], run: str) -> float:
    found: float = summary[run]["median_ms"]
    return found


def _name(choice: LinkChoice) -> str:
    link = choice.link
    if link.rate_bit_per_s is None:
        return "no slow link: this machine's loopback"
    rate = f"{link.rate_bit_per_s / 1e6:g} Mbit/s"
    if link.emulated:
        return f"an emulated link of {rate}"
    return f"a real TCP network of {rate} between two network namespaces of this machine"


def _line(console: Console, text: str) -> None:
    """One line, whatever the terminal's width: people copy paths."""
    console.print(text, soft_wrap=True, highlight=False, markup=False)
