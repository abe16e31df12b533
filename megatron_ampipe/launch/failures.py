"""What an exception of a run means, where the exception does not say it: a full disk, a silent rank.

Called by :mod:`.ending`.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_ampipe.errors import AMPipeError, BadInput, RunFailed
from megatron_ampipe.launch.checkpoints import TRACKER, refused
from megatron_ampipe.launch.refuse import origin, raised_in

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_WRITER = ("PytorchStreamWriter", "unexpected pos")
"""Torch's messages where a write fails; they give no reason."""
_READER = "PytorchStreamReader"
_DATASETS = "megatron.core.datasets"
_LOST_PEER = ("timed out", "timeout", "connection closed by peer", "connection reset by peer")
_GLOO = "gloo/transport"
"""Where gloo's errors come from, which are plain ``RuntimeError``; those of NCCL and stores have a type."""
ANSWER_S = 5.0
"""How long a rank that has lost a peer waits for the others to say that they are alive."""
_ALIVE = "megatron_ampipe/alive"


def known_cause(error: BaseException) -> AMPipeError | None:
    """The error to end with in place of ``error``, where its cause is known.

    Args:
        error: What a run raised.

    Returns:
        None where the exception is to be shown as it is.
    """
    if isinstance(error, AMPipeError | KeyboardInterrupt):
        return None
    said = str(error)
    # torch's own, of a checkpoint that all ranks write or read together. It is no Exception.
    is_of_checkpoint = type(error).__name__ == "CheckpointException"
    if _READER in said or (is_of_checkpoint and error.args[:1] == ("read",)) or _refused_in_loading(error):
        return refused(_arguments(), f"the checkpoint cannot be loaded ({_reason(error)})")
    for part in _chain(error):
        if isinstance(part, OSError) and part.errno in _DISK_ERRORS:
            return _unwritable(part.filename or "a file", os.strerror(part.errno))
        if isinstance(part, OSError) and _passed(part, module=_DATASETS):
            rule = f"the data cannot be opened ({part})"
            remedy = "Name another file, or a folder in which the datasets' index can be written."
            return BadInput("--data-path, --data-cache-path", "", rule=rule, remedy=remedy)
    if is_of_checkpoint or any(words in said for words in _WRITER):
        return _unwritable("a checkpoint", _reason(error))
    if isinstance(error, SystemExit):
        return _stopped_by_megatron(error)
    return None


def lost_a_peer(error: BaseException) -> bool:
    """Whether an exception says that another rank is gone or does not answer."""
    said = str(error).lower()
    is_of_a_group = _GLOO in said or any(kind.__name__ == "DistError" for kind in type(error).__mro__)
    return is_of_a_group and any(words in said for words in _LOST_PEER)


def describe_silent_ranks() -> str | None:
    """Ask which ranks are alive, and name those that do not answer, as a sentence; None where all do.

    Every rank that has lost a peer calls this, at about the same time. One that is stopped or hangs does not.
    """
    if "torch" not in sys.modules:
        return None
    import torch

    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    try:
        store = torch.distributed.distributed_c10d._get_default_store()
        store.set_timeout(datetime.timedelta(seconds=ANSWER_S))
        store.set(f"{_ALIVE}/{rank}", "1")
        time.sleep(ANSWER_S)
        silent = [other for other in range(ranks) if not store.check([f"{_ALIVE}/{other}"])]
    # The store lies in a process that may be the silent one.
    except Exception:
        return None
    if not silent:
        return None
    names = ", ".join(map(str, silent))
    minutes = getattr(_arguments(), "distributed_timeout_minutes", None)
    limit = f", now {minutes}" if minutes is not None else ""
    return (
        f"No answer from rank {names}: stopped, hung or gone. Look at its process and its node. How long "
        f"ranks wait for each other is set by --distributed-timeout-minutes{limit}."
    )


def _stopped_by_megatron(stop: SystemExit) -> RunFailed | None:
    """Megatron leaves by ``sys.exit()`` after it has printed what is wrong, which looks like success."""
    if stop.code is not None or not raised_in("megatron", stop):
        return None
    place = origin(stop)
    return RunFailed(
        "Megatron ended the run and printed the reason above, on rank 0. It did so at "
        f"{place.tb_frame.f_code.co_filename}:{place.tb_lineno}."
    )


def _unwritable(what: str, reason: str) -> RunFailed:
    folder = getattr(_arguments(), "save", None)
    if folder is None:
        return RunFailed(f"{what} could not be written ({reason}). Make room, and start again.")
    said = f"{what} could not be written ({reason})."
    with contextlib.suppress(OSError):
        space = os.statvfs(folder)
        said += f" {space.f_bavail * space.f_frsize >> 20} MiB are free in {folder}."
    try:
        last = (Path(folder) / TRACKER).read_text().strip()
    except OSError:
        return RunFailed(f"{said} No checkpoint is there yet: make room, and start again.")
    return RunFailed(
        f"{said} The last whole checkpoint is of iteration {last}: make room, and continue with --load "
        f"{folder}."
    )


def _refused_in_loading(error: BaseException) -> bool:
    """Whether Megatron or torch gave up a checkpoint. What AMPipe's own code or a lack of memory raises is no
    fault of a checkpoint."""
    if not _passed(error, module="megatron.training.checkpointing", function="load_checkpoint"):
        return False
    is_other = raised_in("megatron_ampipe", error) or lost_a_peer(error) or "out of memory" in str(error)
    return getattr(error, "code", None) is None and not is_other


def _passed(error: BaseException, *, module: str, function: str = "") -> bool:
    """Whether an exception has passed a function, of a module or a package."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(
        f"{frame.f_globals.get('__name__')}.".startswith(f"{module}.")
        and function in ("", frame.f_code.co_name)
        for frame in frames
    )


def _reason(error: BaseException) -> str:
    """The first line of the first of the failures that torch has gathered from the ranks."""
    if isinstance(error, SystemExit):
        return "Megatron has printed the reason above, on rank 0"
    gathered = getattr(error, "failures", None)
    if gathered == {}:
        return "another rank failed"
    first = next(iter(gathered.values()))[0] if gathered else error
    lines = [line.strip() for line in str(first).splitlines() if line.strip()]
    return lines[0] if lines else type(first).__name__


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _arguments() -> Any:
    """Megatron's arguments, None where they are not parsed yet."""
    if "megatron.training.global_vars" not in sys.modules:
        return None
    return sys.modules["megatron.training.global_vars"]._GLOBAL_ARGS
