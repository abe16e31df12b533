"""Imports what the doctor asks for, in a separate process: a broken package may end its process.

``python -m megatron_ampipe.tools.checkup.probe COMPONENT ...`` prints two lines for each component: its name
when its import begins, and what was found: ``{"component": ..., "error": ..., ...}``. Started by
:mod:`.components`.
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


def main(components: list[str]) -> None:
    """Look at every component; one that cannot be imported is no reason to stop."""
    answers = _claim_stdout()
    for component in components:
        _answer(answers, begin=component)
        try:
            found = look_at(component)
        except AMPipeError as error:
            found = {"error": str(error)}
        # Whatever an import of other people's code may raise, SystemExit included.
        except BaseException as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        _answer(answers, component=component, **found)
    answers.flush()
    # Half-imported packages may crash at exit.
    os._exit(0)


def look_at(component: str) -> dict[str, Any]:
    """Import a component, and say what only the imported package knows."""
    if component == TORCH:
        return _torch()
    if component == MEGATRON:
        from megatron_ampipe.launch.flags import import_megatron

        # What a launch does first.
        import_megatron()
        return {"version": compat.describe_megatron(), "lacks": compat.missing_internals()}
    importlib.import_module(component)
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
