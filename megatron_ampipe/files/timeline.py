"""The timeline of a run: when every stage ran. Recorded and simulated runs use the same type.

The file format is the Chrome trace event format, which Perfetto opens as well.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ampipe.files import inputs, outputs

COMPUTE = "compute"
COPY = "copy"
DIRECTIONS = ("forward", "backward")
PREDICTED = "predicted"
"""The label of a simulated timeline; its value is the source of the prediction."""
AGAIN = "again:"
"""Prefix of the name of a stage that the backward pass runs again."""
_LARGEST = 1e15
"""Largest time in microseconds (30 years) in a trace."""


@dataclass(frozen=True, slots=True)
class StageSpan:
    """One execution of one stage."""

    lane: str
    """The lane: ``compute``, ``copy``, or a communication lane (``comm``, ``comm.intra``)."""
    stage: str
    """The stage's name, as in the schedule: ``attention.2``."""
    direction: str
    """``forward`` or ``backward``."""
    layer: int
    """Megatron's layer number, from 1; ``iteration`` is as Megatron counts, too."""
    iteration: int
    begin_us: float
    """In microseconds on this rank's clock, as ``end_us``."""
    end_us: float
    of_next_microbatch: bool = False
    """Whether it is a forward stage of the next micro-batch that a backward pass runs."""
    of_repeat: bool = False
    """Whether it is of a step that ran again, because a budget of ``--ampipe-rows fixed`` was exceeded."""

    @property
    def program(self) -> str:
        """The direction of the pass that ran it."""
        return "backward" if self.of_next_microbatch else self.direction

    @property
    def chunk(self) -> int | None:
        """The chunk number, or None for a stage of the whole block."""
        _, _, number = self.stage.partition(".")
        return int(number) if number.isascii() and number.isdecimal() else None

    @property
    def kind(self) -> str:
        """The kind of the stage: ``attention``."""
        return self.stage.removeprefix(AGAIN).partition(".")[0]


@dataclass(frozen=True, slots=True)
class Timeline:
    """All recorded spans of one global rank, ordered by start time.

    ``labels`` are properties of the run (degree, schedule, ...), shown in the drawing.
    """

    rank: int
    spans: tuple[StageSpan, ...]
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def is_predicted(self) -> bool:
        """Whether it was simulated, not recorded."""
        return PREDICTED in self.labels

    @property
    def communication_us(self) -> float:
        """Time during which at least one communication lane was busy."""
        return self._busy_us(lambda lane: lane not in (COMPUTE, COPY))

    @property
    def compute_us(self) -> float:
        """Time during which the compute lane was busy."""
        return self._busy_us(lambda lane: lane == COMPUTE)

    @property
    def hidden_us(self) -> float:
        """The part of ``communication_us`` during which the compute lane was busy as well."""
        either_us = self._busy_us(lambda lane: lane != COPY)
        return max(0.0, self.communication_us + self.compute_us - either_us)

    @property
    def hidden_share(self) -> float:
        """Share of the communication time that overlaps with computation, 0 to 1; 0 without communication."""
        total = self.communication_us
        return self.hidden_us / total if total else 0.0

    @property
    def hidden_by(self) -> dict[str, float]:
        """The share of the transfers' time that is hidden, by what is computed meanwhile (``HIDES``)."""
        hidden = dict.fromkeys(HIDES, 0.0)
        computed = [span for span in self.spans if span.lane == COMPUTE]
        transfers = [span for span in self.spans if span.lane not in (COMPUTE, COPY)]
        for transfer in transfers:
            for span in computed:
                overlap_us = min(span.end_us, transfer.end_us) - max(span.begin_us, transfer.begin_us)
                if overlap_us > 0:
                    hidden[_source(span, transfer)] += overlap_us
        total_us = sum(span.end_us - span.begin_us for span in transfers)
        return {source: overlap_us / total_us if total_us else 0.0 for source, overlap_us in hidden.items()}

    def length_us(self, direction: str) -> float:
        """Time from the start of the first stage of a direction to the end of the last; 0 without stages."""
        spans = [span for span in self.spans if span.direction == direction]
        if not spans:
            return 0.0
        return max(span.end_us for span in spans) - min(span.begin_us for span in spans)

    def _busy_us(self, counts: Callable[[str], bool]) -> float:
        """Time during which at least one of the lanes that count was busy."""
        total, until = 0.0, -math.inf
        for begin, end in sorted((span.begin_us, span.end_us) for span in self.spans if counts(span.lane)):
            total += max(0.0, end - max(begin, until))
            until = max(until, end)
        return total

    def write_chrome(self, path: Path) -> None:
        """Write the Chrome trace, as :func:`.outputs.write_text`."""
        process = "predicted" if self.is_predicted else f"rank {self.rank}"
        events: list[dict[str, object]] = [
            {"name": "process_name", "ph": "M", "pid": self.rank, "args": {"name": process}}
        ]
        events += [
            {
                "name": span.stage,
                "cat": span.direction,
                "ph": "X",
                "ts": span.begin_us,
                "dur": span.end_us - span.begin_us,
                "pid": self.rank,
                "tid": span.lane,
                "args": {"layer": span.layer, "iteration": span.iteration}
                | ({"ahead": 1} if span.of_next_microbatch else {})
                | ({"repeat": 1} if span.of_repeat else {}),
            }
            for span in self.spans
        ]
        document = {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {"rank": str(self.rank), **self.labels},
        }
        outputs.write_text(path, json.dumps(document))

    @classmethod
    def read_chrome(cls, path: Path) -> Timeline:
        """Read what :meth:`write_chrome` wrote; :class:`BadInput` if a file is not such, or has no stage."""
        remedy = "Give a file that a run with --ampipe-trace-dir wrote (rank0.trace.json)."
        rule = "is not a trace written by AMPipe"
        return inputs.parse_file(path, cls._parse, what="trace", rule=rule, remedy=remedy)

    @classmethod
    def _parse(cls, text: str) -> Timeline:
        document = json.loads(text)
        labels = {str(key): str(value) for key, value in dict(document["otherData"]).items()}
        rank = int(labels.pop("rank"))
        spans = tuple(_read_span(event) for event in document["traceEvents"] if event["ph"] == "X")
        if not spans:
            raise ValueError("no stage")
        return cls(rank=rank, spans=spans, labels=labels)


@dataclass(frozen=True, slots=True)
class Communication:
    """How long a rank communicates in an iteration, and for how much of that time it computes too."""

    time_ms: float
    hidden_share: float
    """0 to 1."""

    @classmethod
    def of(cls, timeline: Timeline) -> Communication:
        """Of one iteration of a timeline, over all layers and micro-batches."""
        return cls(timeline.communication_us / 1e3, timeline.hidden_share)


def summary_of(iterations: Sequence[Communication]) -> str:
    """The medians over iterations: the two figures by which overlaps of different programs are compared."""
    time_ms = statistics.median(iteration.time_ms for iteration in iterations)
    share = statistics.median(iteration.hidden_share for iteration in iterations)
    return f"communication per iteration (ms): {time_ms:.2f} | under computation: {share:.1%}"


HIDES = ("chunks", "weight gradients", "partner", "other stages")
"""What hides a transfer: stages of other chunks or layers, weight gradients, stages of another micro-batch,
or other stages, such as shared experts."""


def _source(span: StageSpan, transfer: StageSpan) -> str:
    if span.kind.endswith("-weights"):
        return "weight gradients"
    if span.direction != transfer.direction:
        return "partner"
    return "other stages" if (span.layer, span.chunk) == (transfer.layer, transfer.chunk) else "chunks"


def _read_span(event: dict[str, Any]) -> StageSpan:
    """Convert one complete event of a trace file to a span; ValueError if it cannot be drawn."""
    direction, begin_us, duration_us = event["cat"], float(event["ts"]), float(event["dur"])
    if direction not in DIRECTIONS or not (abs(begin_us) <= _LARGEST and 0 <= duration_us <= _LARGEST):
        raise ValueError(f"{direction} from {begin_us} for {duration_us} us")
    return StageSpan(
        lane=str(event["tid"]),
        stage=str(event["name"]),
        direction=direction,
        layer=int(event["args"]["layer"]),
        iteration=int(event["args"]["iteration"]),
        begin_us=begin_us,
        end_us=begin_us + duration_us,
        of_next_microbatch=bool(event["args"].get("ahead")),
        of_repeat=bool(event["args"].get("repeat")),
    )
