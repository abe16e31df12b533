"""How a process of a launch ends: with the right exit code, and with the cause as its last message.

Bad input ends every rank with the same code and one message. A failure during training keeps its traceback.
torchrun ends its output with a block about the ranks that failed: it shows the message, or the traceback,
that is written here for it.
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

from megatron_ampipe.errors import AMPipeError, BadInput, RunFailed
from megatron_ampipe.launch import failures

INTERRUPTED = 130
PEER_GRACE_S = 20.0
"""How long the other ranks wait for rank 0 to print the message before they print it themselves."""
PEER_LAG_S = 2.0
"""How long rank 0 waits after the message: a slower rank finds the same error, and should be ended only after
that."""
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Where torchrun looks for the cause of a rank's failure."""


def run_to_end(work: Callable[[], int]) -> int:
    """Run a launch, and return its exit code, whatever happens."""
    wrong = _wrong_rank_variable()
    if wrong is not None:
        # These variables would say which rank prints and which ones wait.
        print(f"\nerror: {wrong}", file=sys.stderr, flush=True)
        return wrong.exit_code
    if _ERROR_FILE in os.environ:
        faulthandler.enable()
    try:
        # A background process of a shell ignores it, and still does.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt)
        return work()
    except KeyboardInterrupt:
        return end_interrupted()
    # Some exceptions of torch are no Exception.
    except BaseException as error:
        cause = failures.known_cause(error) or error
        if isinstance(cause, AMPipeError):
            return end_with(cause)
        if not isinstance(cause, Exception):
            raise
        return end_after_failure(cause)


def _interrupt(*_: object) -> None:
    """End the run once: a second Ctrl-C, as torchrun sends it, and the logs of libraries are ignored."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable()
    raise KeyboardInterrupt


def _wrong_rank_variable() -> BadInput | None:
    """The error of a wrong value of torchrun's variables: a rank that is too large would wait forever."""
    for rank, count in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        value, limit = os.environ.get(rank, "0"), os.environ.get(count, "1000000")
        if not (value.isdecimal() and limit.isdecimal() and int(value) < int(limit)):
            rule = f"must be a whole number below {count}, which is {limit}"
            remedy = "Start the run with torchrun, which sets both, or unset them."
            return BadInput(rank, value or "(empty)", rule=rule, remedy=remedy)
    return None


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
    until they are ended. One that is not ended has failed alone, and prints the message itself.
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


def end_after_failure(error: Exception) -> int:
    """Print an exception and what it means, and return the exit code of a failed run."""
    traceback.print_exception(error)
    trace, rank = "".join(traceback.format_exception(error)), os.environ.get("RANK", "0")
    if failures.lost_a_peer(error):
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


def end_interrupted() -> int:
    """Print on rank 0 that Ctrl-C ended the run, and return the exit code for that."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(
            "\ninterrupted. A run that was started with --save continues from its last checkpoint "
            "with --load.",
            file=sys.stderr,
            flush=True,
        )
    return INTERRUPTED


def _leave_for_torchrun(message: str, *, later_s: int = 0) -> None:
    """Write what torchrun's last block shows for this rank, in the form of torch's ``@record``."""
    path = os.environ.get(_ERROR_FILE)
    if not path:
        return
    extra = {"py_callstack": message, "timestamp": str(int(time.time()) + later_s)}
    # The message is printed as well.
    with contextlib.suppress(OSError), open(path, "w") as file:
        json.dump({"message": {"message": message.splitlines()[-1], "extraInfo": extra}}, file)
