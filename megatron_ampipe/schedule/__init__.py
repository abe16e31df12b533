"""What runs when inside one transformer block, as data: stages, lanes, orders, and their checks."""

from megatron_ampipe.schedule.build import SCHEDULE_NAMES, build
from megatron_ampipe.schedule.check import check
from megatron_ampipe.schedule.chunks import (
    Chunk,
    SequenceLayout,
    Span,
    chunk_sequence,
    even_chunks,
    row_unit,
)
from megatron_ampipe.schedule.graph import BlockFeatures, dependencies, restrict
from megatron_ampipe.schedule.issue import issue_order, stream_of
from megatron_ampipe.schedule.pipeline import Pipeline, parse_shares
from megatron_ampipe.schedule.text import from_text, to_text
from megatron_ampipe.schedule.types import Direction, LaneOrder, Program, Schedule, Stage, StageKind

__all__ = [
    "SCHEDULE_NAMES",
    "BlockFeatures",
    "Chunk",
    "Direction",
    "LaneOrder",
    "Pipeline",
    "Program",
    "Schedule",
    "SequenceLayout",
    "Span",
    "Stage",
    "StageKind",
    "build",
    "check",
    "chunk_sequence",
    "dependencies",
    "even_chunks",
    "from_text",
    "issue_order",
    "parse_shares",
    "restrict",
    "row_unit",
    "stream_of",
    "to_text",
]
