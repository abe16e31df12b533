"""The table that rank 0 prints before training. Called by :mod:`.attach`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from megatron_ampipe import compat
from megatron_ampipe.launch.host import Adjustment


def print_startup_table(
    rows: Sequence[tuple[str, str] | tuple[str, str, str]], adjustments: Sequence[Adjustment]
) -> None:
    """Print, on rank 0 only, what this run does and what was adjusted.

    Args:
        rows: Name and value of every setting, and the reason where there is one to give.
        adjustments: Flags that were added to the command line, each with its reason.
    """
    if int(os.environ.get("RANK", "0")) != 0:
        return
    table = Table(title="AMPipe", title_justify="left", show_header=False)
    table.add_column("setting", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("why", overflow="fold")
    for row in rows:
        table.add_row(*row)
    for index, adjustment in enumerate(adjustments):
        table.add_row("adjusted" if index == 0 else "", " ".join(adjustment.arguments), adjustment.reason)
    for piece, reason in compat.missing_packages():
        table.add_row(piece.name, reason, piece.fallback)
    # A log file has any width; only a terminal is limited.
    console = Console(width=None if Console().is_terminal else 140)
    console.print(table)
