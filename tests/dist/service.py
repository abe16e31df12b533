"""Long-running worker processes that communicate over gloo and answer one request after another.

For tests whose requests are not known beforehand (hypothesis). The test creates a :class:`Service`; the
module of each rank calls :func:`serve`. Requests and answers are JSON, one per line, over pipes.
"""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.dist.launch import REPOSITORY


class RanksLost(AssertionError):
    """A rank died or did not answer; the service has ended, and every further request raises this again."""


class Service:
    """A group of ranks, each running ``python -m module``.

    Args:
        module: Module of the ranks; calls :func:`serve`.
        world_size: Number of ranks.
        folder: Folder for the ranks' logs and their rendezvous.
        start_timeout_s: Timeout of the first request, which includes the import of Megatron.
        timeout_s: Timeout of later requests.
    """

    def __init__(
        self,
        module: str,
        *,
        world_size: int,
        folder: Path,
        start_timeout_s: float = 180,
        timeout_s: float = 45,
    ) -> None:
        self._module, self._folder, self._timeout_s = module, folder, timeout_s
        self._lost: str | None = None
        self._answers: list[queue.SimpleQueue[str]] = []
        self._processes: list[subprocess.Popen[str]] = []
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(world_size):
            self._start(rank, world_size)
        self._collect("the start", time.monotonic() + start_timeout_s)

    def ask(self, request: Any, *, timeout_s: float | None = None) -> list[Any]:
        """Send a request to every rank.

        Args:
            request: A JSON value.
            timeout_s: In place of that of later requests.

        Returns:
            What the ranks' ``answer`` functions returned, or ``{"error": traceback}``, in rank order.

        Raises:
            RanksLost: now, or at an earlier request.
        """
        if self._lost is not None:
            raise RanksLost(self._lost)
        line = json.dumps(request)
        try:
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.write(line + "\n")
                process.stdin.flush()
        except BrokenPipeError:
            self._lose(f"a rank ended before {line}")
        return self._collect(line, time.monotonic() + (timeout_s or self._timeout_s))

    def close(self) -> None:
        """Kill the ranks; they have nothing to save."""
        for process in self._processes:
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, place: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, rank: int, world_size: int) -> None:
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
            "AMPIPE_TEST_RENDEZVOUS": str(self._folder / "rendezvous"),
        }
        with self._log(rank).open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                env=environment,
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(process, lines), daemon=True).start()
        self._processes.append(process)
        self._answers.append(lines)

    def _collect(self, request: str, deadline_s: float) -> list[Any]:
        answers = []
        for rank, lines in enumerate(self._answers):
            try:
                line = lines.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                self._lose(f"rank {rank} did not answer in time: {request}", answers)
            if not line:
                self._lose(f"rank {rank} died at {request}", answers)
            answers.append(json.loads(line))
        return answers

    def _lose(self, reason: str, answers: list[Any] | None = None) -> None:
        # Each rank writes to its log where it is; it has a second for that.
        for process in self._processes:
            process.send_signal(signal.SIGUSR1)
        time.sleep(1)
        for process in self._processes:
            process.kill()
        logs = "\n".join(
            f"--- rank {rank}\n{self._log(rank).read_text()[-3000:]}" for rank in range(len(self._processes))
        )
        errors = [
            answer["error"] for answer in answers or [] if isinstance(answer, dict) and "error" in answer
        ]
        self._lost = "\n".join([f"{self._module}: {reason}", *errors, logs])
        raise RanksLost(self._lost)

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"


def _read(process: subprocess.Popen[str], lines: queue.SimpleQueue[str]) -> None:
    """Put a rank's answers into the queue; an empty line when the rank has ended."""
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put("")


def serve(answer: Callable[[Any], Any]) -> None:
    """Answer requests until there are no more; called by worker modules when they are ready.

    Args:
        answer: Takes a request and returns a JSON value. For an exception the traceback is sent.
    """
    faulthandler.register(signal.SIGUSR1)
    answers = os.fdopen(os.dup(1), "w")
    # Megatron prints to stdout, but the pipe is only for answers.
    os.dup2(2, 1)

    def say(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    say("ready")
    for line in sys.stdin:
        try:
            say(answer(json.loads(line)))
        except Exception:
            error = traceback.format_exc()
            print(error, file=sys.stderr, flush=True)
            say({"error": error})
