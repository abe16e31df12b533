"""What runs when inside transformer blocks, as data: stages, lanes, orders, and their checks."""

from megatron_ampipe.schedule.chunks import Chunk, SequenceLayout, Span, chunk_sequence, even_chunks, row_unit
from megatron_ampipe.schedule.custom import is_custom
from megatron_ampipe.schedule.dataflow import DataFlow, Source, data_flow, is_whole, needs_of
from megatron_ampipe.schedule.features import BlockFeatures
from megatron_ampipe.schedule.kinds import ALL_KINDS, MOE_BLOCK, WEIGHTS
from megatron_ampipe.schedule.orders import IN_ONE_CHUNK, SCHEDULE_NAMES, build
from megatron_ampipe.schedule.partners import LISTED, MEGATRON, Partner
from megatron_ampipe.schedule.passes import period, unrolled
from megatron_ampipe.schedule.pipeline import (
    ALL_LAYERS,
    Exchange,
    NodeLayout,
    Pipeline,
    parse_exchanges,
    parse_shares,
    parse_stack,
    stack_to_text,
    useful_exchanges,
    with_exchange,
    with_memory,
)
from megatron_ampipe.schedule.program import Program, Schedule, Stage, issue_order, stream_of
from megatron_ampipe.schedule.saved import (
    COPYING,
    KEEP,
    PAPER_NAMES,
    STRATEGIES,
    ExpertsSaved,
    RecomputeRequest,
    Saved,
    SavedPolicy,
    check_memory,
    chunk_strategies,
    decide,
    memory_to_text,
)
from megatron_ampipe.schedule.stage_kind import Direction, Layout, StageKind, Value
from megatron_ampipe.schedule.text import (
    check,
    from_text,
    program_from_text,
    program_to_text,
    stage_from_text,
    to_text,
)
