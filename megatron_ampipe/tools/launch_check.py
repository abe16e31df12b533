"""Checks the flags of a launch without launching: by Megatron's parser and by what a launch checks.

Needs Megatron. Called by ``ampipe config``, and for ``ampipe sbatch`` by ``slurm.preflight``.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_ampipe.launch.config_files import Resolved


def check_launch_flags(words: Sequence[str], *, num_ranks: int | None) -> Resolved:
    """Resolve a command line of training, and check it.

    Args:
        words: Flags of Megatron and AMPipe, with ``--ampipe-config`` in them or not.
        num_ranks: Also check a launch on so many ranks; None for no such check.

    Raises:
        EnvironmentMissing: torch or Megatron is not there.
        BadInput: a file or a flag is wrong.
    """
    from megatron_ampipe.launch import config_files, flags

    # Some libraries print to standard output when they are imported.
    with contextlib.redirect_stdout(sys.stderr):
        flags.import_megatron()
        parser = flags.full_parser()
    resolved = config_files.resolve(words, parser)
    flags.check_settings(resolved, parser)
    # Refuses words that are not flags.
    parser.parse_args(resolved.words)
    if num_ranks is not None:
        _check_launch(resolved.words, num_ranks=num_ranks)
    return resolved


def _check_launch(words: Sequence[str], *, num_ranks: int) -> None:
    """What a launch checks; what it would print is left out."""
    from megatron_ampipe.launch import pretrain

    os.environ |= {"WORLD_SIZE": str(num_ranks), "RANK": "0"}
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
        pretrain.check_launch(words)
