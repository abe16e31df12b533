"""Starts ranks by forking a process that has already imported torch and Megatron.

The imports take several seconds of CPU time per process, and the tests start hundreds of ranks. A rank still
runs ``python -m MODULE ARGUMENTS``. Tests of the launch itself start new processes.
"""

import atexit
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]

CONTEXT = multiprocessing.get_context("forkserver")
"""Starts processes that have torch and Megatron imported."""
CONTEXT.set_forkserver_preload(["tests.preloaded"])
_SPAWN = multiprocessing.get_context("spawn")


def completed(
    *command: str | Path,
    cwd: Path = REPOSITORY,
    env: Mapping[str, str] | None = None,
    code: int | None = 0,
    timeout_s: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; fails the test if it has another exit code, where one is given."""
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s)
    said = f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert code in (None, done.returncode), f"{command}: {done.returncode}\n{said}"
    return done


def alive(pid: int) -> bool:
    """Whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], bool], what: str, *, timeout_s: float) -> None:
    """Wait for a condition; fails the test if it takes longer."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"timeout: {what}"
        time.sleep(0.05)


def variables_of(rank: int, num_ranks: int, ranks_per_node: int | None = None) -> dict[str, str]:
    """What a launcher tells a rank; without ``ranks_per_node``, of a single node."""
    per_node = ranks_per_node or num_ranks
    own = {"RANK": rank, "LOCAL_RANK": rank % per_node}
    numbers = {**own, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": per_node}
    return {name: str(number) for name, number in numbers.items()}


def run_workers(
    module: str, arguments: Sequence[str], *, world_size: int, preloaded: bool = True
) -> list[Any]:
    """Run ``python -m module ARGUMENTS`` on ``world_size`` ranks, and return what each has reported.

    They report with :func:`tests.dist.worker.report`; ``preloaded`` as in :func:`run_ranks`.
    """
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
            "AMPIPE_TEST_RENDEZVOUS": f"{folder}/rendezvous",
            "AMPIPE_TEST_REPORT": folder,
        }
        codes, logs = run_ranks(
            module, arguments, num_ranks=world_size, env=env, timeout_s=1200, preloaded=preloaded
        )
        failed = [rank for rank, code in enumerate(codes) if code != 0]
        ends = "\n".join(f"--- rank {rank}\n{logs[rank][-3000:]}" for rank in failed)
        assert not failed, f"ranks {failed} of {module} ended with {codes}\n{ends}"
        return [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(world_size)]


def run_ranks(
    module: str,
    arguments: Sequence[str],
    *,
    num_ranks: int,
    env: Mapping[str, str],
    timeout_s: float,
    preloaded: bool = True,
    ranks_per_node: int | None = None,
) -> tuple[list[int | None], list[str]]:
    """Run the ranks of a node, and kill those that have not ended after the timeout.

    To ``env``, what a launcher tells a rank is added; with ``ranks_per_node``, as on several nodes. They are
    not forked without ``preloaded``, to import another Megatron from their ``PYTHONPATH``. Returns the exit
    code of each, negative for a signal, None after the timeout; and what each printed.
    """
    context = CONTEXT if preloaded else _SPAWN
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(num_ranks)]
        processes = []
        for rank, log in enumerate(logs):
            given = (
                module,
                list(arguments),
                {**env, **variables_of(rank, num_ranks, ranks_per_node)},
                str(log),
            )
            processes.append(context.Process(target=run_module, args=given))
        end = time.monotonic() + timeout_s
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(max(0.0, end - time.monotonic()))
            return [process.exitcode for process in processes], [log.read_text() for log in logs]
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
