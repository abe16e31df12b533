"""Turns errors of Megatron's checks and of argparse into :class:`BadInput`. Called by :mod:`.session` and its
adapters.

How a launch then ends is in :mod:`.ending`.
"""

import argparse
import contextlib
import enum
import functools
import linecache
import os
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NoReturn

from megatron_ampipe.errors import AMPipeError, BadInput
from megatron_ampipe.files.spelling import did_you_mean
from megatron_ampipe.launch.flag_values import refuse_values

NO_VALUE = "(no value)"
"""Shown for a flag of which argparse names no value."""
_CHECKS = (AssertionError, ValueError, NotImplementedError, OSError)


@contextlib.contextmanager
def refuse_as_bad_input() -> Iterator[None]:
    """Turn what Megatron raises while it checks arguments into :class:`BadInput`.

    Megatron checks with assertions, some of them bare, as well as with ValueError; a missing file is an
    OSError. Some wrong values make it fail in other ways (a division by zero, an attribute of None): those
    are bad input as well, unless they come from AMPipe's own code.
    """
    try:
        yield
    except AMPipeError:
        raise
    except SystemExit as stop:
        # Megatron ends like this after it has printed what is wrong; with --help, the code is 0.
        if stop.code is not None or not raised_in("megatron", stop):
            raise
        place = origin(stop)
        raise BadInput(
            "arguments",
            "(refused by Megatron)",
            rule="it printed what is wrong with them above",
            remedy=f"The check is at {place.tb_frame.f_code.co_filename}:{place.tb_lineno}.",
        ) from stop
    except Exception as error:
        place = origin(error)
        path = place.tb_frame.f_code.co_filename
        if not isinstance(error, _CHECKS) and raised_in("megatron_ampipe", error):
            raise
        raise BadInput(
            "arguments",
            "(refused by Megatron)",
            rule=reason_of(error),
            remedy=f"The check is at {path}:{place.tb_lineno}.",
        ) from error


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


def report_parser_errors(parser: argparse.ArgumentParser) -> None:
    """Make ``parser`` raise :class:`BadInput`, instead of printing 800 flags on every rank."""

    raise_parser_errors(parser)
    _check_what_is_parsed(parser)
    for action in parser._actions:
        _name_choices(action)
        _repair_help(action)
    if int(os.environ.get("RANK", "0")) != 0:
        parser.print_help = lambda file=None: None  # type: ignore[method-assign]


def raise_parser_errors(parser: argparse.ArgumentParser) -> None:
    """Make ``parser`` raise :class:`BadInput` for what it refuses, and do nothing else."""

    def error(message: str) -> NoReturn:
        raise _parser_error(message, parser)

    parser.error = error  # type: ignore[method-assign]


def _check_what_is_parsed(parser: argparse.ArgumentParser) -> None:
    """Refuse values that no run can have as soon as they are parsed: Megatron's own messages mislead."""
    parse = parser.parse_known_args

    @functools.wraps(parse)
    def parsing(*args: Any, **kwargs: Any) -> Any:
        found, rest = parse(*args, **kwargs)
        if not rest:
            # Otherwise the flag that does not exist is reported.
            refuse_values(found)
        return found, rest

    parser.parse_known_args = parsing  # type: ignore[method-assign]


def _repair_help(action: argparse.Action) -> None:
    """Let ``--help`` work although a text of Megatron's has a single percent sign; argparse fails at it."""
    if not action.help:
        return
    try:
        action.help % vars(action)
    except (ValueError, TypeError, KeyError):
        action.help = action.help.replace("%", "%%")


def _name_choices(action: argparse.Action) -> None:
    """Make a wrong name of an enum an error that names the flag; Megatron's is a bare KeyError."""
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
"""Remedies for argparse's messages."""


def _parser_error(message: str, parser: argparse.ArgumentParser) -> BadInput:
    known = [flag for action in parser._actions for flag in action.option_strings]
    if message.startswith("unrecognized arguments: "):
        unknown = message.removeprefix("unrecognized arguments: ")
        if not unknown.startswith("-"):
            return BadInput(
                "argument",
                unknown,
                rule="is unexpected",
                remedy="A switch such as --swiglu takes no value, and a value with spaces needs quotes.",
            )
        near = did_you_mean(unknown.split()[0].partition("=")[0], known, most=3)
        remedy = near or "Run with --help for the list."
        return BadInput("argument", unknown, rule="there is no such flag", remedy=remedy)
    flag, separator, rule = message.removeprefix("argument ").partition(": ")
    if not separator or not message.startswith("argument "):
        return BadInput("arguments", "(incomplete)", rule=message, remedy="Run with --help for the list.")
    rule, _, choices = rule.partition(" (choose from ")
    rule, _, value = rule.partition(": ")
    remedy = _REMEDIES.get(rule, f"Write {flag} with a value of its type.")
    if choices:
        remedy = f"Use one of: {choices.removesuffix(')')}."
    return BadInput(flag, value or NO_VALUE, rule=rule, remedy=remedy)
