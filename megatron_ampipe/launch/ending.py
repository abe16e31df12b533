"""Ends the process of a launch: turns an exception into one message for the user and an exit code.

Megatron's checks are assertions, some without a message, ``sys.exit()`` after a message, or plain failures. A
failure before training is bad input: all ranks end with the same code and one message. A failure during
training keeps its traceback. torchrun's last output describes the failed ranks: it shows the message, or the
traceback, that is written here for it.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from megatron_ampipe import compat
from megatron_ampipe.errors import (
    INTERRUPTED,
    AMPipeError,
    BadInput,
    EnvironmentMissing,
    RunFailed,
    did_you_mean,
    global_rank,
    nearest,
)

PEER_GRACE_S = 20.0
"""How long the other ranks wait for rank 0 to print the message before they print it themselves."""
PEER_LAG_S = 2.0
"""How long rank 0 waits after the message, so that slower ranks find the same error before they are ended."""
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Names the file in which torchrun looks for the cause of a rank's failure."""
_LOST_PEER = ("timed out", "timeout", "connection closed by peer", "connection reset by peer")
_GLOO = "gloo/transport"
"""A part of all error messages of gloo, which raises plain ``RuntimeError``; NCCL and stores have a type."""
LONGEST_REASON = 400
"""Characters of a reason, which can list every tensor of a checkpoint."""
LIST_OF_FLAGS = "Run with --help for a list of all flags."
OPTIMIZER_NOT_LOADED = (
    "without Transformer Engine or apex, Megatron cannot load the optimizer state that "
    "--use-distributed-optimizer saves"
)
WITHOUT_OPTIMIZER = "With --no-load-optim, the weights are loaded and the optimizer begins anew."


def run_to_end(work: Callable[[], int]) -> int:
    """Run a launch and return its exit code, also after exceptions."""
    if _ERROR_FILE in os.environ:
        faulthandler.enable()
    try:
        # Not in a background process of a shell, which ignores SIGINT.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt)
        return work()
    except KeyboardInterrupt:
        if global_rank() == 0:
            again = "A run that was started with --save continues from its last checkpoint with --load."
            print(f"\ninterrupted. {again}", file=sys.stderr, flush=True)
        return INTERRUPTED
    # Some exceptions of torch are not derived from Exception.
    except BaseException as error:
        cause = known_cause(error) or error
        if isinstance(cause, AMPipeError):
            return end_with(cause)
        if isinstance(cause, SystemExit):
            raise
        return end_after_failure(cause)


def _interrupt(*_: object) -> None:
    """Raise KeyboardInterrupt once; ignore torchrun's second Ctrl-C, and disable the logs of libraries."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable()
    raise KeyboardInterrupt


def keep_signal_from_children(args: argparse.Namespace) -> None:
    """Block the signal that asks a run to save and exit in the processes that a rank starts.

    SLURM sends the signal to every process of a step. Ranks handle it (Megatron's ``--exit-signal-handler``),
    but it would end the process that returns the results of a checkpoint write, and that checkpoint would
    fail. Child processes inherit the signals that the main thread blocks. Another thread of the rank receives
    the signal, and Python runs the handler in the main thread. SIGTERM is not blocked, because it has to end
    child processes.
    """
    if args.exit_signal_handler and args.exit_signal != signal.SIGTERM:
        # Started before the signal is blocked, so this thread does not block it.
        receiver = threading.Thread(target=threading.Event().wait, name="ampipe-exit-signal", daemon=True)
        receiver.start()
        signal.pthread_sigmask(signal.SIG_BLOCK, {args.exit_signal})


def end_with(error: AMPipeError) -> int:
    """Print ``error`` once and return its exit code.

    Rank 0 prints the message. torchrun kills all ranks as soon as one has exited, so the other ranks wait
    until they are killed. If only one of them has failed, it is not killed, and prints the message itself.
    """
    prints = global_rank() == 0
    if not prints:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(error.exit_code))
    _leave_for_torchrun(f"error: {error}")
    if not prints:
        time.sleep(PEER_GRACE_S)
    # On a new line, because another rank may have printed an unfinished line.
    print(f"\nerror: {error}", file=sys.stderr, flush=True)
    if prints and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        time.sleep(PEER_LAG_S)
    return error.exit_code


def end_after_failure(error: BaseException) -> int:
    """Print an exception with a summary, and return the exit code of a failed run."""
    traceback.print_exception(error)
    trace, rank = "".join(traceback.format_exception(error)), global_rank()
    if lost_a_peer(error):
        message = (
            f"error: rank {rank} failed: it has lost a peer, see above. The cause is in that peer's output."
        )
        # One second later: torchrun takes the earliest failure, that of the peer, as the cause.
        _leave_for_torchrun(trace + message, later_s=1)
    else:
        message = f"error: rank {rank} failed; the cause is above."
        _leave_for_torchrun(trace)
    print(message, file=sys.stderr, flush=True)
    return RunFailed.exit_code


def _leave_for_torchrun(message: str, *, later_s: int = 0) -> None:
    """Write the message that torchrun shows for this rank at its end, in the form of torch's ``@record``."""
    path = os.environ.get(_ERROR_FILE)
    if not path:
        return
    extra = {"py_callstack": message, "timestamp": str(int(time.time()) + later_s)}
    # A failure to write is not fatal: the message is printed as well.
    with contextlib.suppress(OSError), open(path, "w") as file:
        json.dump({"message": {"message": message.splitlines()[-1], "extraInfo": extra}}, file)


def known_cause(error: BaseException) -> AMPipeError | None:
    """The user error that an exception stands for; None if the exception is to be shown unchanged."""
    if isinstance(error, AMPipeError | KeyboardInterrupt):
        return None
    said = str(error)
    if "environment variable MASTER_" in said and "expected, but not set" in said:
        return EnvironmentMissing(
            f"{said.rpartition(': ')[2]}. It says where ranks find each other. Start the run with torchrun, "
            "which sets it: torchrun --standalone --nproc-per-node 1 ..."
        )
    is_ours = raised_in("megatron_ampipe", error)
    if isinstance(error, EOFError) and _passed(error, "multiprocessing.managers") and _lacks_main_guard():
        return BadInput(
            "script",
            sys.argv[0],
            rule="a process that writes checkpoints imports it, and it then trains again: it has no guard",
            remedy="Put its last lines below if __name__ == '__main__':, as Megatron's own scripts do.",
        )
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
    return _missing_argument(error) or _refused(reason_of(error), place)


def _lacks_main_guard() -> bool:
    """Whether the script that trains is run again by every process that is spawned."""
    try:
        return "__main__" not in Path(sys.argv[0]).read_text()
    except (OSError, ValueError):
        return False


def _missing_argument(error: BaseException) -> BadInput | None:
    """The error for a line of Megatron that fails because an argument was not given; None for another one."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    is_none = isinstance(error, TypeError) and "NoneType" in str(error)
    if not is_none and re.match(r"assert args\.\w+ is not None$", line) is None:
        return None
    args = frame.f_locals.get("args")
    missing = (name for name in re.findall(r"\bargs\.(\w+)", line) if getattr(args, name, ...) is None)
    if (name := next(missing, None)) is None:
        return None
    flag = f"--{name.replace('_', '-')}"
    remedy = f"Add {flag} with a value."
    if name == "save_interval":
        remedy = f"Add {flag} 500, say, the iterations between checkpoints, or leave out --save."
    return BadInput(flag, "(not given)", rule="Megatron needs it with these arguments", remedy=remedy)


def _refused(rule: str, place: str) -> BadInput:
    return BadInput("arguments", "(refused by Megatron)", rule=rule, remedy=f"The check is at {place}")


def _bad_checkpoint(error: BaseException) -> BadInput:
    from megatron.training import get_args

    args = get_args()
    name = "load" if args.load is not None else "pretrained_checkpoint"
    # torch gathers the failures of all ranks; take the first.
    gathered = getattr(error, "failures", None)
    first = next(iter(gathered.values()))[0] if gathered else error
    reason = str(first).strip().partition("\n")[0] or type(first).__name__
    if len(reason) > LONGEST_REASON:
        reason = f"{reason[:LONGEST_REASON]} ..."
    if isinstance(error, SystemExit):
        reason = "Megatron has printed the reason above, on rank 0"
    flag, value = f"--{name.replace('_', '-')}", getattr(args, name)
    if reason.startswith("OptimizerParamScheduler:"):
        return BadInput(
            flag,
            value,
            rule=f"the run that saved this checkpoint had another schedule of the learning rate ({reason})",
            remedy="Add --override-opt-param-scheduler to use the one of this command line, for example "
            "another --train-iters, or --use-checkpoint-opt-param-scheduler to go on with its own.",
        )
    if _lacks_fused_optimizer(args) and _passed(error, "megatron.core.optimizer.distrib_optimizer"):
        return BadInput(flag, value, rule=OPTIMIZER_NOT_LOADED, remedy=WITHOUT_OPTIMIZER)
    if _passed(error, "megatron.core.optimizer") or "optimizer.state" in reason:
        return BadInput(
            flag,
            value,
            rule=f"the optimizer state of the checkpoint is of another layout or optimizer ({reason})",
            remedy=f"Use the layout and the optimizer of the run that saved it. {WITHOUT_OPTIMIZER}",
        )
    return BadInput(
        flag,
        value,
        rule=f"the checkpoint cannot be loaded ({reason})",
        remedy="Name the folder that a run saved to, give the flags of the model that it trained, and name "
        "an earlier checkpoint with --ckpt-step if this one is damaged.",
    )


def _lacks_fused_optimizer(args: argparse.Namespace) -> bool:
    """Whether Megatron cannot load the state of the optimizer that a run uses, at any degree."""
    uses = getattr(args, "use_distributed_optimizer", False)
    return bool(uses) and not compat.has_fused_optimizers()


def warn_of_optimizer_state(args: argparse.Namespace) -> str | None:
    """A warning for a run whose checkpoints cannot be resumed with their optimizer state; None for others."""
    if args.save is None or args.no_save_optim or not _lacks_fused_optimizer(args):
        return None
    return f"{OPTIMIZER_NOT_LOADED}. {WITHOUT_OPTIMIZER}"


def lost_a_peer(error: BaseException) -> bool:
    """Whether an exception says that another rank has ended or does not answer."""
    said = str(error).lower()
    is_of_a_group = _GLOO in said or any(kind.__name__ == "DistError" for kind in type(error).__mro__)
    return is_of_a_group and any(words in said for words in _LOST_PEER)


def reason_of(error: BaseException) -> str:
    """An exception's message in one line; without a message, the source line that raised it."""
    said = str(error).strip() or traceback.extract_tb(error.__traceback__)[-1].line or ""
    return " ".join(said.split()).rstrip(".")


def raised_in(package: str, error: BaseException) -> bool:
    """Whether the line that raised ``error`` is in a module of ``package``.

    Compares the module's name, not its path: a folder of a checkout may be named like a package.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).partition(".")[0] == package


def _passed(error: BaseException, module: str, *functions: str) -> bool:
    """Whether the traceback contains a module or package, in one of ``functions`` if any are given."""
    return any(
        f"{frame.f_globals.get('__name__')}.".startswith(f"{module}.")
        and (not functions or frame.f_code.co_name in functions)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def _unknown_argument(words: str, known: Sequence[str]) -> BadInput:
    first = words.split()[0]
    if not first.startswith("-"):
        remedy = "Leave it out, or write it right after a flag that takes it."
        return BadInput("argument", words, rule="unexpected argument", remedy=remedy)
    near = did_you_mean(first.partition("=")[0], known)
    return BadInput("argument", words, rule="there is no such flag", remedy=near or LIST_OF_FLAGS)


def _wrong_value(flag: str, said: str) -> BadInput:
    """The error for a value that argparse refuses, from its message."""
    found = re.fullmatch(r"invalid (\w+) value: '(.*)'", said, re.S)
    kinds = {"int": "whole number", "float": "number"}
    if found is not None and found[1] in kinds:
        kind, value = kinds[found[1]], found[2]
        is_number = re.fullmatch(r"-?[0-9]{1,9}\.[0-9]*", value) is not None
        example = int(float(value)) if is_number else 2
        return BadInput(flag, value, rule=f"is not a {kind}", remedy=f"Use for example {flag} {example}.")
    found = re.fullmatch(r"invalid choice: '?(.*?)'? \(choose from (.*)\)", said, re.S)
    if found is not None:
        choices = [choice.strip().strip("'") for choice in found[2].split(",") if choice]
        remedy = nearest(found[1], choices) if choices else LIST_OF_FLAGS
        return BadInput(flag, found[1], rule="is not one of its values", remedy=remedy)
    if said.startswith("expected "):
        return BadInput(flag, "", rule=said, remedy="Write its value after it, or leave it out.")
    found = re.fullmatch(r"(is .*): '(.*)'", said, re.S)
    if found is not None:
        # A type of AMPipe's.
        remedy = f"Use for example {flag} 2, or leave it out."
        return BadInput(flag, found[2], rule=found[1], remedy=remedy)
    return BadInput(flag, "", rule=said, remedy=f"Use another value, or leave {flag} out.")


def report_parser_errors(parser: argparse.ArgumentParser) -> None:
    """Make ``parser`` raise :class:`BadInput`, instead of printing 800 flags on every rank."""

    def error(message: str) -> NoReturn:
        flag, separator, rule = message.removeprefix("argument ").partition(": ")
        if flag == "unrecognized arguments":
            known = [flag for action in parser._actions for flag in action.option_strings]
            raise _unknown_argument(rule, known)
        if not separator or not message.startswith("argument "):
            raise BadInput("arguments", "(incomplete)", rule=message, remedy=LIST_OF_FLAGS)
        raise _wrong_value(flag, rule)

    parser.error = error  # type: ignore[method-assign]
    for action in parser._actions:
        # argparse's --help fails at help texts of Megatron that contain a single percent sign.
        try:
            (action.help or "") % vars(action)
        except (ValueError, TypeError, KeyError):
            action.help = (action.help or "").replace("%", "%%")
    if global_rank() != 0:
        parser.print_help = lambda file=None: None  # type: ignore[method-assign]
