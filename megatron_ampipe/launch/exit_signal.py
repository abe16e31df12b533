"""Keeps the signal that asks a run to save and exit from the processes that a rank starts.

SLURM sends a signal to every process of a step. A rank handles it (Megatron's ``--exit-signal-handler``). A
process that it has started with ``exec``, such as the one that passes the results of writing a checkpoint to
Megatron, would be ended by it, and that checkpoint would fail. Called by :mod:`.session`.
"""

import argparse
import signal
import threading


def keep_from_children(args: argparse.Namespace) -> None:
    """Block the exit signal in every thread that starts processes, and receive it in one that does not.

    Processes inherit what their parent's thread blocks, so they never see it; threads that are started later
    do as well. Python runs the handler in the main thread, whichever thread received the signal. Nothing is
    done for SIGTERM, by which child processes have to end.

    Args:
        args: Megatron's arguments.
    """
    if not args.exit_signal_handler or args.exit_signal == signal.SIGTERM:
        return
    # Started before the signal is blocked here, so it is not blocked there.
    receiver = threading.Thread(target=threading.Event().wait, name="ampipe-exit-signal", daemon=True)
    receiver.start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {args.exit_signal})
