"""Checks the entries of a file against an argparse parser, and turns them into words of a command line.

The parser is Megatron's with AMPipe's flags added; no flag of Megatron is known here by name. It also checks
number, type and choices of the values. Where Megatron is not installed, ``ampipe sbatch`` passes a parser of
AMPipe's flags only.
"""

from __future__ import annotations

import argparse

from megatron_ampipe.errors import BadInput
from megatron_ampipe.files.spelling import did_you_mean
from megatron_ampipe.files.yaml_lines import number_of
from megatron_ampipe.launch.refuse import NO_VALUE, raise_parser_errors
from megatron_ampipe.launch.settings.entries import OWN_SECTION, Entry

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
        known, others = (self._own, self._others) if entry.section else (self._others, self._own)
        if entry.key not in known:
            plain = entry.key.strip("-").replace("_", "-").removeprefix(f"{OWN_SECTION}-")
            if plain in others and plain not in known:
                place = f"outside '{OWN_SECTION}:', not" if entry.section else f"below '{OWN_SECTION}:',"
                owner = "flag of Megatron" if entry.section else "setting of AMPipe"
                raise entry.refuse(f"is a {owner}", f"Write '{plain}: ...' {place} indented.")
            longer = " or ".join([name for name in known if plain in name][:3])
            near = did_you_mean(plain, known, most=3) or (f"Did you mean {longer}?" if longer else "")
            rule = f"there is no such {'setting of AMPipe' if entry.section else 'flag'}"
            raise entry.refuse(rule, near or "Run with --help for the list.")
        flag = f"--{OWN_SECTION}-{entry.key}" if entry.section else f"--{entry.key}"
        if flag == self._config_flag:
            remedy = f"Name all of them after {flag}, the strongest last."
            raise entry.refuse("a file cannot name further files", remedy)
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
        action, value = self.by_flag[flag], entry.value
        if value is None:
            return ()
        # argparse turns any text into True where the type is bool, "false" as well.
        is_pair = isinstance(action, argparse.BooleanOptionalAction)
        if is_pair or action.nargs == 0 or action.type is bool:
            if not isinstance(value, bool):
                rule = "is a switch, and takes true or false without quotes"
                raise entry.refuse(rule, f"Write '{entry.key}: true'.", value=repr(value))
            on = (flag, "true") if action.type is bool else (flag,)
            return on if value else (f"--no-{flag[2:]}",) if is_pair else ()
        if isinstance(value, list) and action.nargs is None:
            text = f"[{','.join(map(str, value))}]"
            remedy = f"Write one value; a pattern of layers as '{entry.key}: \"{text}\"'."
            raise entry.refuse("takes one value, and this is a list", remedy, value=text)
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(one, str) and one for one in values):
            rule = "takes only numbers and text, and words such as true in quotes"
            shown = "(empty)" if value == "" else value
            raise entry.refuse(rule, "Give one, or leave the key out.", value=shown)
        # A word that begins with a dash, and is no number, would be taken for a flag.
        is_flag = len(values) == 1 and values[0].startswith("-") and number_of(values[0]) is None
        words = (f"{flag}={values[0]}",) if is_flag else (flag, *values)
        _parse(entry, action, words)
        return words


def _parse(entry: Entry, action: argparse.Action, words: tuple[str, ...]) -> None:
    """Have argparse check the words of one flag."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser._add_action(action)
    raise_parser_errors(parser)
    try:
        parser.parse_args(words)
    except BadInput as error:
        shown = None if error.value == NO_VALUE else error.value
        raise entry.refuse(error.rule, error.remedy, value=shown) from error
