"""A row of the table of settings, and the rules that follow from its columns. The table is in
:mod:`megatron_ampipe.block.settings`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from megatron_ampipe.errors import BadInput

AUTO = "auto"
"""The value that leaves a choice to AMPipe."""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Arguments of Megatron with which a setting cannot be used.

    Attributes:
        applies: Takes the value of the setting and Megatron's parsed arguments.
        rule: Why it is refused, as one clause.
        remedy: What to use instead.
        needs: What would have to be there for the combination to run; if nothing can be done, why.
    """

    applies: Callable[[Any, Any], bool]
    rule: str
    remedy: str
    needs: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One ``--ampipe-*`` flag.

    Attributes:
        name: The field of ``Settings``: ``memory_budget`` is ``--ampipe-memory-budget``, and the key
            ``memory-budget`` in a section ``ampipe:`` of a file.
        default: The value without the flag.
        help: What it does, in Markdown for the table in docs/usage.md; ``--help`` prints it as plain text.
        shown_default: The default in both, where the value does not say it.
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
        excludes: Arguments of Megatron that it cannot be used with.
        startup: Row of the start-up table for a value that is not the default, from the configuration.
        is_folder: The run makes and fills the folder that it names.
    """

    name: str
    default: object
    help: str
    shown_default: str | None = None
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
    excludes: Exclusion | None = None
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
        return f"{text} (default: {self.shown_default or self.default})"

    def refuse(self, value: object, rule: str, remedy: str) -> BadInput:
        """The error for a value of it."""
        return BadInput(self.flag, value, rule=rule, remedy=remedy)

    def check_value(self, value: object) -> None:
        """Refuse a value that is wrong whatever the other settings are.

        Raises:
            BadInput: it is.
        """
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

    def check_required(self, given: dict[str, Any]) -> None:
        """Refuse it without the settings that it requires.

        Args:
            given: Values of the settings that the user gives, by name.

        Raises:
            BadInput: none of them is given.
        """
        value = given[self.name]
        if not self.requires or (self.requires_for is not None and value != self.requires_for):
            return
        wanted = []
        for words in self.requires:
            flag, _, example = words.partition(" ")
            name = flag.removeprefix("--ampipe-").replace("-", "_")
            if given.get(name) == AUTO or (example != AUTO and name in given):
                return
            wanted.append(words if example == AUTO else flag)
        rule = f"requires {' or '.join(wanted)}"
        raise self.refuse(value, rule, f"Add {self.requires[0]}, or leave {self.flag} out.")
