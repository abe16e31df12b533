"""A row of the table of settings, and the rules that follow from its columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_ampipe.errors import BadInput

AUTO = "auto"
"""The value that leaves a choice to AMPipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One ``--ampipe-*`` flag.

    Attributes:
        name: The field of ``Settings``: ``memory_budget`` is ``--ampipe-memory-budget``, and the key
            ``memory-budget`` in a section ``ampipe:`` of a file.
        default: The value without the flag.
        help: What it does, in Markdown for the table in docs/usage.md; ``--help`` prints it as plain text.
        shown_default: The default in both, if it is None.
        metavar: What it takes, in both.
        type: Turns the text into the value.
        choices: All values, if they are few.
        minimum: The least value, of a number.
        check: Refuses a value that has another form.
        acts: Where it has an effect: ``always``, in ``layers`` of AMPipe, or only in ``chunks``.
        with_auto: Why it cannot be given with ``--ampipe-degree auto``; None if it can.
        of_plan: A plan file says it, so it cannot be given next to one.
        requires: Settings of which one must be given too, as the user would add them. ``auto`` must be the
            value there, other values are examples.
        requires_for: The value for which they are required; None for every value.
        startup: Row of the start-up table for a value that is not the default, from the configuration.
        is_folder: The run makes and fills the folder that it names.
    """

    name: str
    default: object
    help: str
    shown_default: str = "none"
    metavar: str
    type: Callable[[str], Any] = str
    choices: tuple[str, ...] | None = None
    minimum: int | None = None
    check: Callable[[Any], object] | None = None
    acts: Literal["always", "layers", "chunks"] = "always"
    with_auto: str | None = None
    of_plan: bool = False
    requires: tuple[str, ...] = ()
    requires_for: object = None
    startup: Callable[[Any], tuple[str, ...]] | None = None
    is_folder: bool = False

    @property
    def key(self) -> str:
        """Its name in a file."""
        return self.name.replace("_", "-")

    @property
    def flag(self) -> str:
        """Its name on a command line."""
        return f"--ampipe-{self.key}"

    @property
    def dest(self) -> str:
        """Its name in parsed arguments, where it is None if the user does not set it."""
        return f"ampipe_{self.name}"

    @property
    def plain_help(self) -> str:
        """The text of ``--help``."""
        text = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", self.help).replace("`", "")
        return f"{text} (default: {self.shown_default if self.default is None else self.default})"

    def refuse(self, value: object, rule: str, remedy: str) -> BadInput:
        """The error for a value of it."""
        return BadInput(self.flag, value, rule=rule, remedy=remedy)

    def check_value(self, value: object) -> None:
        """Raise :class:`BadInput` for a value that is wrong whatever the other settings are."""
        if value == "":
            raise self.refuse("(empty)", "is empty", "Give a value, or leave it out.")
        if self.choices is not None and value not in self.choices:
            rule = f"is not one of {', '.join(self.choices)}"
            raise self.refuse(value, rule, f"Use {self.flag} {self.choices[0]}, or leave it out.")
        if self.minimum is not None and isinstance(value, int) and value < self.minimum:
            rule = f"must be at least {self.minimum}"
            raise self.refuse(value, rule, f"Use {self.minimum} or more, or leave it out.")
        if self.check is not None:
            self.check(value)

    def check_required(self, given: Mapping[str, Any]) -> None:
        """Raise :class:`BadInput` if ``given``, what the user sets by name, has none of :attr:`requires`."""
        if self.requires_for not in (None, given[self.name]):
            return
        wanted = []
        for words in self.requires:
            flag, _, example = words.partition(" ")
            value = given.get(flag.removeprefix("--ampipe-").replace("-", "_"))
            if value == AUTO or (example != AUTO and value is not None):
                return
            wanted.append(words if example == AUTO else flag)
        if wanted:
            remedy = f"Add {self.requires[0]}, or leave {self.flag} out."
            raise self.refuse(given[self.name], f"requires {' or '.join(wanted)}", remedy)
