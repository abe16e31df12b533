"""``--ampipe-save-plan``: what ``--ampipe-degree auto`` chose becomes a plan file.

Called by :mod:`.attach`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.auto import print_on_first_rank
from megatron_ampipe.launch.planned import features_of_args, made_for_of_args
from megatron_ampipe.launch.size_ranges import Shape
from megatron_ampipe.launch.trials import Choice
from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.schedule import period
from megatron_ampipe.schedule.features import boundary


def prepare_plan_file(path: Path) -> None:
    """Make the folder of the plan file.

    Raises:
        BadInput: nothing can be written there, which is reported before the run starts.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder", str(path))
        if path.exists() and not path.is_file():
            raise OSError(None, "it is no plain file", str(path))
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(None, "no permission to write", str(path.parent))
    except OSError as error:
        raise BadInput(
            "--ampipe-save-plan",
            path,
            rule=f"cannot be written ({error.strerror})",
            remedy="Name a file in a folder that you can write to, for example --ampipe-save-plan plan.yaml.",
        ) from error


def keeper_of(
    args: argparse.Namespace, file: str | None, announced: Shape
) -> Callable[[Shape, Choice], None]:
    """What :class:`.auto.AutoDegree` calls with its choices.

    Args:
        args: Megatron's validated arguments.
        file: Where the first rank writes the choice; None writes nothing.
        announced: The shape of input that the flags give. A plan holds one choice, the one for this shape.
    """

    def keep(shape: Shape, choice: Choice) -> None:
        if file is None or shape != announced or int(os.environ.get("RANK", "0")) != 0:
            return
        try:
            _write_choice(args, Path(file), choice)
        except OSError as error:
            # Training continues: the choice is made, and was logged above.
            print_on_first_rank(
                f"the plan cannot be written to {file} ({error.strerror}); a restart tries again"
            )

    return keep


def iterations_left(args: argparse.Namespace) -> int | None:
    """Iterations of training up to the end of the run, including the current one; None if it is not known."""
    done: int | None = getattr(args, "curr_iteration", None)
    if done is None or not args.train_iters:
        return None
    left: int = args.train_iters - done
    every = args.exit_interval
    return min(left, every - done % every) if every else left


def _write_choice(args: argparse.Namespace, path: Path, choice: Choice) -> None:
    """Write what ``--ampipe-degree auto`` chose for the shape of input that the flags give, as a plan."""
    pipeline = choice.pipeline
    count = pipeline.num_chunks
    shares = pipeline.stack != 1 and boundary(args, whole_attention=pipeline.whole_attention) is None
    features = pipeline.trained(features_of_args(args, shares_schedule=shares))
    schedule = pipeline.order or pipeline.schedule_of([features])
    if shares:
        schedule = period(schedule)
    forward_ms, backward_ms = choice.predicted_ms or (None, None)
    plan = Plan(
        schedule=schedule,
        shares=pipeline.shares or (1 / count,) * count,
        stack=pipeline.stack,
        memory=pipeline.memory,
        exchange=pipeline.exchange,
        stages_forward_ms=forward_ms,
        stages_backward_ms=backward_ms,
        reason=choice.reason,
        made_for=made_for_of_args(args),
    )
    plan.write(path, head="chosen by --ampipe-degree auto; for --ampipe-plan FILE")
