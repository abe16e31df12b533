"""Ranks that begin with torch and Megatron imported: forked from one process that imports them once.

The imports take a process several seconds of a core, and the tests start hundreds of ranks. What a rank
runs is ``python -m MODULE ARGUMENTS`` all the same; tests of the launch itself start real processes.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]

_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload(["tests.preloaded"])
_SPAWN = multiprocessing.get_context("spawn")


def run_ranks(
    module: str,
    arguments: Sequence[str],
    *,
    environments: Sequence[Mapping[str, str]],
    logs: Sequence[Path],
    timeout_s: float,
    preloaded: bool = True,
) -> list[int | None]:
    """Run one process per environment, and kill what is left when the time is over.

    Args:
        module: As in ``python -m``.
        arguments: Its command line.
        environments: The whole environment of each process.
        logs: Where the output and errors of each go.
        timeout_s: For all of them together.
        preloaded: Fork them. False for processes that import another Megatron from their ``PYTHONPATH``.

    Returns:
        The exit code of each; negative for a signal, None for one that did not end in time.
    """
    context = _FORK if preloaded else _SPAWN
    processes = [
        context.Process(target=_run, args=(module, list(arguments), dict(environment), str(log)))
        for environment, log in zip(environments, logs, strict=True)
    ]
    end = time.monotonic() + timeout_s
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()


def _run(module: str, arguments: list[str], environment: dict[str, str], log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(REPOSITORY)
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        # A process of multiprocessing ends without them.
        atexit._run_exitfuncs()
