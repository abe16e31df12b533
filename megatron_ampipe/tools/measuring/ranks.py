"""Runs a function in several ranks of this machine, connected by a chosen link: the one rank runner.

Importing it needs no torch::

    def work(rank: Rank[RankJob]) -> float:      # of a module or script that can be imported again
        rank.start_megatron()
        rank.say("progress")                     # reaches on_message of the command at once
        return seconds

    job = RankJob(num_ranks=2, link=parse_link("200mbit"))
    seconds_by_rank = run_ranks(job, work, on_message=lambda rank, event, value: ...)

Other inputs of ``work`` are fields of a subclass of :class:`RankJob`. Ranks are spawned processes, each
in a separate session: Ctrl-C reaches only the command, which then kills them, and the kernel kills them if
the command dies itself. Not torch's elastic agent: ranks in network namespaces cannot reach its TCP store.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import io
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from megatron_ampipe.errors import AMPipeError, DifferenceFound, EnvironmentMissing, RunFailed
from megatron_ampipe.launch import connections
from megatron_ampipe.tools.measuring import machine, network
from megatron_ampipe.tools.measuring.network import Link

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

    from megatron_ampipe.tools.measuring.emulation import Emulation

_LOG_LINES = 30
_GRACE_S, _POLL_S = 0.3, 1.0
"""How long to wait for failures of other ranks after the first, and how often to poll ranks: rarely, because
on two cores the command competes with them."""
_PAUSE_S = 0.02
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """How to run ranks; a subclass adds the inputs of their work.

    Attributes:
        ranks_per_node: Consecutive ranks that are one node; None if all ranks are.
        emulates_peers: One process stands for all ranks; see :mod:`.emulation`.
        seed: Seed of weights and inputs.
        timeout_s: A collective fails after this time, and the run when no rank says anything for so long.
    """

    num_ranks: int
    link: Link
    ranks_per_node: int | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    emulates_peers: bool = False
    seed: int = 1
    timeout_s: float = 300.0

    @property
    def on_cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def cores(self) -> tuple[int, ...]:
        """The cores to pin ranks to: one for each rank on a CPU; none if there are too few."""
        usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        is_enough = not self.on_cuda and len(usable) >= self.num_ranks
        return tuple(usable[: self.num_ranks]) if is_enough else ()


@dataclass(frozen=True, slots=True)
class Rank[Job: RankJob]:
    """A rank, as the function that runs in it sees it.

    Attributes:
        job: How the ranks are run.
        number: From 0.
        rendezvous: File through which ranks find each other; None under torchrun, which sets the environment.
        say: Sends an event and a value to the command.
    """

    job: Job
    number: int
    rendezvous: Path | None = None
    say: Callable[..., None] = lambda *_: None

    def progress(self) -> None:
        """Report the end of a step, and leave a core to the command while it shows that."""
        self.say("progress")
        time.sleep(_PAUSE_S)

    def connect(self) -> Emulation | None:
        """Join torch's process group, before Megatron is imported; returns what emulates the link."""
        import torch
        import torch.distributed as dist

        job, emulation = self.job, None
        if job.on_cuda:
            # As in training.
            connections.set_default()
            # Nodes of a job that this command started share a machine.
            is_launched = self.rendezvous is None and "LOCAL_RANK" in os.environ
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) if is_launched else self.number)
        else:
            from megatron_ampipe.launch.host import torch_calls

            torch.set_num_threads(1)
            torch_calls.install_all_to_all()
        if job.link.emulated:
            from megatron_ampipe.tools.measuring.emulation import install

            # Before Megatron is imported, which keeps references to collectives.
            emulation = install(job.link, on_cuda=job.on_cuda, emulates_peers=job.emulates_peers)
            if emulation.why_cycles is not None:
                print(f"the emulated link counts clock cycles: {emulation.why_cycles}", file=sys.stderr)
        if job.emulates_peers:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", store=FakeStore(), rank=self.number, world_size=job.num_ranks)
            return emulation
        init_method = None
        if self.rendezvous is not None:
            init_method = f"file://{self.rendezvous}"
            if sys.platform == "linux":
                # A machine's name may not resolve to one of its addresses.
                os.environ["GLOO_SOCKET_IFNAME"] = network.INTERFACE if job.link.is_network else "lo"
        dist.init_process_group(
            "nccl" if job.on_cuda else "gloo",
            init_method=init_method,
            timeout=datetime.timedelta(seconds=job.timeout_s),
            rank=self.number,
            world_size=job.num_ranks,
        )
        return emulation

    def start_megatron(self) -> Emulation | None:
        """:meth:`connect`, and Megatron's parallel state: all ranks expert-parallel."""
        from megatron_ampipe.launch import host

        emulation = self.connect()
        if not self.job.on_cuda:
            host.install()
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        from megatron_ampipe.runtime.executors import demote_gloo_threads

        # The extra gloo groups are for checkpoints and data, and an emulated peer cannot have any.
        parallel_state.initialize_model_parallel(
            expert_model_parallel_size=self.job.num_ranks,
            create_gloo_process_groups=not self.job.emulates_peers,
        )
        # Random states that CUDA graphs can capture; those of Transformer Engine, where it is installed.
        model_parallel_cuda_manual_seed(
            self.job.seed, te_rng_tracker=self.job.on_cuda, use_cudagraphable_rng=self.job.on_cuda
        )
        # A pipeline does this in training; here it is done before any timing, so Megatron's layer has it too.
        demote_gloo_threads()
        return emulation


Message = tuple[str, Any]
"""An event and its value, which any rank can choose."""
OnMessage = Callable[[int, str, Any], None]
"""Receives a rank and its message."""


def run_ranks[Job: RankJob, Result](
    job: Job,
    work: Callable[[Rank[Job]], Result],
    *,
    on_message: OnMessage = lambda *_: None,
    log: Path | None = None,
) -> list[Result]:
    """Run a function in every rank to its end; no process is left, however this ends.

    Args:
        job: How to run the ranks, with the inputs of their work.
        work: Runs in each rank. It must be importable by name.
        on_message: Called with rank, event and value of each message of a rank.
        log: File to which all ranks' output is appended; None for a temporary one.

    Returns:
        The return values of ``work``, by rank.

    Raises:
        RunFailed: a rank failed or was lost, or none said anything for ``job.timeout_s``.
        EnvironmentMissing, DifferenceFound: a rank raised it, or the link cannot be made.
    """
    count = 1 if job.emulates_peers else job.num_ranks
    results: dict[int, Result] = {}
    namespaces: list[int | None] = [None] * count
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ampipe-ranks-")))
        stack.enter_context(signals_as_interrupts())
        num_gpus = machine.num_gpus() if job.on_cuda else count
        if num_gpus < count:
            raise EnvironmentMissing(
                f"{count} ranks need as many GPUs, and there are {num_gpus}. Use fewer --ranks, or "
                "ampipe bench with --link emulated:RATE, which emulates the others."
            )
        if job.link.is_network:
            namespaces = [
                *stack.enter_context(network.connected(job.link, count, ranks_per_node=job.ranks_per_node))
            ]
        log = log or folder / "log"
        processes: dict[Connection, SpawnProcess] = {}
        stack.callback(_end, processes)
        spawn = multiprocessing.get_context("spawn")
        for rank, namespace in enumerate(namespaces):
            pipe, rank_end = spawn.Pipe()
            process = _RankProcess(job, work, rank, folder, log, namespace, parent=os.getpid())
            processes[pipe] = spawn.Process(target=process.run, args=(rank_end,))
            processes[pipe].start()
            rank_end.close()
        for rank, event, value in _messages(processes, log, timeout_s=job.timeout_s):
            if event == "done":
                results[rank] = value
            else:
                on_message(rank, event, value)
    return [results[rank] for rank in range(count)]


def _end(processes: Mapping[Connection, SpawnProcess]) -> None:
    for process in processes.values():
        # There is no process group before the rank has created its session.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
    for pipe, process in processes.items():
        process.join()
        pipe.close()


def _messages(
    processes: Mapping[Connection, SpawnProcess], log: Path, *, timeout_s: float
) -> Iterator[tuple[int, *Message]]:
    """Messages with their rank, until every rank has said ``done``; raises the first cause of a failure."""
    pipes = {pipe: rank for rank, pipe in enumerate(processes)}
    missing = dict(enumerate(processes.values()))
    failures: dict[int, AMPipeError] = {}
    last_sign, failing_since = time.monotonic(), 0.0
    while missing:
        for pipe in wait(list(pipes), timeout=_GRACE_S if failing_since else _POLL_S):
            assert isinstance(pipe, Connection)
            rank = pipes[pipe]
            try:
                event, value = pipe.recv()
            except (EOFError, OSError):
                del pipes[pipe]
                continue
            last_sign = time.monotonic()
            if event == "failed":
                kind, text = value
                failures[rank] = kind(text)
                continue
            if event == "done":
                del missing[rank], pipes[pipe]
            yield rank, event, value
        # A process that a rank has started may keep the rank's pipe open after the rank has ended.
        codes = {rank: process.exitcode for rank, process in missing.items() if process.exitcode is not None}
        if codes or failures:
            failing_since = failing_since or time.monotonic()
            if time.monotonic() - failing_since > _GRACE_S:
                raise _first_cause(codes, failures, log)
        elif time.monotonic() - last_sign > timeout_s:
            raise RunFailed(f"no rank answered for {timeout_s:g} s; all were ended.{_tail(log)}")


def _first_cause(codes: Mapping[int, int], failures: Mapping[int, AMPipeError], log: Path) -> AMPipeError:
    """Peers of a rank that was killed or that failed lose their connection to it, and fail too."""
    for rank, code in codes.items():
        if code < 0:
            return RunFailed(f"rank {rank} was killed by {signal.Signals(-code).name}; the others were ended")
    for error in failures.values():
        if not isinstance(error, RunFailed):
            return error
    for rank, error in failures.items():
        return RunFailed(f"rank {rank} failed: {error}{_tail(log)}")
    rank, code = next(iter(codes.items()))
    return RunFailed(f"rank {rank} ended with exit code {code}{_tail(log)}")


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:] if log.exists() else []
    return "".join(f"\n  {line}" for line in ["", "last lines of the ranks:", *lines] if lines)


@dataclass(frozen=True, slots=True)
class _RankProcess[Job: RankJob, Result]:
    """What a rank's process does.

    Attributes:
        job: How the ranks are run.
        work: The function of each rank.
        number: The rank.
        folder: Of files that all ranks of this run use.
        log: File to which the output is appended.
        namespace: The network namespace to enter, as in :func:`.network.enter`; None to stay.
        parent: The command's process.
    """

    job: Job
    work: Callable[[Rank[Job]], Result]
    number: int
    folder: Path
    log: Path
    namespace: int | None
    parent: int

    def run(self, pipe: Connection) -> None:
        """Work, report to ``pipe``, and exit without cleaning up, as peers may have ended already."""
        self._die_with_parent()
        self._write_to_log()
        faulthandler.enable()
        # Processes that the rank starts, such as workers of a data loader, are started as in a training.
        multiprocessing.set_start_method(None, force=True)
        self._set_environment()
        code = 1
        try:
            pipe.send(("done", self._work(pipe)))
            code = 0
        except AMPipeError as error:
            kept = isinstance(error, EnvironmentMissing | DifferenceFound)
            pipe.send(("failed", (type(error) if kept else RunFailed, str(error))))
        except BaseException as error:
            traceback.print_exc()
            pipe.send(("failed", (RunFailed, f"{type(error).__name__}: {error}")))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _die_with_parent(self) -> None:
        os.setsid()
        if sys.platform == "linux":
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # It may have ended before this was set.
        if os.getppid() != self.parent:
            os._exit(1)

    def _write_to_log(self) -> None:
        output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # Ranks share a log. Under PYTHONUNBUFFERED, print() would write text and line end apart.
        assert isinstance(sys.stdout, io.TextIOWrapper)
        sys.stdout.reconfigure(line_buffering=True, write_through=False)

    def _set_environment(self) -> None:
        per_node = self.job.ranks_per_node or self.job.num_ranks
        os.environ |= {"RANK": str(self.number), "LOCAL_RANK": str(self.number % per_node)}
        os.environ |= {"WORLD_SIZE": str(self.job.num_ranks), "LOCAL_WORLD_SIZE": str(per_node)}
        # Temporary files of libraries are removed with the folder.
        os.environ["TMPDIR"] = str(self.folder)
        if not self.job.on_cuda:
            os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

    def _work(self, pipe: Connection) -> Result:
        if self.namespace is not None:
            network.enter(self.namespace)
        if cores := self.job.cores:
            # Before torch starts its threads, which inherit it.
            os.sched_setaffinity(0, {cores[self.number]})

        def say(event: str, value: object = None) -> None:
            pipe.send((event, value))

        return self.work(Rank(self.job, self.number, self.folder / "rendezvous", say))


@contextlib.contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does, so that everything is cleaned up."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    earlier = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
