"""An executor that runs every stage alone, to learn how long it takes when nothing slows it.

Before each collective the ranks meet at a barrier outside the time taken, so that a collective's time is
its transfer and not the wait for a peer that was still computing. Needed for :mod:`.bound`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_ampipe.runtime.executors import Needs, Order, RunStage, finish
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.schedule import Direction


class StageTimer:
    """Runs stages one after another in the order they are issued; see ``runtime.executors.Executor``."""

    host_waits = False
    holds_buffers = False

    def __init__(self) -> None:
        self.needs: dict[str, dict[str, list[str]]] = {}
        """By direction and stage, the names of the stages it waited for."""

    def execute(self, order: Order, needs: Needs, run_stage: RunStage, recorder: Recorder) -> None:
        """Every stage once, each recorded with nothing beside it."""
        # Every pass is a forward and then a backward.
        direction = Direction.FORWARD if not self.needs else Direction.BACKWARD
        if len(self.needs) < len(Direction):
            self.needs[direction.value] = {
                str(stage): list(map(str, found)) for stage, found in needs.items()
            }
        on_cuda = torch.cuda.is_available()
        for lane, stage in order:
            if stage.is_communication:
                if on_cuda:
                    torch.cuda.synchronize()
                dist.barrier()
            if on_cuda:
                # By events: with a host's clock the wait for the device would be part of every stage.
                with recorder.on_stream(lane, stage, torch.cuda.current_stream()):
                    finish(run_stage(stage))
            else:
                with recorder.on_host(lane, stage):
                    finish(run_stage(stage))


def stage_times(recorder: Recorder) -> dict[str, dict[str, list[float]]]:
    """What was recorded: by direction and stage, microseconds of every pass."""
    times: dict[str, dict[str, list[float]]] = {}
    for span in recorder.timeline(rank=0, labels={}).spans:
        passes = times.setdefault(span.direction, {}).setdefault(span.stage, [])
        passes.append(round(span.end_us - span.begin_us, 2))
    return times
