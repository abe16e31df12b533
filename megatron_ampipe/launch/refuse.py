"""How a launch ends: on bad input with one message, no traceback, and the same exit code on every rank.

A failure during training keeps its traceback. Called by the ways to launch.
"""

import argparse
import contextlib
import difflib
import enum
import functools
import linecache
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from megatron_ampipe.errors import AMPipeError, BadInput, RunFailed
from megatron_ampipe.flag_values import refuse_values

PEER_GRACE_S = 20.0
"""How long another rank leaves local rank 0 to print the message before it takes the error for its own."""
PEER_LAG_S = 2.0
"""How long local rank 0 stays after the message: a rank that is slower finds the same error, and is ended
only after it has."""


def end_with(error: AMPipeError) -> int:
    """Print ``error`` once per machine and return its exit code.

    The launcher ends every rank as soon as one has exited, so a rank that left at once could silence the
    one that speaks. The others therefore wait to be ended; one that is not, has failed alone, and speaks.
    """
    speaks = int(os.environ.get("LOCAL_RANK", "0")) == 0
    if not speaks:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(error.exit_code))
        time.sleep(PEER_GRACE_S)
    # A line of its own, whatever another rank has just left unfinished.
    print(f"\nerror: {error}", file=sys.stderr, flush=True)
    if speaks and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        time.sleep(PEER_LAG_S)
    return error.exit_code


def end_after_failure() -> int:
    """Print the exception that is being handled and return the exit code of a failed run."""
    traceback.print_exc()
    print(
        f"error: rank {os.environ.get('RANK', '0')} failed; the cause is above. A rank that reports a "
        "closed connection or a timeout has lost a peer: look at that peer's output.",
        file=sys.stderr,
        flush=True,
    )
    return RunFailed.exit_code


_CHECKS = (AssertionError, ValueError, NotImplementedError, OSError)


@contextlib.contextmanager
def refuse_as_bad_input() -> Iterator[None]:
    """Turn what Megatron raises while it checks arguments into :class:`BadInput`.

    Megatron checks with assertions, some of them bare, as well as with ValueError; a missing file is an
    OSError. Some wrong values trip it in other ways (a division by zero, an attribute of None): those are
    bad input as well, unless they come from our own code.
    """
    try:
        yield
    except AMPipeError:
        raise
    except Exception as error:
        place = _origin(error)
        path = place.tb_frame.f_code.co_filename
        if not isinstance(error, _CHECKS) and raised_in("megatron_ampipe", error):
            raise
        line = linecache.getline(path, place.tb_lineno).strip()
        raise BadInput(
            "arguments",
            "(refused by Megatron)",
            rule=str(error).strip().rstrip(".") or line,
            remedy=f"The check is at {path}:{place.tb_lineno}.",
        ) from error


def raised_in(package: str, error: BaseException) -> bool:
    """Whether the line that raised ``error`` stands in a file of ``package``."""
    return package in Path(_origin(error).tb_frame.f_code.co_filename).parts


def _origin(error: BaseException) -> TracebackType:
    """The innermost frame."""
    place = error.__traceback__
    while place.tb_next is not None:
        place = place.tb_next
    return place


def report_parser_errors(parser: argparse.ArgumentParser) -> None:
    """Make ``parser`` raise :class:`BadInput`, instead of printing 800 flags on every rank."""

    def error(message: str) -> NoReturn:
        raise _parser_error(message, parser)

    parser.error = error
    _check_what_is_parsed(parser)
    for action in parser._actions:
        _name_choices(action)
        _repair_help(action)
    if int(os.environ.get("RANK", "0")) != 0:
        parser.print_help = lambda file=None: None


def _check_what_is_parsed(parser: argparse.ArgumentParser) -> None:
    """Refuse values that no run can have as soon as they are parsed: Megatron's own words mislead."""
    parse = parser.parse_known_args

    @functools.wraps(parse)
    def parsing(*args: Any, **kwargs: Any) -> Any:
        found, rest = parse(*args, **kwargs)
        if not rest:
            # Else a flag that does not exist is what to say.
            refuse_values(found)
        return found, rest

    parser.parse_known_args = parsing


def _repair_help(action: argparse.Action) -> None:
    """Let ``--help`` work although a text of Megatron's has a bare percent sign, which argparse chokes on."""
    if not action.help:
        return
    try:
        action.help % vars(action)
    except (ValueError, TypeError, KeyError):
        action.help = action.help.replace("%", "%%")


def _name_choices(action: argparse.Action) -> None:
    """Let a wrong name of an enum be an error that says the flag; Megatron's is a bare KeyError."""
    names = [choice.name for choice in action.choices or () if isinstance(choice, enum.Enum)]
    convert = action.type
    if not names or not callable(convert):
        return

    def named(text: str) -> object:
        if text not in names:
            raise argparse.ArgumentTypeError(f"invalid choice: {text!r} (choose from {', '.join(names)})")
        return convert(text)

    action.type = named


_REMEDIES = {
    "invalid int value": "Give a whole number, without a point, an exponent or thousands separators.",
    "invalid float value": "Give a number, for example 0.1 or 1e-4.",
    "expected one argument": "Write a value after the flag.",
    "expected at least one argument": "Write one or more values after the flag.",
}
"""What to do about what argparse says."""


def _parser_error(message: str, parser: argparse.ArgumentParser) -> BadInput:
    known = [flag for action in parser._actions for flag in action.option_strings]
    if message.startswith("unrecognized arguments: "):
        unknown = message.removeprefix("unrecognized arguments: ")
        if not unknown.startswith("-"):
            return BadInput(
                "argument",
                unknown,
                rule="belongs to no flag",
                remedy="A switch such as --swiglu takes no value, and a value with spaces needs quotes.",
            )
        close = difflib.get_close_matches(unknown.split()[0].partition("=")[0], known, n=3)
        remedy = f"Did you mean {' or '.join(close)}?" if close else "Run with --help for the list."
        return BadInput("argument", unknown, rule="there is no such flag", remedy=remedy)
    flag, separator, rule = message.removeprefix("argument ").partition(": ")
    if not separator or not message.startswith("argument "):
        return BadInput("arguments", "(incomplete)", rule=message, remedy="Run with --help for the list.")
    rule, _, choices = rule.partition(" (choose from ")
    rule, _, value = rule.partition(": ")
    remedy = f"Use one of: {choices.removesuffix(')')}." if choices else _REMEDIES.get(rule)
    return BadInput(
        flag, value or "(no value)", rule=rule, remedy=remedy or f"Write {flag} with a value of its kind."
    )
