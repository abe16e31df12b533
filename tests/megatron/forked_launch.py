"""Runs command lines of training and of tools, each in a fork of a process that has imported Megatron.

A fork that takes too long, or much more memory than the process itself, is killed and reported.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PROCESS_GROUP_MADE = 99
"""Exit code of a launch that has reached the creation of its process group."""
LIMIT_S = 60.0
MEMORY_BYTES = 4 << 30
"""Memory that a command may allocate in addition to that at its start."""
TRAIN = "train"
"""Stands for a training run, where other command lines have the name of a tool."""


class Launch:
    """A command line that runs in a child.

    Args:
        words: It; the first word is a tool or :data:`TRAIN`.
        environment: Additional variables. With MASTER_PORT, the only rank meets itself there; else the launch
            ends before it creates a process group.
    """

    def __init__(self, words: Sequence[str], *, environment: Mapping[str, str]) -> None:
        self._output = os.memfd_create("launch")
        self._begin_s = time.monotonic()
        sys.stdout.flush()
        self._child = os.fork()
        if self._child:
            return
        os.dup2(self._output, 1)
        os.dup2(self._output, 2)
        try:
            code = _run(words, environment)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            code = 70
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def result(self) -> dict[str, Any]:
        """Wait for its end; the exit code is None if it had to be killed."""
        pid, status = 0, 0
        while not pid and time.monotonic() < self._begin_s + LIMIT_S:
            pid, status = os.waitpid(self._child, os.WNOHANG)
            time.sleep(0.005)
        if not pid:
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
        with open(self._output, errors="replace") as output:
            output.seek(0)
            said = output.read()
        return {
            "code": os.waitstatus_to_exitcode(status) if pid else None,
            "errors": [line for line in said.splitlines() if line.startswith(("error: ", "ampipe"))],
            "traceback": "Traceback" in said,
            "output": said[-50_000:],
        }


def _run(words: Sequence[str], environment: Mapping[str, str]) -> int:
    import torch

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + MEMORY_BYTES,) * 2)
    os.environ.update(environment)
    if "MASTER_PORT" not in environment:
        torch.distributed.init_process_group = lambda *_args, **_kwargs: os._exit(PROCESS_GROUP_MADE)
    from megatron_ampipe import cli
    from megatron_ampipe.launch import pretrain

    return pretrain.main(words[1:]) if words[0] == TRAIN else cli.main(words)


def launched(command_lines: Mapping[str, tuple[Sequence[str], Mapping[str, str]]]) -> dict[str, Any]:
    """The result of each command line, by name; two run at the same time."""
    running: dict[str, Launch] = {}
    results = {}
    for name, (words, environment) in command_lines.items():
        if len(running) == 2:
            oldest = next(iter(running))
            results[oldest] = running.pop(oldest).result()
        running[name] = Launch(words, environment=environment)
    return results | {name: launch.result() for name, launch in running.items()}


def main() -> None:
    """Report on all command lines in the file that the first argument names: JSON, by name."""
    import tests.preloaded  # noqa: F401 - what launches import, once
    from megatron_ampipe.launch import ending
    from megatron_ampipe.tools import timeline_picture  # noqa: F401 - likewise what draws

    # There are no other ranks to wait for.
    ending.PEER_LAG_S = 0.0
    results = launched(json.loads(Path(sys.argv[1]).read_text()))
    Path(os.environ["AMPIPE_TEST_REPORT"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
