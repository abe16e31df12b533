"""Input files: text files that a user names, read only if they are regular files.

Opening a pipe without a writer would block forever, and reading a device such as ``/dev/zero`` would fill the
memory. The callers check the contents. Counterpart of :mod:`.outputs`; called wherever YAML, traces and
results are read.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path


def read_text(path: Path) -> str:
    """Read a text file.

    Raises:
        OSError: it cannot be read, or is not a regular file.
        ValueError: it is not UTF-8, or its name contains a NUL byte.
    """
    require_regular_file(path)
    return path.read_text(encoding="utf-8")


def require_regular_file(path: Path) -> None:
    """Refuse pipes, devices and sockets. Missing files and folders are not checked: opening them fails.

    Raises:
        OSError: it is a pipe, a device or a socket.
    """
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
