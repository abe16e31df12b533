"""How a process of a launch ends: what an exception means to a user, its one message, and the exit code.

Megatron checks with assertions, some of them bare, with ``sys.exit()`` after a message, and by failing. What
fails before training is bad input: it ends every rank with the same code and one message. A failure during
training keeps its traceback. torchrun ends its output with a block about the ranks that failed: it shows the
message, or the traceback, that is written here for it.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from megatron_ampipe.errors import AMPipeError, BadInput, EnvironmentMissing, RunFailed, did_you_mean

INTERRUPTED = 130
PEER_GRACE_S = 20.0
"""How long the other ranks wait for rank 0 to print the message before they print it themselves."""
PEER_LAG_S = 2.0
"""How long rank 0 waits after the message: a slower rank finds the same error, and should be ended only after
that."""
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Where torchrun looks for the cause of a rank's failure."""
_LOST_PEER = ("timed out", "timeout", "connection closed by peer", "connection reset by peer")
_GLOO = "gloo/transport"
"""Where gloo's errors come from, which are plain ``RuntimeError``; those of NCCL and stores have a type."""


def run_to_end(work: Callable[[], int]) -> int:
    """Run a launch, and return its exit code, whatever happens."""
    if _ERROR_FILE in os.environ:
        faulthandler.enable()
    try:
        # A background process of a shell ignores it, and still does.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt)
        return work()
    except KeyboardInterrupt:
        if int(os.environ.get("RANK", "0")) == 0:
            again = "A run that was started with --save continues from its last checkpoint with --load."
            print(f"\ninterrupted. {again}", file=sys.stderr, flush=True)
        return INTERRUPTED
    # Some exceptions of torch are no Exception.
    except BaseException as error:
        cause = known_cause(error) or error
        if isinstance(cause, AMPipeError):
            return end_with(cause)
        if isinstance(cause, SystemExit):
            raise
        return end_after_failure(cause)


def _interrupt(*_: object) -> None:
    """End the run once: a second Ctrl-C, as torchrun sends it, and the logs of libraries are ignored."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable()
    raise KeyboardInterrupt


def keep_signal_from_children(args: argparse.Namespace) -> None:
    """Keep the signal that asks a run to save and exit from the processes that a rank starts.

    SLURM sends it to every process of a step. A rank handles it (Megatron's ``--exit-signal-handler``); the
    process that passes the results of writing a checkpoint to Megatron would be ended by it, and that
    checkpoint would fail. Processes inherit what their parent's thread blocks, and Python runs the handler in
    the main thread, whichever thread received the signal. Nothing is done for SIGTERM, by which child
    processes have to end.
    """
    if args.exit_signal_handler and args.exit_signal != signal.SIGTERM:
        # Started before the signal is blocked here, so it is not blocked there.
        receiver = threading.Thread(target=threading.Event().wait, name="ampipe-exit-signal", daemon=True)
        receiver.start()
        signal.pthread_sigmask(signal.SIG_BLOCK, {args.exit_signal})


def end_with(error: AMPipeError) -> int:
    """Print ``error`` once and return its exit code.

    torchrun ends all ranks as soon as one has exited. Rank 0 prints the message, so the other ranks wait
    until they are ended. A rank that is not ended is the only one that failed, and prints it itself.
    """
    prints = int(os.environ.get("RANK", "0")) == 0
    if not prints:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(error.exit_code))
    _leave_for_torchrun(f"error: {error}")
    if not prints:
        time.sleep(PEER_GRACE_S)
    # On a new line: another rank may have left one unfinished.
    print(f"\nerror: {error}", file=sys.stderr, flush=True)
    if prints and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        time.sleep(PEER_LAG_S)
    return error.exit_code


def end_after_failure(error: BaseException) -> int:
    """Print an exception and what it means, and return the exit code of a failed run."""
    traceback.print_exception(error)
    trace, rank = "".join(traceback.format_exception(error)), os.environ.get("RANK", "0")
    if lost_a_peer(error):
        message = (
            f"error: rank {rank} failed: it has lost a peer, see above. The cause is in that peer's output."
        )
        # torchrun names the earliest failure as the cause, which is that of the peer.
        _leave_for_torchrun(trace + message, later_s=1)
    else:
        message = f"error: rank {rank} failed; the cause is above."
        _leave_for_torchrun(trace)
    print(message, file=sys.stderr, flush=True)
    return RunFailed.exit_code


def _leave_for_torchrun(message: str, *, later_s: int = 0) -> None:
    """Write what torchrun's last block shows for this rank, in the form of torch's ``@record``."""
    path = os.environ.get(_ERROR_FILE)
    if not path:
        return
    extra = {"py_callstack": message, "timestamp": str(int(time.time()) + later_s)}
    # The message is printed as well.
    with contextlib.suppress(OSError), open(path, "w") as file:
        json.dump({"message": {"message": message.splitlines()[-1], "extraInfo": extra}}, file)


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
    is_ours = raised_in("megatron_ampipe", error)
    in_loading = _passed(error, "megatron.training.checkpointing", "load_checkpoint")
    if in_loading and not (is_ours or lost_a_peer(error) or "out of memory" in said):
        return _bad_checkpoint(error)
    in_training = _passed(error, "megatron.training.training", "train", "evaluate")
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{last.filename}:{last.lineno}."
    if isinstance(error, SystemExit):
        # With --help, the code is 0.
        if error.code is not None or not raised_in("megatron", error):
            return None
        if in_training:
            return RunFailed(f"Megatron ended the run and printed the reason above, on rank 0, at {place}")
        return _refused("it printed what is wrong with them above", place)
    if in_training or is_ours or raised_in("torch", error) or not _passed(error, "megatron"):
        return None
    return _refused(reason_of(error), place)


def _refused(rule: str, place: str) -> BadInput:
    return BadInput("arguments", "(refused by Megatron)", rule=rule, remedy=f"The check is at {place}")


def _bad_checkpoint(error: BaseException) -> BadInput:
    from megatron.training import get_args

    args = get_args()
    name = "load" if args.load is not None else "pretrained_checkpoint"
    # Of the failures that torch has gathered from the ranks, the first.
    gathered = getattr(error, "failures", None)
    first = next(iter(gathered.values()))[0] if gathered else error
    reason = str(first).strip().partition("\n")[0] or type(first).__name__
    if isinstance(error, SystemExit):
        reason = "Megatron has printed the reason above, on rank 0"
    return BadInput(
        f"--{name.replace('_', '-')}",
        getattr(args, name),
        rule=f"the checkpoint cannot be loaded ({reason})",
        remedy="Name the folder that a run saved to, give the flags of the model that it trained, and name "
        "an earlier checkpoint with --ckpt-step if this one is damaged.",
    )


def lost_a_peer(error: BaseException) -> bool:
    """Whether an exception says that another rank is gone or does not answer."""
    said = str(error).lower()
    is_of_a_group = _GLOO in said or any(kind.__name__ == "DistError" for kind in type(error).__mro__)
    return is_of_a_group and any(words in said for words in _LOST_PEER)


def reason_of(error: BaseException) -> str:
    """An exception's message in one line; of one without a message, the line that raised it."""
    said = str(error).strip() or traceback.extract_tb(error.__traceback__)[-1].line or ""
    return " ".join(said.split()).rstrip(".")


def raised_in(package: str, error: BaseException) -> bool:
    """Whether the line that raised ``error`` is in a module of ``package``.

    By the module's name, not by its path: a folder of a checkout may be named like a package.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).partition(".")[0] == package


def _passed(error: BaseException, module: str, *functions: str) -> bool:
    """Whether an exception has passed a module or a package, in one of the functions if they are named."""
    return any(
        f"{frame.f_globals.get('__name__')}.".startswith(f"{module}.")
        and (not functions or frame.f_code.co_name in functions)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def report_parser_errors(parser: argparse.ArgumentParser) -> None:
    """Make ``parser`` raise :class:`BadInput`, instead of printing 800 flags on every rank."""

    def error(message: str) -> NoReturn:
        remedy = "Run with --help for the list."
        flag, separator, rule = message.removeprefix("argument ").partition(": ")
        if flag == "unrecognized arguments":
            known = [flag for action in parser._actions for flag in action.option_strings]
            near = did_you_mean(rule.split()[0].partition("=")[0], known)
            raise BadInput("argument", rule, rule="there is no such flag", remedy=near or remedy)
        if not separator or not message.startswith("argument "):
            raise BadInput("arguments", "(incomplete)", rule=message, remedy=remedy)
        raise BadInput(flag, "", rule=rule, remedy=remedy)

    parser.error = error  # type: ignore[method-assign]
    for action in parser._actions:
        # Let --help work although a text of Megatron's has a single percent sign; argparse fails at it.
        try:
            (action.help or "") % vars(action)
        except (ValueError, TypeError, KeyError):
            action.help = (action.help or "").replace("%", "%%")
    if int(os.environ.get("RANK", "0")) != 0:
        parser.print_help = lambda file=None: None  # type: ignore[method-assign]
