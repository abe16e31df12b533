"""What is measured of a pass besides its time: each stage alone, the peak of its memory, the bytes it sends.

**Stages alone** (:class:`StageTimer`). Before each collective the ranks meet at a barrier outside the
measured time, so that its time is its transfer and not the wait for a peer that was still computing. A shaped
link saves up while it is idle; in a pipeline that only happens before the first collective, so only the first
one has that advantage here. On a GPU the stream is kept busy until a stage is issued, so that its time is
that of its kernels, not of their launches.

**Memory** (:func:`peak_bytes`). On a CPU, every storage that an operation returns counts from then until it
is freed, so the number is the same on every machine; what a kernel allocates internally is not seen. Watching
slows a pass down, so a pass that is watched is not timed. On a GPU, torch's allocator counts.

**Bytes**: by counters of the network interface (:func:`sent_bytes`), and those that the routing maps of
Megatron's own routers ask for (:class:`Routings`).
"""

from __future__ import annotations

import dataclasses
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ampipe.exchange.codecs import Trip, load_wire
from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.runtime.executors import Executor, RunCall, finish, run_on_host
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.saved_tensors import is_host_memory
from megatron_ampipe.runtime.streams import Crossing
from megatron_ampipe.runtime.tape import Call, Tape
from megatron_ampipe.schedule import Direction, Exchange, Stage, stage_from_text
from megatron_ampipe.tools.measuring.network import INTERFACE, WITHIN_NODE

_FIRST_S, _LEAST_S, _MOST_S = 5e-3, 2e-4, 1e-2
_CYCLES_PER_S = 2e9
"""At least as many as a GPU has, so that a time does not become shorter."""


class StageTimer:
    """Runs stages one after another in the order they are issued; see ``runtime.executors.Executor``.

    Args:
        saved_bytes: Bytes that the link lets through at once after it was idle; on a CPU.
    """

    host_waits = False
    threads = False

    def __init__(self, *, saved_bytes: int = 0) -> None:
        self._saved_bytes = saved_bytes
        self.needs: dict[str, dict[str, list[str]]] = {}
        """By direction and stage of a whole pass, the names of the stages it waited for."""
        self._busy_s: dict[str, float] = {}
        self._issued_us: dict[tuple[str, str], list[float]] = {}

    def execute(self, tape: Tape, run: RunCall, recorder: Recorder, crossing: Crossing | None = None) -> None:
        """Every stage once, each recorded while nothing else runs."""

        def name(stage: Stage) -> str:
            return _name(stage, recorder.layers[stage.layer])

        needs = self.needs.setdefault(recorder.direction.value, {})
        for call in tape.calls:
            needs[name(call.stage)] = [name(tape.calls[position].stage) for position in call.needs]
        on_cuda, is_first = torch.cuda.is_available(), True
        for call in tape.calls:
            stage = call.stage
            if stage.is_communication and not stage.kind.copies:
                if on_cuda:
                    torch.cuda.synchronize()
                dist.barrier()
                if self._saved_bytes and not is_first:
                    _spend(self._saved_bytes)
                is_first = False
            if on_cuda:
                # By events: with a host's clock the wait for the device would be part of every stage.
                with (
                    self._busy(stage.kind.name, recorder.direction.value),
                    recorder.on_stream(call.lane, stage, torch.cuda.current_stream()),
                ):
                    finish(run(call))
            else:
                run_on_host(call, run, recorder)

    @contextmanager
    def _busy(self, kind: str, direction: str) -> Iterator[None]:
        """Keeps the current CUDA stream busy while the host issues something, so that all of it is queued.

        For how long is learned by kind from how long the host took the last time.
        """
        torch.cuda._sleep(int(self._busy_s.get(kind, _FIRST_S) * _CYCLES_PER_S))
        over = torch.cuda.Event()
        over.record()
        begin_s = time.perf_counter()
        yield
        took_s = time.perf_counter() - begin_s
        # Else the device ran out of work before all was issued: the host may have waited for it.
        if not over.query():
            self._issued_us.setdefault((direction, kind), []).append(took_s * 1e6)
        self._busy_s[kind] = min(max(2 * took_s, _LEAST_S), _MOST_S)

    def issued_us(self) -> dict[str, dict[str, float]]:
        """By direction and kind, the median of the host's time to issue a stage while the device is busy."""
        found: dict[str, dict[str, float]] = {}
        for (direction, kind), times in self._issued_us.items():
            found.setdefault(direction, {})[kind] = round(statistics.median(times), 1)
        return found


def _spend(saved_bytes: int) -> None:
    """Use up what the link has saved: twice as many bytes, so that the second half goes at its rate."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sent, received = (torch.zeros(2 * saved_bytes, dtype=torch.uint8) for _ in range(2))
    works = [dist.isend(sent, (rank + 1) % ranks), dist.irecv(received, (rank - 1) % ranks)]
    for work in works:
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


class TensorMeter:
    """Bytes of all storages that were allocated since :meth:`restart` and are still alive.

    Attributes:
        now: At present.
        peak: At most.
        at_peak: What was alive then: bytes, the stage and operation that made it, and its shape.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.where = threading.local()
        self.restart(())

    def restart(self, known: Iterable[Tensor]) -> None:
        """Reset; tensors in ``known`` are not counted."""
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._live: dict[int, tuple[int, str, list[int]]] = {}
        self.now = self.peak = 0
        self.at_peak: list[tuple[int, str, list[int]]] = []

    def see(self, tensor: Tensor, operation: str) -> None:
        """Count the storage of a tensor that an operation has returned."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        with self._lock:
            if key in self._known or key in self._live or not size or is_host_memory(tensor):
                return
            place = f"{getattr(self.where, 'stage', '')} {operation}"
            self._live[key] = (size, place, list(tensor.shape))
            weakref.finalize(storage, self._gone, key, self._live)
            self.now += size
            if self.now > self.peak:
                self.peak = self.now
                self.at_peak = list(self._live.values())

    def _gone(self, key: int, live: dict[int, tuple[int, str, list[int]]]) -> None:
        with self._lock:
            size, *_ = live.pop(key)
            if live is self._live:
                self.now -= size


class Watch(TorchDispatchMode):
    """Has a meter count all tensors that operations of this thread return."""

    def __init__(self, meter: TensorMeter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the operation."""
        output = operation(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else [output]:
            if isinstance(tensor, Tensor):
                self._meter.see(tensor, str(operation))
        return output


class WatchedExecutor:
    """Runs stages as another executor does, and watches the threads of all lanes; see ``executors.Executor``.

    Args:
        executor: The other one, on a CPU.
        meter: Counts; the thread that computes is watched by whoever starts the pass.
    """

    host_waits = False
    threads = True

    def __init__(self, executor: Executor, meter: TensorMeter) -> None:
        self._executor, self._meter = executor, meter

    def execute(self, tape: Tape, run: RunCall, recorder: Recorder, crossing: Crossing | None = None) -> None:
        """Every stage once, as the other executor runs it."""
        computing = threading.get_ident()

        def watched(call: Call) -> Transfer | None:
            self._meter.where.stage = str(call.stage)
            # A mode is active in one thread only.
            if threading.get_ident() == computing:
                return run(call)
            with Watch(self._meter):
                return run(call)

        self._executor.execute(tape, watched, recorder, crossing)


def peak_bytes(
    run: Callable[[], None], *, passes: int, known: Iterable[Tensor], meter: TensorMeter | None
) -> int:
    """The most bytes that a pass holds at once, beyond what exists before it.

    Args:
        run: Runs the pass.
        passes: How often; the highest peak counts.
        known: What exists before. Gradients, which a pass makes, must not be there yet when ``run`` computes.
        meter: On a CPU, what the executor of the pass is watched with; None on a GPU.
    """
    known, found = list(known), []
    for _ in range(passes):
        if meter is None:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            found.append(torch.cuda.max_memory_allocated() - before)
            continue
        meter.restart(known)
        meter.where.stage = "outside stages"
        with Watch(meter):
            run()
        found.append(meter.peak)
    return max(found)


_COUNTERS = Path("/proc/self/net/dev")
"""Of the interfaces in this process's network namespace."""
_SENT_COLUMN = 8
_EXCHANGES = 4
"""Dispatch and combine, forward and backward."""
_WITH_PROBABILITIES = 2
"""Of those, how many carry probabilities or their gradients: the dispatches."""


CLASSES = {"inter": INTERFACE, "intra": WITHIN_NODE}
"""Classes of links by name: between nodes, and within one. Without nodes, all is of the first."""


def sent_bytes() -> dict[str, int]:
    """What this rank has sent so far, headers included, by class of links."""
    found = {}
    for line in _COUNTERS.read_text().splitlines():
        name, colon, columns = line.partition(":")
        if colon:
            found[name.strip()] = int(columns.split()[_SENT_COLUMN])
    sent = {name: found[interface] for name, interface in CLASSES.items() if interface in found}
    assert sent, f"this process has no interface {INTERFACE}"
    return sent


class Routings:
    """The routing of the latest pass through Megatron's layers.

    Args:
        layers: Megatron's own ``blocks.Layers``, whose routers are watched until :meth:`stop`.
    """

    def __init__(self, layers: torch.nn.Module) -> None:
        self._found: dict[int, tuple[Tensor, Tensor, int]] = {}
        self._num_local_experts = layers.layers[0].mlp.num_local_experts
        self._hooks = [
            layer.mlp.router.register_forward_hook(self._keep(number))
            for number, layer in enumerate(layers.layers)
        ]

    def _keep(self, number: int) -> Any:
        def keep(_module: torch.nn.Module, arguments: tuple[Tensor, ...], result: tuple[Tensor, ...]) -> None:
            (hidden, *_), (probs, routing_map) = arguments, result
            row = hidden.new_zeros(1, hidden.shape[-1])
            self._found[number] = routing_map, row, probs.element_size()

        return keep

    def stop(self) -> None:
        """Keep what was found, and watch no longer."""
        for hook in self._hooks:
            hook.remove()

    def expected_bytes(
        self, exchange: Exchange, *, wire: str | None = None, rank: int, ranks_per_node: int | None
    ) -> dict[str, int]:
        """What sending this rank's tokens to other ranks, and the experts' outputs back, takes in a pass.

        By class of links. Rows and probabilities with their gradients, without headers and without the
        exchange of counts. Half of it is sent by this rank, the other half by those of the experts.

        Args:
            exchange: How the all-to-all groups copies of a token.
            wire: What rows become while they travel, as ``--ampipe-wire``.
            rank: Of this process, in the order of the experts.
            ranks_per_node: Ranks of a node; None where there is one class of links.
        """
        local, copies = self._num_local_experts, exchange.sends_every_copy
        inter = intra = 0
        for routing_map, row, probability_bytes in self._found.values():
            parts: Sequence[Tensor] = [row]
            if wire is not None:
                parts = load_wire(wire).encode(row, Trip(1, 0, "dispatch", Direction.FORWARD))
            sent_bytes_of_row = sum(part.nbytes for part in parts)

            def size(row_bytes: int, experts: int, probability_bytes: int = probability_bytes) -> int:
                """Of a row with its probabilities, to a place with so many experts."""
                probabilities = _WITH_PROBABILITIES * (1 if copies else experts) * probability_bytes
                return _EXCHANGES * row_bytes + probabilities

            def rows_to(experts: int, routing_map: Tensor = routing_map) -> Tensor:
                """By place with so many experts, how many rows it gets."""
                places = routing_map.unflatten(1, (-1, experts))
                return (places.sum(dim=2) if copies else places.any(dim=2)).sum(dim=0)

            to_ranks = rows_to(local)
            peers = torch.arange(len(to_ranks), device=to_ranks.device)
            if exchange.has_two_hops:
                assert ranks_per_node is not None
                of_node = ranks_per_node * local
                others = rows_to(of_node)
                others[rank // ranks_per_node] = 0
                inter += int(others.sum()) * size(sent_bytes_of_row, of_node)
                # Handed on within the node, as they are, by the rank that has this rank's place there.
                handed_on = (peers - rank) % ranks_per_node != 0
                intra += int(to_ranks[handed_on].sum()) * size(row.nbytes, local)
                continue
            to_ranks[rank] = 0
            near = peers // ranks_per_node == rank // ranks_per_node if ranks_per_node else peers < 0
            inter += int(to_ranks[~near].sum()) * size(sent_bytes_of_row, local)
            intra += int(to_ranks[near].sum()) * size(sent_bytes_of_row, local)
        return {"inter": inter, "intra": intra} if ranks_per_node is not None else {"inter": inter}
