"""What each rank of ``ampipe bench --end-to-end`` and of the quick start runs.

Megatron's training through the entry point that users launch, unedited, apart from two things: the local
layers of a stock run attend with the kernel that AMPipe's use, and gloo's event loops are batch threads there
too, so that neither has an advantage that the other could have. What Megatron logs of an iteration is passed
on to the command as an answer. Started by ``measuring.rank_processes``.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import re
import sys
from typing import TYPE_CHECKING, Any, TextIO

from megatron_ampipe.errors import RunFailed
from megatron_ampipe.tools.benchmark.training_job import TrainingJob
from megatron_ampipe.tools.measuring.link import parse_link
from megatron_ampipe.tools.measuring.rank_worker import Answer, serve, use_interface

if TYPE_CHECKING:
    from torch import Tensor

ITERATION = re.compile(
    r" iteration +(?P<number>\d+)/ *\d+ \|.*"
    r" elapsed time per iteration \(ms\): (?P<ms>[0-9.]+) \|.* lm loss: (?P<lm_loss>\S+) \|"
)
"""What Megatron's log says of an iteration."""


def train(job: TrainingJob, rank: int, answer: Answer) -> None:
    """Run one training; an answer ``iteration`` for every line that this rank logs of one.

    Raises:
        RunFailed: it failed; the reason is in this rank's log.
    """
    import torch

    link = parse_link(job.link)
    if link.emulated:
        from megatron_ampipe.tools.measuring.emulation import install

        # Before Megatron is imported, which keeps references to collectives.
        install(link, on_cuda=False, pretended=False)
    from megatron_ampipe.launch import host, pretrain
    from megatron_ampipe.launch.host.all_to_all import gloo_all_to_all

    use_interface(link)
    host.install()
    if job.stock_attends_as is not None:
        _use_kernel_of_ampipe(job.stock_attends_as)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{job.rendezvous}",
        timeout=datetime.timedelta(seconds=job.timeout_s),
        rank=rank,
        world_size=job.num_ranks,
    )
    sys.stdout = _Log(sys.stdout, answer)
    with gloo_all_to_all() if job.gloo_all_to_all else contextlib.nullcontext():
        code = pretrain.main(job.flags)
    if code != 0:
        raise RunFailed(f"the training ended with code {code}")


def _use_kernel_of_ampipe(dtype: str) -> None:
    """Have Megatron's local layers attend with the kernel of AMPipe's layers, on the whole sequence."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_ampipe.attention.kernels import pinned_kernel
    from megatron_ampipe.runtime.executors import demote_gloo_threads
    from megatron_ampipe.tools.measuring.blocks import DTYPES, KernelAttention

    class StockAttention(KernelAttention):
        """Demotes gloo's threads in the first pass, as a pipeline does, when all process groups exist."""

        demoted = False

        def forward(self, *inputs: Any, **more: Any) -> Tensor:
            if not StockAttention.demoted:
                demote_gloo_threads()
                StockAttention.demoted = True
            return super().forward(*inputs, **more)

    kernel = pinned_kernel(on_gpu=False, dtype=DTYPES[dtype])
    spec = ModuleSpec(module=StockAttention, params={"kernel": kernel})
    LocalSpecProvider.core_attention = lambda self: spec


class _Log(io.TextIOBase):
    """Standard output that also tells the command of every iteration."""

    def __init__(self, stream: TextIO, answer: Answer) -> None:
        self._stream, self._answer, self._line = stream, answer, ""

    def write(self, text: str) -> int:
        self._stream.write(text)
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            if found := ITERATION.search(line):
                self._answer(
                    event="iteration",
                    number=int(found["number"]),
                    ms=float(found["ms"]),
                    lm_loss=float(found["lm_loss"]),
                )
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


def main() -> None:
    """Train once."""
    serve(TrainingJob.from_json, train)


if __name__ == "__main__":
    main()
