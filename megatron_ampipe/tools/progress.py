"""Shows what a command is doing, and for how long: on stderr if it is a terminal, else nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Told = Callable[[str], None]
"""Called with what is done next."""


@contextlib.contextmanager
def shown(text: str, *, console: Console | None = None) -> Iterator[Told]:
    """Show ``text`` and the time that has passed, until the block ends; then the line is removed.

    Yields a function that replaces the text.
    """
    console = console or Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(text, total=None)
        yield lambda other: progress.update(task, description=other)
