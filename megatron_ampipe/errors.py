"""The exceptions that are shown to users, and the exit code of each.

Not for internal invariants, which are checked with ``assert``. Raised everywhere; :mod:`megatron_ampipe.cli`
and the training entry points print the message without a traceback and exit with the code.
"""


class AMPipeError(Exception):
    """Base class of all errors that are shown to users."""

    exit_code = 3


class EnvironmentMissing(AMPipeError):
    """Something outside the package is missing or too old: Python, torch, Megatron, a device."""

    exit_code = 1


class BadInput(AMPipeError, ValueError):
    """An argument, a file or a combination of settings that is not valid.

    Args:
        name: What was set, as the user wrote it (a flag, a file, a key).
        value: Its value.
        rule: Why it is refused, as one clause without a full stop.
        remedy: What to do instead, with a value that would work.
    """

    exit_code = 2

    def __init__(self, name: str, value: object, *, rule: str, remedy: str) -> None:
        self.name, self.value, self.rule, self.remedy = name, value, rule, remedy
        # A flag without a value has an empty one.
        given = f"{name} {_shortened(str(value))}".removesuffix(" ")
        super().__init__(f"{given}: {rule}. {remedy}")


def _shortened(value: str, most: int = 400) -> str:
    """The value, or its begin and end where it would hide the rest of a message."""
    if len(value) <= most:
        return value
    return f"{value[: most // 2]} ... {value[-most // 2 :]} ({len(value)} characters)"


class RunFailed(AMPipeError):
    """The command started its work but could not finish it."""

    exit_code = 3


class DifferenceFound(AMPipeError):
    """A check that compares two results found a difference."""

    exit_code = 4
