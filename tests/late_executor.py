"""An executor whose transfers end as late as they may, so that a pass holds the most memory that it can."""

from collections import defaultdict, deque

from megatron_ampipe.plan.moments import IN_FLIGHT
from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.runtime.executors import RunCall, finish
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.streams import CommMemory
from megatron_ampipe.runtime.tape import Tape
from megatron_ampipe.schedule.stage_kind import COMPUTE


class LateExecutor:
    """Runs all calls on one thread, in issue order.

    A transfer ends when a call needs it, or when its lane starts another one and has as many as it may have.
    How far transfers have come does not depend on the network, so memory is the same in every run.
    """

    host_waits = False
    # Slots are freed as with lanes on threads.
    threads = True

    def execute(
        self, tape: Tape, run: RunCall, recorder: Recorder, comm_memory: CommMemory | None = None
    ) -> None:
        """Every call once."""
        lanes: defaultdict[str, deque[tuple[int, Transfer | None]]] = defaultdict(deque)

        def end_first(lane: str) -> int:
            position, transfer = lanes[lane].popleft()
            finish(transfer)
            return position

        for call in tape.calls:
            for position in call.needs:
                lane = tape.calls[position].lane
                while any(started == position for started, _ in lanes[lane]):
                    end_first(lane)
            if call.lane == COMPUTE:
                finish(run(call))
                continue
            if len(lanes[call.lane]) == IN_FLIGHT:
                end_first(call.lane)
            lanes[call.lane].append((call.position, run(call)))
        for lane in list(lanes):
            while lanes[lane]:
                end_first(lane)
