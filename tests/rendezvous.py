"""Where the ranks of a run that no launcher starts meet."""

import fcntl
import itertools
import os
import socket
import tempfile
from pathlib import Path

# Below the ports that the kernel gives to connections on its own (from 32,768), so that none of them takes
# a port between the choice and rank 0's store; the job scripts of tests/slurm use those from 20,000.
_PORTS = range(10_000, 20_000)
_held = []


def meeting_place() -> dict[str, str]:
    """The variables that ``env://`` reads, with a free port that no other test on this machine chooses.

    Raises:
        RuntimeError: If no port is free.
    """
    folder = Path(tempfile.gettempdir()) / "ampipe-test-ports"
    folder.mkdir(exist_ok=True)
    first = os.getpid() * 7 % len(_PORTS)
    for port in itertools.chain(_PORTS[first:], _PORTS[:first]):
        lock = (folder / str(port)).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as tried:
                tried.bind(("localhost", port))
        except OSError:
            lock.close()
            continue
        _held.append(lock)  # for as long as this process lives: the ranks bind the port later
        return {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    raise RuntimeError(f"no free port from {_PORTS.start} to {_PORTS.stop - 1}")
