"""What an exception of argparse, Megatron or torch means to a user: the one place that translates them.

Megatron checks with assertions, some of them bare, with ``sys.exit()`` after a message, and by failing. What
fails before training is bad input. A failure during training keeps its traceback, unless the exception does
not say what has happened: a full disk, a checkpoint that cannot be read.
"""

from __future__ import annotations

import argparse
import errno
import linecache
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from megatron_ampipe.errors import AMPipeError, BadInput, EnvironmentMissing, RunFailed, did_you_mean

TRACKER = "latest_checkpointed_iteration.txt"
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_WRITER = ("PytorchStreamWriter", "unexpected pos")
"""Torch's messages where a write fails; they give no reason."""
_LOST_PEER = ("timed out", "timeout", "connection closed by peer", "connection reset by peer")
_GLOO = "gloo/transport"
"""Where gloo's errors come from, which are plain ``RuntimeError``; those of NCCL and stores have a type."""


def known_cause(error: BaseException) -> AMPipeError | None:
    """The error to end with in place of ``error``; None where the exception is to be shown as it is."""
    if isinstance(error, AMPipeError | KeyboardInterrupt):
        return None
    said = str(error)
    if "environment variable MASTER_" in said and "expected, but not set" in said:
        return EnvironmentMissing(
            f"{said.rpartition(': ')[2]}. It says where ranks find each other. Start the run with torchrun, "
            "which sets it: torchrun --standalone --nproc-per-node 1 ..."
        )
    # torch's own, of a checkpoint that all ranks write or read together. It is no Exception.
    is_of_checkpoint = type(error).__name__ == "CheckpointException"
    is_read = is_of_checkpoint and error.args[:1] == ("read",)
    if "PytorchStreamReader" in said or is_read or _failed_in_loading(error):
        return _bad_checkpoint(f"the checkpoint cannot be loaded ({_first_line(error)})")
    disk = next((part for part in _chain(error) if getattr(part, "errno", None) in _DISK_ERRORS), None)
    if isinstance(disk, OSError):
        return _unwritable(disk.filename or "a file", os.strerror(disk.errno or 0))
    if is_of_checkpoint or any(words in said for words in _WRITER):
        return _unwritable("a checkpoint", _first_line(error))
    in_training = _passed(error, "megatron.training.training", "train", "evaluate")
    place = origin(error).tb_frame.f_code.co_filename, origin(error).tb_lineno
    at = f"The check is at {place[0]}:{place[1]}."
    if isinstance(error, SystemExit):
        # With --help, the code is 0.
        if error.code is not None or not raised_in("megatron", error):
            return None
        if in_training:
            where = f"It did so at {place[0]}:{place[1]}."
            return RunFailed(f"Megatron ended the run and printed the reason above, on rank 0. {where}")
        return _refused("it printed what is wrong with them above", at)
    if not isinstance(error, Exception) or in_training or not _passed(error, "megatron"):
        return None
    if raised_in("megatron_ampipe", error) or raised_in("torch", error):
        return None
    return _refused(reason_of(error), at)


def _refused(rule: str, remedy: str) -> BadInput:
    return BadInput("arguments", "(refused by Megatron)", rule=rule, remedy=remedy)


def _bad_checkpoint(rule: str) -> BadInput:
    args = _arguments()
    name = "load" if getattr(args, "load", None) is not None else "pretrained_checkpoint"
    return BadInput(
        f"--{name.replace('_', '-')}",
        getattr(args, name, None),
        rule=rule,
        remedy="Name the folder that a run saved to, give the flags of the model that it trained, and name "
        "an earlier checkpoint with --ckpt-step if this one is damaged.",
    )


def _unwritable(what: str, reason: str) -> RunFailed:
    folder = getattr(_arguments(), "save", None)
    is_saved = folder is not None and Path(folder, TRACKER).exists()
    again = f"continue with --load {folder}" if is_saved else "start again"
    return RunFailed(f"{what} could not be written ({reason}). Make room, and {again}.")


def _failed_in_loading(error: BaseException) -> bool:
    """Whether Megatron or torch gave up a checkpoint. What AMPipe's own code or a lack of memory raises is no
    fault of a checkpoint."""
    if not _passed(error, "megatron.training.checkpointing", "load_checkpoint"):
        return False
    is_other = raised_in("megatron_ampipe", error) or lost_a_peer(error) or "out of memory" in str(error)
    return getattr(error, "code", None) is None and not is_other


def lost_a_peer(error: BaseException) -> bool:
    """Whether an exception says that another rank is gone or does not answer."""
    said = str(error).lower()
    is_of_a_group = _GLOO in said or any(kind.__name__ == "DistError" for kind in type(error).__mro__)
    return is_of_a_group and any(words in said for words in _LOST_PEER)


def reason_of(error: BaseException) -> str:
    """An exception's message in one line; of one without a message, the line that raised it."""
    place = origin(error)
    line = linecache.getline(place.tb_frame.f_code.co_filename, place.tb_lineno)
    return " ".join((str(error).strip() or line).split()).rstrip(".")


def raised_in(package: str, error: BaseException) -> bool:
    """Whether the line that raised ``error`` is in a module of ``package``.

    By the module's name, not by its path: a folder of a checkout may be named like a package.
    """
    module = origin(error).tb_frame.f_globals.get("__name__") or ""
    return module.partition(".")[0] == package


def origin(error: BaseException) -> TracebackType:
    """The innermost frame."""
    place = error.__traceback__
    assert place is not None
    while place.tb_next is not None:
        place = place.tb_next
    return place


def _passed(error: BaseException, module: str, *functions: str) -> bool:
    """Whether an exception has passed a module or a package, in one of the functions if they are named."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(
        f"{frame.f_globals.get('__name__')}.".startswith(f"{module}.")
        and (not functions or frame.f_code.co_name in functions)
        for frame in frames
    )


def _first_line(error: BaseException) -> str:
    """The first line of the first of the failures that torch has gathered from the ranks."""
    if isinstance(error, SystemExit):
        return "Megatron has printed the reason above, on rank 0"
    gathered = getattr(error, "failures", None)
    first = next(iter(gathered.values()))[0] if gathered else error
    return str(first).strip().partition("\n")[0] or type(first).__name__


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _arguments() -> Any:
    """Megatron's arguments, None where they are not parsed yet."""
    if "megatron.training.global_vars" not in sys.modules:
        return None
    return sys.modules["megatron.training.global_vars"]._GLOBAL_ARGS


def report_parser_errors(parser: argparse.ArgumentParser) -> None:
    """Make ``parser`` raise :class:`BadInput`, instead of printing 800 flags on every rank."""

    def error(message: str) -> NoReturn:
        raise _parser_error(message, parser)

    parser.error = error  # type: ignore[method-assign]
    for action in parser._actions:
        # Let --help work although a text of Megatron's has a single percent sign; argparse fails at it.
        try:
            (action.help or "") % vars(action)
        except (ValueError, TypeError, KeyError):
            action.help = (action.help or "").replace("%", "%%")
    if int(os.environ.get("RANK", "0")) != 0:
        parser.print_help = lambda file=None: None  # type: ignore[method-assign]


def _parser_error(message: str, parser: argparse.ArgumentParser) -> BadInput:
    remedy = "Run with --help for the list."
    flag, separator, rule = message.removeprefix("argument ").partition(": ")
    if flag == "unrecognized arguments":
        known = [flag for action in parser._actions for flag in action.option_strings]
        near = did_you_mean(rule.split()[0].partition("=")[0], known)
        return BadInput("argument", rule, rule="there is no such flag", remedy=near or remedy)
    if not separator or not message.startswith("argument "):
        return BadInput("arguments", "(incomplete)", rule=message, remedy=remedy)
    return BadInput(flag, "", rule=rule, remedy=remedy)
