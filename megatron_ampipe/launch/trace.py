"""Selects the iterations that are recorded, and writes the trace of each rank.

Called by :mod:`.session`.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.core.utils import unwrap_model

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.metrics import is_measured
from megatron_ampipe.layers.context import AMPipeContext

ForwardStep = Callable[..., Any]


def prepare_trace_dir(folder: Path) -> None:
    """Make the folder and remove the traces of an earlier run from it.

    Raises:
        BadInput: the folder is not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(None, "no permission to write", str(folder))
        for earlier in folder.glob("rank*.trace.json"):
            earlier.unlink(missing_ok=True)
    except OSError as error:
        raise BadInput(
            "--ampipe-trace-dir",
            folder,
            rule=f"cannot be written to ({error.strerror})",
            remedy="Name a folder that you can write to, for example --ampipe-trace-dir traces.",
        ) from error


def recorded(
    forward_step: ForwardStep, context: AMPipeContext | None, args: argparse.Namespace
) -> ForwardStep:
    """Wrap Megatron's forward step: it first sets the recorder's iteration, or pauses the recorder.

    For a trace all iterations are recorded, and the last ones are kept; otherwise only those with logged
    metrics (:mod:`.metrics`), so that the others have no overhead.
    """
    if context is None:
        return forward_step
    recorder, every = context.recorder, context.config.trace_dir is not None

    @functools.wraps(forward_step)
    def step(data_iterator: Any, model: Any, *rest: Any, **kwargs: Any) -> Any:
        # Only in training: with --skip-train, args has no count of iterations.
        # Megatron counts iterations from 0 here, and from 1 in its log.
        if unwrap_model(model).training and (every or is_measured(args, args.curr_iteration + 1)):
            recorder.start_iteration(args.curr_iteration + 1)
        else:
            recorder.pause()
        return forward_step(data_iterator, model, *rest, **kwargs)

    return step


def write_trace(context: AMPipeContext | None) -> None:
    """Write this rank's trace, if --ampipe-trace-dir is given and stages were recorded."""
    if context is None or context.config.trace_dir is None:
        return
    # The process group may have been destroyed already.
    rank = int(os.environ.get("RANK", "0"))
    timeline = context.recorder.timeline(rank=rank, labels=context.pipeline.labels)
    if timeline.spans:
        timeline.write_chrome(Path(context.config.trace_dir) / f"rank{rank}.trace.json")
