"""What every rank of ``ampipe bench`` and ``ampipe profile`` does, whatever it measures.

A rank reads its job from standard input, answers on standard output (see :mod:`.rank_job`), and writes
everything else to standard error. It ends with the process that started it. Called by
``benchmark.block_worker``, ``benchmark.training_worker`` and ``profiling.profile_worker``, which
:mod:`.rank_processes` starts.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from megatron_ampipe.errors import AMPipeError, EnvironmentMissing
from megatron_ampipe.tools.measuring.link import Link, LinkKind, parse_link
from megatron_ampipe.tools.measuring.network import INTERFACE
from megatron_ampipe.tools.measuring.rank_job import BlockJob, RankJob

if TYPE_CHECKING:
    from megatron_ampipe.tools.measuring.emulation import Emulation

_PR_SET_PDEATHSIG = 1
_PAUSE_S = 0.02


Answer = Callable[..., None]
"""Sends one answer to the command, its fields as keywords."""


def serve[J: RankJob](read: Callable[[str], J], work: Callable[[J, int, Answer], None]) -> None:
    """Do one job, then exit without cleaning up: the peers may have ended already.

    Args:
        read: The job from a line of JSON.
        work: Does the job on a rank; gets the job, its rank, and what sends an answer.
    """
    _die_with_parent()
    answers = _claim_stdout()

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    rank = int(os.environ["RANK"])
    code = 1
    try:
        job = read(sys.stdin.readline())
        if parse_link(job.link).kind is LinkKind.NETWORK:
            _enter_own_network()
        answer(event="placed")
        if sys.stdin.readline().strip() != "go":
            raise EnvironmentMissing("the process that started this rank is gone")
        if job.cores:
            # Before torch starts its threads, which inherit it.
            os.sched_setaffinity(0, {job.cores[rank]})
        work(job, rank, answer)
        answer(event="done")
        code = 0
    except AMPipeError as error:
        answer(event="failed", message=str(error), code=error.exit_code)
        code = error.exit_code
    except BaseException as error:
        traceback.print_exc()
        answer(event="failed", message=f"{type(error).__name__}: {error}", code=3)
    sys.stderr.flush()
    os._exit(code)


def measure_cases(
    job: BlockJob,
    rank: int,
    answer: Answer,
    measure_case: Callable[[int, Callable[[], None]], dict[str, Any]],
) -> None:
    """Prepare torch and Megatron, then measure every case of a job and answer with what was found.

    Args:
        job: What to measure.
        rank: Of this process.
        answer: Sends one answer to the command.
        measure_case: Measures the case of an index; gets also what is to be called after each pass or step.
    """
    emulation = start_torch(job, rank=rank)
    from megatron_ampipe.tools.measuring import experts

    # All of them before the first is measured.
    for case in job.cases:
        experts.require(case, on_cuda=job.device == "cuda")
    answer(event="ready", hardware=_hardware(job))

    def progress() -> None:
        answer(event="progress")
        # On two cores, the command must not draw its progress during the next pass.
        time.sleep(_PAUSE_S)

    for index, case in enumerate(job.cases):
        if emulation is not None:
            emulation.num_experts = case.experts
        found = measure_case(index, progress)
        found["clock"] = None if emulation is None else emulation.clock
        answer(event="case", index=index, **found)


def start_torch(job: BlockJob, *, rank: int) -> Emulation | None:
    """Process group and Megatron's parallel state, all ranks expert-parallel; what emulates the link."""
    import torch
    import torch.distributed as dist

    link = parse_link(job.link)
    on_cuda = job.device == "cuda"
    if on_cuda:
        torch.cuda.set_device(rank)
    emulation = None
    if link.emulated:
        from megatron_ampipe.tools.measuring.emulation import install

        # Before Megatron is imported, which keeps references to collectives.
        emulation = install(link, on_cuda=on_cuda, pretended=job.pretended)
        if emulation.why_cycles is not None:
            print(f"the emulated link counts clock cycles: {emulation.why_cycles}", file=sys.stderr)
    if not on_cuda:
        from megatron_ampipe.launch import host

        host.install()
        torch.set_num_threads(1)
    settings: dict[str, Any] = {"rank": rank, "world_size": job.num_ranks}
    if job.pretended:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), **settings)
    else:
        use_interface(link)
        dist.init_process_group(
            "nccl" if on_cuda else "gloo",
            init_method=f"file://{job.rendezvous}",
            timeout=datetime.timedelta(seconds=job.timeout_s),
            **settings,
        )
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_ampipe.runtime.executors import demote_gloo_threads

    # The extra gloo groups are for checkpoints and data, and a pretended rank cannot have any.
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=job.num_ranks, create_gloo_process_groups=not job.pretended
    )
    model_parallel_cuda_manual_seed(job.seed)
    # As a pipeline does in training; here before anything is timed, so that Megatron's layer has it too.
    demote_gloo_threads()
    return emulation


def use_interface(link: Link) -> None:
    """Have gloo use the network interface of this link."""
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE if link.kind is LinkKind.NETWORK else "lo"


def _hardware(job: BlockJob) -> dict[str, str]:
    if job.device != "cuda":
        return {}
    import torch

    return {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}


def _enter_own_network() -> None:
    try:
        os.unshare(os.CLONE_NEWNET)
    except OSError as error:
        raise EnvironmentMissing(
            f"a network namespace cannot be made ({error.strerror}). Run where that is allowed, or use "
            "--link emulated:RATE, which needs none."
        ) from error


def _die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends for any reason."""
    parent = int(os.environ["AMPIPE_BENCH_PARENT"])
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before this was set.
    if os.getppid() != parent:
        os._exit(1)


def _claim_stdout() -> TextIO:
    """Standard output for answers only; what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers
