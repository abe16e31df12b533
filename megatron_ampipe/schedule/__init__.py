"""What runs when inside transformer blocks, as data: stages, lanes, orders, and their checks."""

from megatron_ampipe.schedule.check import check
from megatron_ampipe.schedule.chunks import (
    Chunk,
    SequenceLayout,
    Span,
    chunk_sequence,
    even_chunks,
    row_unit,
)
from megatron_ampipe.schedule.dataflow import DataFlow, Source, data_flow, dependencies, is_whole, needs_of
from megatron_ampipe.schedule.exchange import (
    ALL_EXCHANGES,
    Exchange,
    NodeLayout,
    parse_exchanges,
    useful_exchanges,
    with_exchange,
)
from megatron_ampipe.schedule.features import BlockFeatures
from megatron_ampipe.schedule.issue import issue_order, stream_of
from megatron_ampipe.schedule.kinds import ALL_KINDS, MOE_BLOCK, WEIGHTS
from megatron_ampipe.schedule.memory_strategy import (
    COPYING,
    KEEP,
    PAPER_NAMES,
    STRATEGIES,
    check_memory,
    memory_to_text,
    of_chunks,
    with_memory,
)
from megatron_ampipe.schedule.orders import IN_ONE_CHUNK, SCHEDULE_NAMES, build
from megatron_ampipe.schedule.passes import period, unrolled
from megatron_ampipe.schedule.pipeline import ALL_LAYERS, Pipeline, parse_shares, parse_stack, stack_to_text
from megatron_ampipe.schedule.program import LaneOrder, Program, Schedule, Stage
from megatron_ampipe.schedule.stage_kind import Direction, Lane, Layout, Scope, StageKind, Value
from megatron_ampipe.schedule.text import from_text, stage_from_text, to_text
