"""From the user's command line to the one that Megatron parses, and to the record of it.

Files of ``--ampipe-config`` are read here, with Megatron's own parser. Called by :mod:`.session` and
``ampipe config``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from megatron_ampipe import __version__, compat
from megatron_ampipe.errors import BadInput, EnvironmentMissing
from megatron_ampipe.launch import flags, host, settings
from megatron_ampipe.launch.flags import PlanReader, config_from_args
from megatron_ampipe.launch.refuse import report_parser_errors
from megatron_ampipe.plan.plan_file import Plan

is_launched = False
"""Whether one of AMPipe's launchers runs this process. Then the lines of a patched Megatron do nothing."""


def import_megatron() -> bool:
    """Import what trains, on the host platform where there is no GPU. A patch in Megatron stays inactive.

    Returns:
        Whether there is a GPU.

    Raises:
        EnvironmentMissing: torch or Megatron is not there, or too old.
    """
    global is_launched
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise EnvironmentMissing(f"PyTorch cannot be imported ({error}). Run: pip install torch") from error
    on_gpu = host.gpu_available()
    try:
        if on_gpu:
            import megatron.training.training  # noqa: F401
        else:
            host.install()
    except ImportError as error:
        raise EnvironmentMissing(
            f"Megatron cannot be imported ({error}). Run: pip install 'megatron-core[training]>=0.19.2'"
        ) from error
    compat.require_peers()
    is_launched = True
    return on_gpu


def add_arguments(
    parser: argparse.ArgumentParser, *, read_plan: PlanReader = Plan.read
) -> argparse.ArgumentParser:
    """Add AMPipe's flags to Megatron's parser, and report what it refuses as :class:`BadInput`."""
    report_parser_errors(parser)
    return flags.add_arguments(parser, read_plan=read_plan)


def full_parser(*, read_plan: PlanReader = Plan.read) -> argparse.ArgumentParser:
    """Megatron's parser with AMPipe's flags, as Megatron itself makes it; after :func:`import_megatron`."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return add_arguments(parser, read_plan=read_plan)


def check_settings(
    resolved: settings.Resolved,
    parser: argparse.ArgumentParser,
    *,
    read_plan: PlanReader = Plan.read,
) -> None:
    """Types and choices of everything that ``parser`` knows, and AMPipe's own settings together.

    Raises:
        BadInput: One of them is wrong; names the file and line that sets it.
    """
    try:
        args, _ = parser.parse_known_args(resolved.words)
        config_from_args(args, read_plan=read_plan)
    except BadInput as error:
        raise resolved.located(error) from error


def record_settings(
    resolved: settings.Resolved, adjustments: Sequence[host.Adjustment], *, script: str | None
) -> None:
    """Write ``resolved.yaml`` next to the logs: a file for ``--ampipe-config`` that repeats this run.

    Flags that a script adds to Megatron's are no settings of a file; they stand there as a comment.

    Args:
        resolved: The command line as the user gave it.
        adjustments: What was added to it. It stands there as a comment, so that the file also fits a machine
            that needs no adjustment.
        script: What was run, where that is not our entry.

    Raises:
        BadInput: Nothing can be written where the run's logs go.
    """
    versions = [f"{name} {compat.found_version(name)}" for name in compat.MINIMUM_VERSIONS]
    run = "A run" if script is None else f"A run of {script}"
    notes = [
        f"{run} on {os.environ.get('WORLD_SIZE', '1')} ranks with megatron-ampipe {__version__}, "
        f"{', '.join(versions)}. Given to {settings.CONFIG_FLAG}, this file repeats it.",
        *(f"Added: {' '.join(change.arguments)} ({change.reason})" for change in adjustments),
    ]
    settings.write_beside_logs(resolved, notes=notes)
