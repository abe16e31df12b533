"""Runs command lines of tools and of training, each in a fork of a process that has imported Megatron.

A fork that takes too long, or much more memory than the process itself, is killed and reported. Reports JSON.
Run by :mod:`.test_bad_inputs`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import tests.preloaded  # noqa: F401 - what launches import, once
from megatron_ampipe import cli
from megatron_ampipe.launch import ending, pretrain
from megatron_ampipe.tools import timeline_picture  # noqa: F401 - likewise what draws
from tests.megatron.refusals_worker import PROCESS_GROUP_MADE

LIMIT_S = 60.0
MEMORY_BYTES = 4 << 30
"""Memory that a command may allocate in addition to that at its start."""
TRAIN = "train"
"""Stands for a training run, where other rows have the name of a tool."""


class Command:
    """One command line running in a child."""

    def __init__(self, words: list[str], environment: dict[str, str]) -> None:
        self._output = os.memfd_create("output")
        self._begin_s = time.monotonic()
        sys.stdout.flush()
        self._child = os.fork()
        if self._child == 0:
            os.dup2(self._output, 1)
            os.dup2(self._output, 2)
            os._exit(_run(words, environment))

    def result(self) -> dict[str, Any]:
        """Wait for its end; returns the exit code (None if it was killed) and its output."""
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
            "said": said[-50_000:],
            "traceback": "Traceback" in said,
            "seconds": time.monotonic() - self._begin_s,
        }


def _run(words: list[str], environment: dict[str, str]) -> int:
    """Runs in the child; returns the exit code."""
    import torch

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + MEMORY_BYTES,) * 2)
    os.environ.update(environment)
    torch.distributed.init_process_group = lambda *_args, **_kwargs: os._exit(PROCESS_GROUP_MADE)
    try:
        return pretrain.main(words[1:]) if words[0] == TRAIN else cli.main(words)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 70
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def main() -> None:
    """Report on all command lines in the file that the first argument names, by name."""
    with open(sys.argv[1]) as file:
        asked: dict[str, tuple[list[str], dict[str, str]]] = json.load(file)
    # There are no other ranks to wait for.
    ending.PEER_LAG_S = 0.0
    results: dict[str, dict[str, Any]] = {}
    running: dict[str, Command] = {}
    for name, (words, environment) in asked.items():
        if len(running) == 2:
            oldest = next(iter(running))
            results[oldest] = running.pop(oldest).result()
        running[name] = Command(words, environment)
    results |= {name: command.result() for name, command in running.items()}
    with open(os.environ["AMPIPE_TEST_REPORT"], "w") as report:
        json.dump(results, report)


if __name__ == "__main__":
    main()
