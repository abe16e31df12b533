"""Measures a pass: its time (:class:`Clock`), each stage alone, the peak of its memory, the bytes it sends.

**Stages alone** (:class:`StageTimer`). Before each collective the ranks meet at a barrier outside the
measured time, so that its time is its transfer and not the wait for a peer that was still computing. A shaped
link saves up while it is idle; in a pipeline that only happens before the first collective, so only the first
one has that advantage here. On a GPU the stream is kept busy until a stage is issued, so that its time is
that of its kernels, not of their launches.

**Memory** on a CPU (:class:`TensorMeter`). A storage counts from the time an operation returns it until it is
freed, so the number is the same on every machine; memory that a kernel allocates internally is not counted.
The meter slows a pass down, so a pass with a meter is not timed.

**Bytes**: by counters of the network interface (:func:`sent_bytes`).
"""

from __future__ import annotations

import dataclasses
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ampipe.files.timeline import StageSpan
from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.runtime.executors import Executor, RunCall, UsedMemory, finish, run_on_host
from megatron_ampipe.runtime.host_copies import is_host_memory
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.tape import Call, Tape
from megatron_ampipe.schedule import Stage, kinds, stage_from_text
from megatron_ampipe.schedule.stage_kind import COMM, COMPUTE
from megatron_ampipe.tools.measuring.network import INTERFACE, WITHIN_NODE

LINK_CLASSES = {INTERFACE: "inter", WITHIN_NODE: "intra"}
"""The classes of links, by interface: between nodes, and within a node."""
_FIRST_S, _LEAST_S, _MOST_S = 5e-3, 2e-4, 1e-2
_SENT_COLUMN = 8
_CYCLES_PER_S = 2e9
"""At least the clock rate of any GPU, so that a pause is never shorter than asked."""


class StageTimer:
    """Runs stages one after another in the order they are issued; see ``runtime.executors.Executor``.

    Args:
        recorder: Records each stage.
        saved_bytes: Bytes that a link sends at once after it was idle (its burst); on a CPU.
        ranks_per_node: The ranks of a node, if its links are of another class than those between nodes.
    """

    host_waits = False
    threads = False

    def __init__(
        self, recorder: Recorder, *, saved_bytes: int = 0, ranks_per_node: int | None = None
    ) -> None:
        self.recorder, self._saved_bytes, self._ranks_per_node = recorder, saved_bytes, ranks_per_node
        self.needs: dict[str, dict[str, list[str]]] = {}
        """By direction and stage, the names of the stages that it waited for."""
        self.apart_s: dict[str, list[float]] = {}
        """By direction, the seconds of each pass between stages (barriers, or keeping the device busy)."""
        self._busy_s: dict[str, float] = {}
        self._issued_us: dict[tuple[str, str], list[float]] = {}

    def execute(
        self, tape: Tape, run: RunCall, recorder: Recorder, comm_memory: UsedMemory | None = None
    ) -> None:
        """Every stage once, each recorded while nothing else runs."""

        def name(stage: Stage) -> str:
            return _name(stage, recorder.layers[stage.layer])

        needs = self.needs.setdefault(recorder.direction.value, {})
        for call in tape.calls:
            needs[name(call.stage)] = [name(tape.calls[position].stage) for position in call.needs]
        on_cuda, is_first, apart_s = torch.cuda.is_available(), True, 0.0
        for call in tape.calls:
            stage, begin_s = call.stage, time.perf_counter()
            if stage.is_communication and not stage.kind.copies:
                barrier(on_cuda=on_cuda)
                if self._saved_bytes and not is_first:
                    _use_up_burst(self._saved_bytes, self._ranks_per_node)
                is_first = False
                apart_s += time.perf_counter() - begin_s
            if on_cuda:
                apart_s += self._busy_s.get(stage.kind.name, _FIRST_S)
                # Events: with the host's clock, every stage would include the wait for the device.
                with (
                    self._busy(stage.kind.name, recorder.direction.value),
                    recorder.on_stream(call.lane, stage, torch.cuda.current_stream()),
                ):
                    finish(run(call))
            else:
                run_on_host(call, run, recorder)
        self.apart_s.setdefault(recorder.direction.value, []).append(apart_s)

    @contextmanager
    def _busy(self, kind: str, direction: str) -> Iterator[None]:
        """Keeps the stream busy while a stage is issued: twice as long as the last issue took."""
        torch.cuda._sleep(int(self._busy_s.get(kind, _FIRST_S) * _CYCLES_PER_S))
        over = torch.cuda.Event()
        over.record()
        begin_s = time.perf_counter()
        yield
        took_s = time.perf_counter() - begin_s
        # Otherwise the device became idle before all was issued, and the host may have waited for it.
        if not over.query():
            self._issued_us.setdefault((direction, kind), []).append(took_s * 1e6)
        self._busy_s[kind] = min(max(2 * took_s, _LEAST_S), _MOST_S)

    def issued_us(self) -> dict[str, dict[str, float]]:
        """By direction and kind, the median of the host's time to issue a stage while the device is busy."""
        medians: dict[str, dict[str, float]] = {}
        for (direction, kind), times in self._issued_us.items():
            medians.setdefault(direction, {})[kind] = round(statistics.median(times), 1)
        return medians


def run_lanes(
    executor: Executor,
    exchange: Callable[[], Transfer | None],
    compute: Callable[[], object],
    *,
    exchanges: int,
    products: int,
) -> list[StageSpan]:
    """Run exchanges and computations at the same time, each in its lane, after a barrier.

    ``exchange`` returns a transfer that is to be waited for in its lane, or None if it has waited itself.

    Returns:
        Their spans: ``dispatch`` in the lane ``comm``, ``expert`` in ``compute``.
    """
    order = [(COMM, Stage(kinds.DISPATCH, number)) for number in range(exchanges)]
    order += [(COMPUTE, Stage(kinds.EXPERT, number)) for number in range(products)]
    recorder = Recorder(num_iterations=1)
    recorder.start_iteration(0)

    def run(call: Call) -> Transfer | None:
        if call.lane == COMM:
            return exchange()
        compute()
        return None

    barrier(on_cuda=torch.cuda.is_available())
    with torch.no_grad():
        executor.execute(Tape.of(order, {stage: () for _, stage in order}), run, recorder)
    return list(recorder.timeline(rank=0, labels={}).spans)


def barrier(*, on_cuda: bool) -> None:
    """Wait until every rank is here and idle."""
    if on_cuda:
        torch.cuda.synchronize()
    dist.barrier()
    if on_cuda:
        # NCCL's barrier may return when it is only enqueued.
        torch.cuda.synchronize()


def _use_up_burst(saved_bytes: int, ranks_per_node: int | None) -> None:
    """Use up the burst of every link: send twice as many bytes, so the second half is sent at its rate."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    neighbours = [((rank + 1) % ranks, (rank - 1) % ranks)]
    if ranks_per_node is not None:
        first = rank - rank % ranks_per_node
        before, after = ((rank + step) % ranks_per_node + first for step in (-1, 1))
        neighbours = [(after, before), ((rank + ranks_per_node) % ranks, (rank - ranks_per_node) % ranks)]
    works = []
    for receiver, sender in neighbours:
        sent, received = (torch.zeros(2 * saved_bytes, dtype=torch.uint8) for _ in range(2))
        works += [dist.isend(sent, receiver), dist.irecv(received, sender)]
    for work in works:
        assert work is not None, "this rank is in the group"
        work.wait()


def stage_times(recorder: Recorder) -> dict[str, dict[str, list[float]]]:
    """The recorded microseconds of every pass, by direction and stage.

    The names of stages of later layers end with the layer's index: ``expert.2@1`` is of the second layer.
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


class Clock:
    """A clock that starts when it is created, in the order of the device's work if there is a device."""

    def __init__(self, *, on_cuda: bool) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if on_cuda else None
        if self._event is not None:
            self._event.record()
        self._begin_s = time.perf_counter()

    def passed_s(self) -> float:
        """Seconds from the start until all work has ended."""
        if self._event is None:
            return time.perf_counter() - self._begin_s
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        torch.cuda.synchronize()
        passed_ms: float = self._event.elapsed_time(end)
        return passed_ms / 1e3


class TensorMeter:
    """Bytes of storages that were allocated since :meth:`restart`: alive ``now``, and their ``peak``."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.restart(())

    def restart(self, known: Iterable[Tensor]) -> None:
        """Reset; tensors in ``known`` are not counted."""
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._live: dict[int, int] = {}
        self.now = self.peak = 0

    def see(self, tensor: Tensor) -> None:
        """Count the storage of a tensor that an operation has returned."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        with self._lock:
            if key in self._known or key in self._live or not size or is_host_memory(tensor):
                return
            self._live[key] = size
            weakref.finalize(storage, self._gone, key, self._live)
            self.now += size
            self.peak = max(self.peak, self.now)

    def _gone(self, key: int, live: dict[int, int]) -> None:
        with self._lock:
            size = live.pop(key)
            if live is self._live:
                self.now -= size


class Watch(TorchDispatchMode):
    """Has a meter count all tensors that operations of this thread return."""

    def __init__(self, meter: TensorMeter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter = meter

    def __torch_dispatch__(
        self,
        operation: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Call the operation."""
        output = operation(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else [output]:
            if isinstance(tensor, Tensor):
                self._meter.see(tensor)
        return output


class WatchedExecutor:
    """Runs stages as another executor does, on a CPU, and has a meter watch the threads of its lanes."""

    host_waits = False
    threads = True

    def __init__(self, executor: Executor, meter: TensorMeter) -> None:
        self._executor, self._meter = executor, meter

    def execute(
        self, tape: Tape, run: RunCall, recorder: Recorder, comm_memory: UsedMemory | None = None
    ) -> None:
        """Every stage once, as the other executor runs it."""
        computing = threading.get_ident()

        def watched(call: Call) -> Transfer | None:
            # A mode is active in one thread only.
            if threading.get_ident() == computing:
                return run(call)
            with Watch(self._meter):
                return run(call)

        self._executor.execute(tape, watched, recorder, comm_memory)


def sent_bytes() -> int:
    """The bytes that this rank has sent so far over its links, headers included."""
    return sum(sent_bytes_by_class().values())


def sent_bytes_by_class() -> dict[str, int]:
    """:func:`sent_bytes` by class of links; without nodes, all is of the class ``inter``."""
    sent = {}
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, columns = line.partition(":")
        if name.strip() in LINK_CLASSES:
            sent[LINK_CLASSES[name.strip()]] = int(columns.split()[_SENT_COLUMN])
    assert sent, f"this process has no interface {INTERFACE}"
    return sent
