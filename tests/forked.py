"""Starts ranks by forking a process that has already imported torch and Megatron.

The imports take several seconds of CPU time per process, and the tests start hundreds of ranks. A rank still
runs ``python -m MODULE ARGUMENTS``. Tests of the launch itself start new processes.
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

CONTEXT = multiprocessing.get_context("forkserver")
"""Starts processes that have torch and Megatron imported."""
CONTEXT.set_forkserver_preload(["tests.preloaded"])
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
    """Run one process per environment, and kill those that have not ended after the timeout.

    They are not forked without ``preloaded``, to import another Megatron from their ``PYTHONPATH``. Returns
    the exit code of each; negative for a signal, None after the timeout.
    """
    context = CONTEXT if preloaded else _SPAWN
    processes = [
        context.Process(target=run_module, args=(module, list(arguments), dict(environment), str(log)))
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


def run_module(module: str, arguments: list[str], environment: dict[str, str], log: str) -> None:
    """Run ``python -m module`` in this process, which was started for it."""
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
        # multiprocessing ends a process without flushing these.
        atexit._run_exitfuncs()
