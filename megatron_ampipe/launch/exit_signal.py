"""The signal that asks a run to save and leave, kept from the processes that a rank starts.

SLURM sends a signal to every process of a step. A rank listens for it (Megatron's ``--exit-signal-handler``);
what it has started with ``exec``, such as the process that Megatron hands the results of writing a checkpoint
through, would be ended by it, and the checkpoint that was asked for would fail. Called by :mod:`.pretrain`.
"""

import argparse
import signal
import threading


def keep_from_children(args: argparse.Namespace) -> None:
    """Block the exit signal wherever processes are started from, and let one thread receive it.

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
