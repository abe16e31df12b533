"""Checks Megatron's arguments with the tables of refusals, before any process group is created."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ampipe.block.megatron_settings import Arguments
from megatron_ampipe.block.settings import AUTO, SETTING, Setting, Settings
from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.environment import PARTNER_FLAG, layout_of_args
from megatron_ampipe.launch.refusals.exchanges import EXCHANGES
from megatron_ampipe.launch.refusals.fixed_rows import FIXED_ROWS
from megatron_ampipe.launch.refusals.graphs import GRAPHS
from megatron_ampipe.launch.refusals.memory import MEMORY
from megatron_ampipe.launch.refusals.model import MODEL
from megatron_ampipe.launch.refusals.parallelism import PARALLELISM
from megatron_ampipe.launch.refusals.recording import RECORDING
from megatron_ampipe.launch.refusals.refusal import Refusal
from megatron_ampipe.launch.refusals.token_ids import TOKEN_ID_REFUSALS
from megatron_ampipe.schedule import Pipeline
from megatron_ampipe.schedule.chunks import require_whole_tiles
from megatron_ampipe.schedule.features import rows_of_tile
from megatron_ampipe.schedule.pipeline import builds_layers

REFUSALS: tuple[Refusal, ...] = (*MODEL, *PARALLELISM, *EXCHANGES, *FIXED_ROWS, *MEMORY, *GRAPHS, *RECORDING)
"""All combinations that this version refuses with a degree above 1; no other module refuses one."""


def refuse_unsupported(settings: Settings, pipeline: Pipeline, arguments: object) -> None:
    """Raise the first of :func:`unsupported`."""
    for refusal in unsupported(settings, pipeline, arguments):
        raise refusal


def unsupported(settings: Settings, pipeline: Pipeline, arguments: object) -> Iterator[BadInput]:
    """A refusal for each row of :data:`REFUSALS` that applies, and for too many chunks.

    ``arguments`` are Megatron's, parsed; at degree 1 nothing is refused.
    """
    if not builds_layers(settings, pipeline):
        return
    has_plan = settings.plan is not None
    # What a plan says replaces the flags that it stands for.
    planned = {f"ampipe_{name}": getattr(pipeline, name) for name in _PLANNED} if has_plan else {}
    args = Arguments(arguments, **planned)
    try:
        pipeline.chunks(args.seq_length)
    except BadInput as refusal:
        yield refusal
        return
    if has_plan:
        flag = _setting_of_plan(args)[0].flag
        flags, off = f"{flag} {settings.plan}", f"no {flag}"
    elif pipeline.partner is not None and pipeline.degree == 1:
        flag = PARTNER_FLAG if PARTNER_FLAG in (args.ampipe_disabled_flags or ()) else "--ampipe-partner"
        flags, off = flag, f"no {flag}"
    elif pipeline.degree > 1 or settings.automatic:
        flags, off = f"--ampipe-degree {AUTO if settings.automatic else pipeline.degree}", "--ampipe-degree 1"
    else:
        # AMPipe's layers are used with one chunk because of the exchange.
        flags, off = f"--ampipe-exchange {pipeline.exchange}", "--ampipe-exchange rows"
    yield from _conflicts(REFUSALS, args, flags=flags, off=off, has_plan=has_plan)
    tile = rows_of_tile(args, args.micro_batch_size or 1)
    if tile > 1 and not has_plan:
        try:
            require_whole_tiles(pipeline.chunks(args.seq_length, layout_of_args(args)), tile)
        except BadInput as refusal:
            yield refusal


_PLANNED = ("memory", "exchange", "partner")
"""Flags of AMPipe that rows refuse and a plan sets."""


def setting_of_plan(*, saved: bool) -> tuple[Setting, str]:
    """The flag that names the plan of a run, and the remedy if the plan does not fit.

    ``saved``: it is the file of ``--ampipe-save-plan``, which an earlier run has written.
    """
    if saved:
        return SETTING["save_plan"], "Remove the file, or give another name, to choose again."
    return SETTING["plan"], "Make one with ampipe plan from a model file with this run's flags."


def _setting_of_plan(args: Arguments) -> tuple[Setting, str]:
    return setting_of_plan(saved=args.ampipe_save_plan is not None)


def refuse_with_token_ids(router: str, arguments: object) -> None:
    """As :func:`refuse_unsupported`, with :data:`TOKEN_ID_REFUSALS`, at any degree; ``router`` is a name."""
    flags, off = f"--ampipe-router {router}", "--ampipe-degree 1"
    for refusal in _conflicts(TOKEN_ID_REFUSALS, Arguments(arguments), flags=flags, off=off):
        raise refusal


def _conflicts(
    table: tuple[Refusal, ...], args: Arguments, *, flags: str, off: str, has_plan: bool = False
) -> Iterator[BadInput]:
    """A refusal for each row that applies.

    ``flags`` are what pipelines the run, ``off`` what to write to train without; with ``has_plan``, a plan
    sets the values of :data:`_PLANNED`.
    """
    for row in table:
        value = row.applies(args)
        if value is None:
            continue
        remedy = row.remedy.replace("--ampipe-degree 1", off)
        is_planned = has_plan and row.setting.removeprefix("--ampipe-") in _PLANNED
        if is_planned and not row.also_with_plan:
            _, remedy = _setting_of_plan(args)
        yield BadInput(row.setting, value, rule=f"with {flags}, {row.rule}", remedy=remedy)
