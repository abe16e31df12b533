"""Runs the backward pass of one micro-batch together with the forward pass of the next one.

The forward pass is a call of the model, the backward pass a call of torch's autograd, as in Megatron. They
run in two threads that take turns, and meet when each has reached its next blocks that share a schedule.
There, both tapes run as one, merged by ``schedule.partners``. All else (embeddings, the loss, layers that
are not pipelined) runs as without a partner, in the same order on every rank.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import torch
from torch import Tensor, UntypedStorage

from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.runtime.cuts import alone
from megatron_ampipe.runtime.graph_chain import GraphChains, Half
from megatron_ampipe.runtime.stack_call import StackCall
from megatron_ampipe.runtime.tape import Call, Tape
from megatron_ampipe.schedule import Direction, Partner, Program, issue_order
from megatron_ampipe.schedule.partners import shared_lanes

# S sequence rows, B batch, D hidden size.


class _Pair:
    """A backward pass and the forward pass that runs with it, which take turns.

    Every pair has its own semaphores: one that failed, or was interrupted, may leave them at any count.
    """

    def __init__(self) -> None:
        self.forward_turn = threading.Semaphore(0)
        self.backward_turn = threading.Semaphore(0)
        self.meets = True
        """Whether the backward pass waits for the forward pass at its next blocks."""
        self.abandoned = False
        """Whether the forward pass has failed."""
        self.ended: Future[None] = Future()
        """Set when the backward pass has ended, to its error if it has failed."""
        self.waiting: StackCall | None = None
        """The blocks at which the backward pass waits."""
        self.of_next_microbatch: tuple[StackCall, Tensor] | None = None
        """The blocks of the forward pass that run with them, and their input."""
        self.output: Tensor | None = None
        """What these have computed."""

    def resume(self, ahead: tuple[StackCall, Tensor] | None) -> None:
        """Continue the backward pass until it waits again or has ended."""
        self.of_next_microbatch, self.waiting = ahead, None
        self.backward_turn.release()
        self.forward_turn.acquire()


class Partners:
    """Joins the passes of two micro-batches; one object for all blocks of a process.

    ``partner`` says how they run; a change applies from the next pair of passes on. The backward pass has a
    separate thread and runs both tapes, because a backward pass keeps torch's autograd thread of a GPU busy.
    """

    def __init__(self) -> None:
        self.partner = Partner()
        self.graphs = GraphChains()
        """Of whole passes, if these are CUDA graphs."""
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pair: _Pair | None = None
        """The pair that runs at present."""

    def run[Result](self, forward: Callable[[], Result], backward: Callable[[], None]) -> Result:
        """Run both functions, and return the result of ``forward``; a failure of either ends both.

        The backward pass runs up to its first blocks, then the forward pass up to its first blocks. They run
        together if both have the same number of layers; else the one with fewer layers runs its blocks alone.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="ampipe-backward", daemon=True)
            self._thread.start()
        if self._pair is not None:
            # It was interrupted while its backward pass ran.
            self._pair.ended.exception()
        pair = self._pair = _Pair()
        stream = torch.cuda.current_stream()
        self._jobs.put(functools.partial(self._run_backward, pair, backward, stream))
        try:
            pair.forward_turn.acquire()
            output = forward()
            pair.meets = False
            if pair.waiting is not None:
                pair.resume(None)
        except BaseException:
            pair.meets, pair.abandoned = False, True
            if pair.waiting is not None:
                pair.resume(None)
            raise
        finally:
            if pair.ended.done():
                self._pair = None
        pair.ended.result()
        return output

    def forward(self, call: StackCall, hidden: Tensor) -> Tensor:
        """Run the forward pass through blocks: ``[S, B, D]`` to ``[S, B, D]``."""
        pair = self._pair
        if pair is None:
            return call.forward(hidden)
        while pair.waiting is not None:
            num_layers, num_waiting = len(call.numbers), len(pair.waiting.numbers)
            if num_layers < num_waiting:
                break
            pair.resume((call, hidden) if num_layers == num_waiting else None)
            if num_layers == num_waiting and pair.output is not None:
                output, pair.output = pair.output, None
                return output
        if pair.ended.done():
            # Raise its error, if it has failed: other ranks wait for the collectives of both passes.
            pair.ended.result()
        return call.forward(hidden)

    def backward(self, call: StackCall, gradient: Tensor) -> list[Tensor | None]:
        """Run the backward pass through blocks; see :meth:`StackCall.backward`."""
        pair = self._pair
        if pair is None:
            return call.backward(gradient)
        if pair.meets:
            pair.waiting = call
            pair.forward_turn.release()
            pair.backward_turn.acquire()
        if pair.abandoned:
            raise RuntimeError("the forward pass of the next micro-batch has failed")
        ahead, pair.of_next_microbatch = pair.of_next_microbatch, None
        if ahead is None:
            return call.backward(gradient)
        pair.output, gradients = run_together(call, gradient, *ahead, self.partner)
        return gradients

    def _work(self) -> None:
        while True:
            self._jobs.get()()

    def _run_backward(self, pair: _Pair, backward: Callable[[], None], stream: torch.cuda.Stream) -> None:
        try:
            # A new thread begins on device 0, and the end of a stream's context would return to it: every
            # rank would make a context on GPU 0.
            torch.cuda.set_device(stream.device)
            with torch.cuda.stream(stream):
                backward()
        except BaseException as error:
            pair.ended.set_exception(error)
        else:
            pair.ended.set_result(None)
        pair.waiting = None
        pair.forward_turn.release()


def run_together(
    backward: StackCall, gradient: Tensor, forward: StackCall, hidden: Tensor, partner: Partner
) -> tuple[Tensor, list[Tensor | None]]:
    """Run both passes as one tape. Returns the output of ``forward`` and the gradients of ``backward``."""
    executor, recorder = backward.executor, backward.recorder
    tape = merged(
        backward.tapes.passes[Direction.BACKWARD],
        forward.tapes.passes[Direction.FORWARD],
        partner,
        host_waits=executor.host_waits,
    )
    forward.begin_forward(hidden)
    backward.begin_backward(gradient)
    del gradient

    def run(call: Call) -> Transfer | None:
        if call.stage.of_next_microbatch:
            return forward.run_call(Direction.FORWARD, call)
        return backward.run_call(Direction.BACKWARD, call)

    recorder.enter(backward.numbers, Direction.BACKWARD, next_layers=forward.numbers)
    comm_memory = _CommMemories(backward, forward) if executor.host_waits else None

    def capture() -> None:
        executor.execute(alone(tape.calls), run, recorder, comm_memory)
        forward.prepare_recompute()

    with torch.enable_grad():
        if _launch(backward, forward, capture, partner):
            for call in tape.calls:
                if not call.stage.of_next_microbatch:
                    backward.end_call(Direction.BACKWARD, call)
        else:
            executor.execute(tape, run, recorder, comm_memory)
    return forward.end_forward(), backward.end_backward()


def _launch(backward: StackCall, forward: StackCall, capture: Callable[[], None], partner: Partner) -> bool:
    """Run both passes as one CUDA graph; False if they run without."""
    if backward.chained is None or forward.chained is None:
        both = backward.chained, forward.chained
        assert not any(one is not None and one.is_captured for one in both), "a graph with a pass without one"
        return False
    halves = [
        Half(Direction.BACKWARD, backward.chained),
        Half(Direction.FORWARD, forward.chained),
    ]
    return forward.chained.chains.launch(halves, capture, order=partner)


class _CommMemories:
    """The tensors of both passes that several streams use."""

    def __init__(self, *calls: StackCall) -> None:
        self._all = [call.state.comm_memory for call in calls if call.state.comm_memory is not None]

    def take(self) -> list[UntypedStorage]:
        """See :meth:`~.streams.CommMemory.take`."""
        return [storage for comm_memory in self._all for storage in comm_memory.take()]


@functools.lru_cache(maxsize=64)
def merged(backward: Tape, forward: Tape, partner: Partner, *, host_waits: bool) -> Tape:
    """Merge both tapes into one. The calls of each tape keep their order in every lane.

    So slots can be freed as without a partner: all earlier uses of a slot still come first.
    """
    calls, needs = {}, {}
    for tape, ahead in ((backward, False), (forward, True)):
        stages = [replace(call.stage, of_next_microbatch=ahead) for call in tape.calls]
        for stage, call in zip(stages, tape.calls, strict=True):
            calls[stage], needs[stage] = call, tuple(stages[needed] for needed in call.needs)
    lanes = shared_lanes([(call.lane, stage) for stage, call in calls.items()], needs, partner)
    order = issue_order(Program.of(lanes), needs, host_waits=host_waits)
    return Tape(
        [
            replace(
                calls[call.stage], position=call.position, stage=call.stage, needs=tuple(sorted(call.needs))
            )
            for call in Tape.of(order, needs).calls
        ]
    )
