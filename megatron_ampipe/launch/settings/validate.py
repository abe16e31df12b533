"""Checks the entries of a file against an argparse parser, and turns them into words of a command line.

The parser is Megatron's with AMPipe's flags added; no flag of Megatron is known here by name. Where
Megatron is not installed, ``ampipe sbatch`` passes a parser of AMPipe's flags only. Each message names what
to write instead. Called by :mod:`.resolve` and ``ampipe sbatch``.
"""

from __future__ import annotations

import argparse
import difflib
import enum
from typing import Any

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.settings.entries import OWN_SECTION, Entry
from megatron_ampipe.spelling import did_you_mean
from megatron_ampipe.yaml_lines import number_of

_SHOWN_CHOICES = 12
_STORES = (
    argparse._StoreAction,
    argparse._StoreTrueAction,
    argparse._StoreFalseAction,
    argparse.BooleanOptionalAction,
)


class ParserFlags:
    """The flags of a parser.

    Args:
        parser: With every flag added.
        config_flag: The flag that names files, which a file cannot hold.
    """

    def __init__(self, parser: argparse.ArgumentParser, *, config_flag: str) -> None:
        self.by_flag = {flag: action for action in parser._actions for flag in action.option_strings}
        self._config_flag = config_flag
        names = [flag.removeprefix("--") for flag in self.by_flag if flag.startswith("--")]
        own = f"{OWN_SECTION}-"
        self._own = [name.removeprefix(own) for name in names if name.startswith(own)]
        self._others = [name for name in names if not name.startswith(own)]

    def setting(self, flag: str) -> argparse.Action | None:
        """The action of a flag that sets something; None for other flags, and for an unknown word."""
        action = self.by_flag.get(flag)
        return action if isinstance(action, _STORES) and flag != self._config_flag else None

    def flag_of(self, entry: Entry) -> str:
        """The flag that a key means.

        Raises:
            BadInput: there is none, or a file cannot hold it.
        """
        known = self._own if entry.section else self._others
        name = f"{OWN_SECTION}-{entry.key}" if entry.section else entry.key
        if entry.key not in known:
            raise self._unknown(entry, known)
        flag = f"--{name}"
        if flag == self._config_flag:
            raise entry.refuse(
                "a file cannot name further files", f"Name all of them after {flag}, the strongest last."
            )
        action = self.setting(flag)
        if action is None:
            raise entry.refuse("is not a setting", "Leave it out of the file.")
        if isinstance(action, argparse.BooleanOptionalAction) and entry.key.startswith("no-"):
            raise entry.refuse("takes false in place of 'no-'", f"Write '{entry.key[3:]}: false'.")
        return flag

    def words_of(self, entry: Entry, flag: str) -> tuple[str, ...]:
        """The words of a command line that mean the same; none for null and for a switch that is off.

        Raises:
            BadInput: the flag does not take the value.
        """
        action = self.by_flag[flag]
        if entry.value is None:
            return ()
        if isinstance(action, argparse.BooleanOptionalAction):
            return (flag if _switch(entry) else f"--no-{flag[2:]}",)
        if action.nargs == 0:
            return (flag,) if _switch(entry) else ()
        if action.type is bool:
            # argparse turns any text into True, "false" as well.
            return (flag, "true") if _switch(entry) else ()
        values = _values(entry, action)
        for value in values:
            _check(entry, action, value)
        return _joined(entry, flag, values)

    def _unknown(self, entry: Entry, known: list[str]) -> BadInput:
        """What to write in place of an unknown key."""
        plain = entry.key.strip("-").replace("_", "-").removeprefix(f"{OWN_SECTION}-")
        if not entry.section and plain in self._own:
            return entry.refuse(
                "is a setting of AMPipe", f"Write '{plain}: ...' below '{OWN_SECTION}:', indented."
            )
        if entry.section and plain in self._others:
            return entry.refuse(
                "is a flag of Megatron", f"Write '{plain}: ...' outside '{OWN_SECTION}:', not indented."
            )
        if plain in known:
            return entry.refuse(
                "keys are written with hyphens, and without leading dashes", f"Write '{plain}'."
            )
        negated = next((f"{no}-{plain}" for no in ("no", "disable") if f"{no}-{plain}" in known), None)
        if negated is not None:
            remedy = "Leave it out: it is on." if entry.value is True else f"Write '{negated}: true'."
            return entry.refuse("Megatron only has the flag that switches it off", remedy)
        if plain.startswith("no-") and plain[3:] in known:
            return entry.refuse("there is no such flag", f"Write '{plain[3:]}: false', or leave it out.")
        rule = f"there is no such {'setting of AMPipe' if entry.section else 'flag'}"
        remedy = did_you_mean(plain, known, most=3)
        if not remedy and (longer := [name for name in known if plain in name][:3]):
            remedy = f"Did you mean {' or '.join(longer)}?"
        return entry.refuse(rule, remedy or "Run with --help for the list.")


def _switch(entry: Entry) -> bool:
    if not isinstance(entry.value, bool):
        said_yes = str(entry.value).lower() in ("yes", "on", "1", "true", "y")
        raise entry.refuse(
            "is a switch, and takes true or false without quotes",
            f"Write '{entry.key}: {'true' if said_yes else 'false'}'.",
            value=repr(entry.value),
        )
    return entry.value


def _values(entry: Entry, action: argparse.Action) -> list[str]:
    """The value as a list of texts, of the length that the flag takes."""
    found = entry.value
    if isinstance(found, dict):
        raise entry.refuse("is not a section", f"Write '{entry.key}: value' on one line.")
    if action.nargs is None and isinstance(found, list):
        text = f"[{','.join(map(str, found))}]"
        remedy = f"Write '{entry.key}: \"{text}\"'." if _is_pattern(action) else "Write one value."
        raise entry.refuse("takes one value, and this is a list", remedy, value=text)
    if action.nargs is not None and isinstance(found, str) and len(found.split()) > 1:
        remedy = f"Write '{entry.key}: [{', '.join(found.split())}]'."
        raise entry.refuse("takes several values, which YAML writes as a list", remedy, value=found)
    values = [_text(entry, action, value) for value in (found if isinstance(found, list) else [found])]
    if isinstance(action.nargs, int) and len(values) != action.nargs:
        raise entry.refuse(
            f"takes {action.nargs} values, and here are {len(values)}",
            f"Write '{entry.key}: [{', '.join(['...'] * action.nargs)}]'.",
            value=", ".join(values),
        )
    if action.nargs == "+" and not values:
        raise entry.refuse("is an empty list", "Name at least one value, or leave the key out.", value="[]")
    return values


def _text(entry: Entry, action: argparse.Action, value: object) -> str:
    """One value, which must be a number or text."""
    if isinstance(value, bool):
        word = str(value).lower()
        remedy = f"Write {_example(action)}."
        if action.choices is None and action.type in (None, str):
            remedy = f"Write {_example(action)}; the word itself needs quotes: '{entry.key}: \"{word}\"'."
        raise entry.refuse("is not a switch, and takes a value", remedy, value=word)
    if not isinstance(value, str):
        raise entry.refuse(
            "takes only numbers and text", "Write each value plainly, without brackets or tags.", value=value
        )
    if not value:
        remedy = "Give one, or leave the key out; 'null' undoes what an earlier file says."
        raise entry.refuse("has no value", remedy)
    return value


def _check(entry: Entry, action: argparse.Action, text: str) -> None:
    """Check one value against type and choices, as the parser will."""
    convert: Any = action.type or str
    try:
        value = convert(text)
    except Exception as error:
        raise _wrong_type(entry, action, text, error) from error
    if action.choices is not None and value not in action.choices:
        raise _wrong_choice(entry, action, text)


def _wrong_type(entry: Entry, action: argparse.Action, text: str, error: Exception) -> BadInput:
    if action.choices is not None and action.type not in (int, float):
        return _wrong_choice(entry, action, text)
    if action.type is int:
        number = number_of(text.replace(",", ""))
        whole = None if number is None or not number.is_integer() else int(number)
        remedy = f"Write {_example(action)}." if whole is None else f"Write '{entry.key}: {whole}'."
        return entry.refuse("takes a whole number", remedy, value=text)
    if action.type is float:
        return entry.refuse("takes a number", f"Write {_example(action)}.", value=text)
    if _is_pattern(action):
        return entry.refuse(
            "takes a number or a pattern of 0 and 1 for the layers",
            f"Write for example '{entry.key}: \"([0]*1+[1]*3)\"'.",
            value=text,
        )
    # AMPipe's own types say what they take; argparse's convention is to end such a message with the value.
    own = isinstance(error, argparse.ArgumentTypeError)
    rule = str(error).partition(": ")[0] if own else "is not what the flag takes"
    remedy = f"Write '{entry.key}: 4'." if own else f"Write {_example(action)}."
    return entry.refuse(rule, remedy, value=text)


def _wrong_choice(entry: Entry, action: argparse.Action, text: str) -> BadInput:
    names = [choice.name if isinstance(choice, enum.Enum) else str(choice) for choice in action.choices or ()]
    lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(text.lower(), lower, n=1)
    best = lower[near[0]] if near else names[0]
    shown = ", ".join(names[:_SHOWN_CHOICES]) + (", ..." if len(names) > _SHOWN_CHOICES else "")
    return entry.refuse(f"is not one of {shown}", f"Write {best}.", value=text)


def _is_pattern(action: argparse.Action) -> bool:
    """Whether the flag takes a number or a pattern of layers; Megatron's types for these end in this name."""
    return getattr(action.type, "__name__", "").endswith("freq_type")


def _example(action: argparse.Action) -> str:
    """A value that the flag would take."""
    if action.choices:
        first = next(iter(action.choices))
        return first.name if isinstance(first, enum.Enum) else str(first)
    if action.type is int:
        return "for example 4"
    if action.type is float:
        return "for example 0.1 or 1e-4"
    return "text"


def _joined(entry: Entry, flag: str, values: list[str]) -> tuple[str, ...]:
    """The words. A value that begins with a dash would be taken for a flag, unless it is a number."""
    dashed = [value for value in values if value.startswith("-") and number_of(value) is None]
    if not dashed:
        return (flag, *values)
    if len(values) == 1:
        return (f"{flag}={values[0]}",)
    raise entry.refuse(
        "begins with a dash, which the parser takes for a flag", "Write it without.", value=dashed[0]
    )
