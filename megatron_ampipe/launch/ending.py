"""How a process of a launch ends: with the right exit code, and with the cause as its last message.

Bad input ends every rank with the same code and one message. A failure during training keeps its traceback.
torchrun ends its output with a block about the ranks that failed: it shows the message, or the traceback,
that is written here for it. Imports torch only where a run does so as well.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType

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
_RANKS = (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
"""Variables of torchrun: the index of a rank, and how many ranks there are."""


def run_to_end(check: Callable[[], None], work: Callable[[], int]) -> int:
    """Run a launch, and return its exit code, whatever happens.

    Args:
        check: Refuses what can be refused without torch.
        work: The rest, as torch's ``@record`` wants it: raises what goes wrong.
    """
    try:
        check_rank_variables()
    except AMPipeError as error:
        # These variables would say which rank prints and which ones wait.
        print(f"\nerror: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    try:
        with _handling_interrupts():
            check()
            return _recorded(work)()
    except KeyboardInterrupt:
        return end_interrupted()
    except AMPipeError as error:
        return end_with(error)
    except Exception as error:
        return end_after_failure(error)


def check_rank_variables() -> None:
    """Refuse wrong values of torchrun's variables, where they are set.

    Raises:
        BadInput: One is no whole number, or the number of a rank is not below how many there are.
    """
    remedy = "Start the run with torchrun, which sets it, or unset it."
    for name in (*itertools.chain(*_RANKS), "MASTER_PORT"):
        value = os.environ.get(name, "0")
        if not (value.isascii() and value.isdecimal() and len(value) < 10):
            raise BadInput(name, value or "(empty)", rule="must be a whole number", remedy=remedy)
    for rank, count in _RANKS:
        if rank in os.environ and int(os.environ[rank]) >= int(os.environ.get(count, 10**9)):
            rule = f"must be below {count}, which is {os.environ[count]}"
            raise BadInput(rank, os.environ[rank], rule=rule, remedy=remedy)


def keep_signal_from_children(args: argparse.Namespace) -> None:
    """Keep the signal that asks a run to save and exit from the processes that a rank starts.

    SLURM sends it to every process of a step. A rank handles it (Megatron's ``--exit-signal-handler``); the
    process that passes the results of writing a checkpoint to Megatron would be ended by it, and that
    checkpoint would fail. Processes inherit what their parent's thread blocks, and Python runs the handler in
    the main thread, whichever thread received the signal. Nothing is done for SIGTERM, by which child
    processes have to end.

    Args:
        args: Megatron's arguments.
    """
    if args.exit_signal_handler and args.exit_signal != signal.SIGTERM:
        # Started before the signal is blocked here, so it is not blocked there.
        receiver = threading.Thread(target=threading.Event().wait, name="ampipe-exit-signal", daemon=True)
        receiver.start()
        signal.pthread_sigmask(signal.SIG_BLOCK, {args.exit_signal})


def end_with(error: AMPipeError) -> int:
    """Print ``error`` once and return its exit code.

    torchrun ends all ranks as soon as one has exited. Rank 0 prints the message, so the other ranks wait
    until they are ended. A rank that is not ended is the only one that failed: it prints the message itself,
    the first rank of each node before the others.
    """
    prints = int(os.environ.get("RANK", "0")) == 0
    if not prints:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(error.exit_code))
    leave_for_torchrun(f"error: {error}")
    if not prints:
        is_first = int(os.environ.get("LOCAL_RANK", "0")) == 0
        time.sleep(PEER_GRACE_S if is_first else PEER_GRACE_S + PEER_LAG_S)
    # On a new line: another rank may have left one unfinished.
    print(f"\nerror: {error}", file=sys.stderr, flush=True)
    if prints and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        time.sleep(PEER_LAG_S)
    return error.exit_code


def end_after_failure(error: Exception) -> int:
    """Print an exception and what it means, and return the exit code of a failed run."""
    traceback.print_exception(error)
    message = f"error: rank {os.environ.get('RANK', '0')} failed; the cause is above."
    if failures.lost_a_peer(error):
        silent = failures.describe_silent_ranks()
        message = f"error: rank {os.environ.get('RANK', '0')} failed: it has lost a peer, see above. " + (
            silent or "The cause is in that peer's output."
        )
        # After the traceback, where torchrun shows it last.
        leave_for_torchrun("".join(traceback.format_exception(error)) + message, later_s=1)
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


def leave_for_torchrun(message: str, *, later_s: int = 0) -> None:
    """Write what torchrun's last block shows for this rank, in the form of torch's ``@record``.

    Args:
        message: What is shown under ``traceback``.
        later_s: Added to the time of the failure: torchrun names the earliest one as the cause.
    """
    path = os.environ.get(_ERROR_FILE)
    if not path:
        return
    extra = {"py_callstack": message, "timestamp": str(int(time.time()) + later_s)}
    try:
        with open(path, "w") as file:
            json.dump({"message": {"message": message.splitlines()[-1], "extraInfo": extra}}, file)
    except OSError:
        # The message has been, or will be, printed as well.
        pass


def _recorded(work: Callable[[], int]) -> Callable[[], int]:
    """``work`` under torch's ``@record``; unchanged where torch is missing: ``work`` reports that."""
    try:
        from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record
    except ImportError:
        return work

    class Handler(ErrorHandler):
        """Records our own errors by their message, and all others as torch does."""

        def record_exception(self, error: BaseException) -> None:
            """Called by torch with what ``work`` raised."""
            if not isinstance(error, AMPipeError):
                super().record_exception(error)

    def translated() -> int:
        try:
            return work()
        # Some exceptions of torch are no Exception.
        except BaseException as error:
            known = failures.known_cause(error)
            if known is not None:
                raise known from error
            raise

    recorded: Callable[[], int] = record(translated, Handler())
    # It returns None for a SystemExit of code 0.
    return lambda: recorded() or 0


@contextlib.contextmanager
def _handling_interrupts() -> Iterator[None]:
    """Have Ctrl-C end the run once: a second one and the logs of libraries are ignored."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        logging.disable()
        raise KeyboardInterrupt

    # A background process of a shell ignores it, and still does.
    is_handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_handled or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
