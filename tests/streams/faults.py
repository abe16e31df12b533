"""Faults to insert into the executor, to test that the checker reports each of them.

Each fault changes one place, and runs on the block :data:`BLOCK`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

from megatron_ampipe.runtime import executors, tape
from megatron_ampipe.runtime.streams import StreamPlan, stream_plan
from tests.streams.cases import IssueOrder, block, lazy_issue
from tests.streams.model import DEVICE, ModelStream

BLOCK = block(degree=4)


class Fault(NamedTuple):
    """A fault, and a regular expression of the race that it causes."""

    insert: Callable[[], contextlib.AbstractContextManager[object]]
    race: str
    issue: IssueOrder | None = None
    """Order in which the host issues the stages; None for the usual one."""
    data_parallel: bool = False
    """Whether the block runs under data parallelism."""


Planned = Callable[[Sequence[str], StreamPlan], StreamPlan]
"""From the stream of each call and the plan to another plan."""


def _never_waits(streams: Sequence[str], plan: StreamPlan) -> StreamPlan:
    """The communication stream does not wait for computation."""
    waits = tuple(
        tuple(one for one in waited if (stream, streams[one]) != ("comm", "compute"))
        for stream, waited in zip(streams, plan.waits, strict=True)
    )
    return dataclasses.replace(plan, waits=waits)


def _releases_early(streams: Sequence[str], plan: StreamPlan) -> StreamPlan:
    return dataclasses.replace(plan, releases=((), *((number,) for number in range(len(streams) - 1))))


def _drops_computation(streams: Sequence[str], plan: StreamPlan) -> StreamPlan:
    """Keeps the memory that collectives use, but not what computation uses."""
    releases = tuple(
        (*released, *([number - 1] if number and streams[number - 1] == "compute" else []))
        for number, released in enumerate(plan.releases)
    )
    return dataclasses.replace(plan, releases=releases)


def _replaced(change: Planned) -> Callable[[], contextlib.AbstractContextManager[object]]:
    def planned(streams: Sequence[str], needs: Sequence[Sequence[int]]) -> StreamPlan:
        return change(streams, stream_plan(streams, needs))

    return lambda: mock.patch.object(tape, "stream_plan", planned)


def _wrong_stream() -> contextlib.AbstractContextManager[object]:
    """Run ``attention.1`` on the communication stream."""
    issue = executors.CudaExecutor._issue

    def issued(self: Any, calls: Any, run_call: Any, *rest: Any) -> None:
        def run(call: Any) -> Any:
            if str(call.stage) != "attention.1":
                return run_call(call)
            with DEVICE.using(self._streams["comm"]):
                return run_call(call)

        issue(self, calls, run, *rest)

    return mock.patch.object(executors.CudaExecutor, "_issue", issued)


@contextlib.contextmanager
def _event_before_work() -> Iterator[None]:
    """Record the events of the compute lane before a stage instead of after it."""
    issue = executors.CudaExecutor._issue
    record = ModelStream.record_event

    def issued(self: Any, calls: Any, run_call: Any, *rest: Any) -> None:
        def run(call: Any) -> Any:
            early["event"] = record(DEVICE.current)
            return run_call(call)

        early: dict[str, Any] = {}

        def recorded(stream: ModelStream, *_: Any) -> Any:
            late = record(stream)
            return early.pop("event", late) if stream is DEVICE.default else late

        with mock.patch.object(ModelStream, "record_event", recorded):
            issue(self, calls, run, *rest)

    with mock.patch.object(executors.CudaExecutor, "_issue", issued):
        yield


def _nodes_of_another_stream() -> contextlib.AbstractContextManager[object]:
    """Build data parallelism on the stream that Megatron chooses."""
    from tests.streams import run

    return mock.patch.object(run, "on_training_stream", lambda construct: construct)


FAULTS = {
    "a missing event": Fault(
        _replaced(_never_waits), r"forward combine\.1: .* reads what forward expert\.1: .* has used"
    ),
    "an early free": Fault(
        _replaced(_releases_early), r"allocated by forward route\.\d: .* was released and may be reused by"
    ),
    "a wrong stream": Fault(_wrong_stream, r"attention\.1: .* reads what .*qkv\.1.* has used"),
    "a dropped hold": Fault(
        _replaced(_drops_computation),
        r"allocated by forward dispatch\.\d: new_empty was released .* not ordered after backward expert\.\d",
        issue=lazy_issue,
    ),
    "accumulation on another stream": Fault(
        _nodes_of_another_stream,
        r"backward expert\.1: a gradient on compute is accumulated on get_model",
        data_parallel=True,
    ),
    "a reordered pair": Fault(
        _event_before_work, r"counts\.\d: .* reads what forward route\.\d: .* has used"
    ),
}
