"""How a process of a launch ends: with the right exit code, and with the cause as its last message.

Bad input ends every rank with the same code and one message. A failure during training keeps its traceback.
torchrun ends its output with a block about the ranks that failed: it shows the message, or the traceback,
that is written here for it. Called by the entry points. Imports torch only where a run does so as well.
"""

from __future__ import annotations

import contextlib
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

from megatron_ampipe.errors import AMPipeError, RunFailed
from megatron_ampipe.launch import failures
from megatron_ampipe.launch.early import check_rank_variables

INTERRUPTED = 130
PEER_GRACE_S = 20.0
"""How long the other ranks wait for rank 0 to print the message before they print it themselves."""
PEER_LAG_S = 2.0
"""How long rank 0 waits after the message: a slower rank finds the same error, and should be ended only after
that."""
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Where torchrun looks for the cause of a rank's failure."""


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
