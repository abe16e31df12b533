"""An executor that runs every stage alone, to measure its time when nothing slows it.

Before each collective the ranks meet at a barrier outside the measured time, so that a collective's time is
its transfer and not the wait for a peer that was still computing. A shaped link saves up while it is idle. In
a pipeline that only happens before the first collective, so only the first one has that advantage here. On a
GPU the stream is kept busy until a stage is issued, so that its time is that of its kernels, not of their
launches. Used by ``benchmark.timed_passes`` and ``profiling.block_times``.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron_ampipe.runtime.executors import RunCall, finish, run_on_host
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.streams import Crossing
from megatron_ampipe.runtime.tape import Tape
from megatron_ampipe.schedule import Stage, stage_from_text


class StageTimer:
    """Runs stages one after another in the order they are issued; see ``runtime.executors.Executor``.

    Args:
        saved_bytes: Bytes that the link lets through at once after it was idle.
    """

    host_waits = False
    threads = False

    def __init__(self, *, saved_bytes: int = 0) -> None:
        self._saved_bytes = saved_bytes
        self.needs: dict[str, dict[str, list[str]]] = {}
        """By direction and stage of a whole pass, the names of the stages it waited for."""
        self.queue = FullQueue()

    def execute(self, tape: Tape, run: RunCall, recorder: Recorder, crossing: Crossing | None = None) -> None:
        """Every stage once, each recorded while nothing else runs."""

        def name(stage: Stage) -> str:
            return _name(stage, recorder.layers[stage.layer])

        self.needs.setdefault(recorder.direction.value, {}).update(
            {
                name(call.stage): [name(tape.calls[position].stage) for position in call.needs]
                for call in tape.calls
            }
        )
        on_cuda = torch.cuda.is_available()
        collectives = dict.fromkeys(
            call.stage for call in tape.calls if call.stage.is_communication and not call.stage.kind.copies
        )
        first_collective = next(iter(collectives), None)
        for call in tape.calls:
            stage = call.stage
            if stage in collectives:
                if on_cuda:
                    torch.cuda.synchronize()
                dist.barrier()
                if self._saved_bytes and stage != first_collective:
                    _spend(self._saved_bytes, on_cuda=on_cuda)
            if on_cuda:
                # By events: with a host's clock the wait for the device would be part of every stage.
                with (
                    self.queue.ahead_of(stage.kind.name, recorder.direction.value),
                    recorder.on_stream(call.lane, stage, torch.cuda.current_stream()),
                ):
                    finish(run(call))
            else:
                run_on_host(call, run, recorder)


_FIRST_S, _LEAST_S, _MOST_S = 5e-3, 2e-4, 1e-2
_CYCLES_PER_S = 2e9
"""At least as many as a GPU has, so that a time does not become shorter."""


class FullQueue:
    """Keeps the current CUDA stream busy while the host issues something, so that all of it is queued.

    How long it has to be kept busy is learned by kind from how long the host took the last time.
    """

    def __init__(self) -> None:
        self._busy_s: dict[str, float] = {}
        self._issued_us: dict[tuple[str, str], list[float]] = {}
        self.starved: Counter[str] = Counter()
        """By kind, how often the device had nothing left to do before all was issued: the host was slower
        than before, or waited for the device itself (the times then include that)."""

    @contextmanager
    def ahead_of(self, kind: str, direction: str) -> Iterator[None]:
        """Busy from here on; what is issued within begins when this ends."""
        torch.cuda._sleep(int(self._busy_s.get(kind, _FIRST_S) * _CYCLES_PER_S))
        over = torch.cuda.Event()
        over.record()
        begin_s = time.perf_counter()
        yield
        took_s = time.perf_counter() - begin_s
        if over.query():
            self.starved[kind] += 1
        else:
            self._issued_us.setdefault((direction, kind), []).append(took_s * 1e6)
        self._busy_s[kind] = min(max(2 * took_s, _LEAST_S), _MOST_S)

    def issued_us(self) -> dict[str, dict[str, float]]:
        """By direction and kind, the median of the host's time to issue a stage while the device is busy."""
        found: dict[str, dict[str, float]] = {}
        for (direction, kind), times in self._issued_us.items():
            found.setdefault(direction, {})[kind] = round(statistics.median(times), 1)
        return found


def _spend(saved_bytes: int, *, on_cuda: bool) -> None:
    """Use up what the link has saved: twice as many bytes, so that the second half goes at its rate."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sent, received = (
        torch.zeros(2 * saved_bytes, dtype=torch.uint8, device="cuda" if on_cuda else "cpu") for _ in range(2)
    )
    exchange = [
        dist.P2POp(dist.isend, sent, (rank + 1) % ranks),
        dist.P2POp(dist.irecv, received, (rank - 1) % ranks),
    ]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()


def stage_times(recorder: Recorder) -> dict[str, dict[str, list[float]]]:
    """What was recorded: by direction and stage, microseconds of every pass.

    Stages of all layers but the first end in the layer's place: ``expert.2@1`` is of the second.
    """
    times: dict[str, dict[str, list[float]]] = {}
    for span in recorder.timeline(rank=0, labels={}).spans:
        stage = _name(stage_from_text(span.stage), span.layer)
        passes = times.setdefault(span.direction, {}).setdefault(stage, [])
        passes.append(round(span.end_us - span.begin_us, 2))
    return times


def _name(stage: Stage, layer_number: int) -> str:
    """A stage of the layer of this number, from 1, whether or not layers share a schedule."""
    return str(dataclasses.replace(stage, layer=layer_number - 1))
