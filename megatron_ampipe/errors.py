"""The exceptions users can meet, and the exit code each one ends a command with.

Not for our own invariants (those are ``assert``). Raised everywhere; turned into an exit code by
:mod:`megatron_ampipe.cli` and by the training entry points, which print the message without a traceback.
"""


class AMPipeError(Exception):
    """Base of every error that is meant for a user to read."""

    exit_code = 3


class EnvironmentMissing(AMPipeError):
    """Something outside the package is absent or too old: Python, torch, Megatron, a device."""

    exit_code = 1


class BadInput(AMPipeError, ValueError):
    """An argument, a file or a combination of settings that cannot be accepted.

    Args:
        name: What was set, as the user wrote it (a flag, a file, a key).
        value: The value that was found.
        rule: Why it is refused, as one clause without a full stop.
        remedy: What to do instead, naming a value that would work.
    """

    exit_code = 2

    def __init__(self, name: str, value: object, *, rule: str, remedy: str) -> None:
        self.name, self.value, self.rule, self.remedy = name, value, rule, remedy
        super().__init__(f"{name} {value}: {rule}. {remedy}")


class RunFailed(AMPipeError):
    """The work started and could not be finished."""

    exit_code = 3


class DifferenceFound(AMPipeError):
    """A check that compares two results found that they differ."""

    exit_code = 4
