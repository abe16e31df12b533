"""Ranks that communicate over gloo and answer one request after another, which hypothesis draws."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests import forked
from tests.dist.launch import environment_of

_connection: Connection
"""Of a rank, to the test."""


class RanksLost(AssertionError):
    """A rank died or did not answer; the service has ended, and every further request raises this again."""


class Service:
    """A group of ranks, each running ``python -m module``, which calls :func:`serve`.

    ``folder`` has their logs and their rendezvous; the timeout of the first request includes the start.
    """

    def __init__(self, module: str, *, world_size: int, folder: Path, timeout_s: float = 180) -> None:
        self._timeout_s, self._lost = timeout_s, ""
        self._logs = [folder / f"rank{rank}.log" for rank in range(world_size)]
        self._connections: list[Connection] = []
        self._processes = []
        for rank, log in enumerate(self._logs):
            ours, theirs = forked.CONTEXT.Pipe()
            environment = environment_of(rank, world_size, folder)
            process = forked.CONTEXT.Process(target=_rank, args=(theirs, module, environment, str(log)))
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def ask(self, request: Any) -> list[Any]:
        """What the ``answer`` functions of all ranks return to a request, or ``{"error": traceback}``."""
        if self._lost:
            raise RanksLost(self._lost)
        answers: list[Any] = []
        end = time.monotonic() + self._timeout_s
        try:
            for connection in self._connections:
                connection.send(request)
            for rank, connection in enumerate(self._connections):
                if not connection.poll(max(0.0, end - time.monotonic())):
                    self._lose(f"rank {rank} did not answer in time: {request}", answers)
                answers.append(connection.recv())
        except (EOFError, ConnectionError):
            self._lose(f"a rank died at {request}", answers)
        return answers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, place: TracebackType | None
    ) -> None:
        """Kill the ranks; they have nothing to save."""
        for process in self._processes:
            process.kill()
            process.join()

    def _lose(self, reason: str, answers: list[Any]) -> None:
        # Each rank writes to its log where it is; it has a second for that.
        for process in self._processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1)
        self.__exit__(None, None, None)
        errors = [one["error"] for one in answers if isinstance(one, dict) and "error" in one]
        logs = [f"--- {log.stem}\n{log.read_text()[-3000:]}" for log in self._logs if log.exists()]
        self._lost = "\n".join([reason, *errors, *logs])
        raise RanksLost(self._lost)


def _rank(connection: Connection, module: str, environment: dict[str, str], log: str) -> None:
    global _connection
    _connection = connection
    forked.run_module(module, [], environment, log)


def serve(answer: Callable[[Any], Any]) -> None:
    """Answer requests until there are no more; for an exception the traceback is sent."""
    faulthandler.register(signal.SIGUSR1)
    while True:
        request = _connection.recv()
        try:
            found = answer(request)
        except Exception:
            found = {"error": traceback.format_exc()}
            print(found["error"], flush=True)
        _connection.send(found)
