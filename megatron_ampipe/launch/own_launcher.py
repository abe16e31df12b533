"""Whether one of AMPipe's launchers runs this process. Then the lines of a patched Megatron do nothing.

Set by :mod:`.flags`, where launchers begin; read by :mod:`.patched`.
"""

_is_used = False


def note_use() -> None:
    """One of AMPipe's launchers runs this process, and does all that the patch would do."""
    global _is_used
    _is_used = True


def is_used() -> bool:
    """Whether :func:`note_use` was called."""
    return _is_used
