"""Imports what the doctor asks for, in a process of its own: a broken package may end its process.

``python -m megatron_ampipe.tools.checkup.probe PIECE ...`` prints, for each piece in turn, a line with its
name when it begins and one with what it found: ``{"piece": ..., "error": ..., ...}``. Started by
:mod:`.pieces`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any, TextIO

from megatron_ampipe import compat
from megatron_ampipe.errors import AMPipeError

TORCH, MEGATRON = "torch", "Megatron"


def main(pieces: list[str]) -> None:
    """Look at every piece; one that cannot be imported is no reason to stop."""
    answers = _claim_stdout()
    for piece in pieces:
        _answer(answers, begin=piece)
        try:
            found = look_at(piece)
        except AMPipeError as error:
            found = {"error": str(error)}
        # Whatever an import of other people's code may raise, SystemExit included.
        except BaseException as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        _answer(answers, piece=piece, **found)
    answers.flush()
    # Half-imported packages may not survive being torn down.
    os._exit(0)


def look_at(piece: str) -> dict[str, Any]:
    """Import a piece, and say what only the imported package knows."""
    if piece == TORCH:
        return _torch()
    if piece == MEGATRON:
        from megatron_ampipe.launch.command_line import import_megatron

        # What a launch does first.
        import_megatron()
        return {"version": compat.describe_megatron(), "lacks": compat.missing_internals()}
    importlib.import_module(piece)
    return {}


def _torch() -> dict[str, Any]:
    import torch

    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
        "nccl": nccl_version(),
    }


def nccl_version() -> str | None:
    """The version of NCCL that torch brings, None where it has none."""
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _claim_stdout() -> TextIO:
    """Standard output for answers alone; what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _answer(answers: TextIO, **fields: Any) -> None:
    answers.write(json.dumps(fields) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
