"""Text files that a user hands over: read only where they are plain files.

A pipe that nobody writes to would be waited for without an end, and a device such as ``/dev/zero`` read until
memory is full. What the text must be is checked by who asks for it. Counterpart of :mod:`.outputs`; called
wherever YAML, traces and results are read.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        OSError: it cannot be read, or is no plain file.
        ValueError: it is not UTF-8, or its name holds a NUL byte.
    """
    require_regular_file(path)
    return path.read_text(encoding="utf-8")


def require_regular_file(path: Path) -> None:
    """Refuse pipes, devices and sockets; what is not there, or is a folder, fails when it is opened.

    Raises:
        OSError: it is one of these.
    """
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
