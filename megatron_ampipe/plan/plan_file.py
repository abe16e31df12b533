"""A plan says how to run the blocks of a model, and why; and its file, for ``--ampipe-plan``.

The file also records the block and the machines that the plan was made for. A run creates the same record
from its flags and compares both. Reading checks the format; ``schedule.check``, whether it fits a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from megatron_ampipe.block.settings import PARTNER_ORDERS, ExchangeName
from megatron_ampipe.errors import BadInput
from megatron_ampipe.files.inputs import LinedMapping, load, refuse
from megatron_ampipe.files.records import read_record, write_record
from megatron_ampipe.plan.block import RECORDED, Block
from megatron_ampipe.schedule import (
    KEEP,
    SCHEDULE_NAMES,
    Exchange,
    Partner,
    Pipeline,
    Schedule,
    check_memory,
    even_chunks,
    from_text,
    program_from_text,
    program_to_text,
    to_text,
)

SHARE_TOLERANCE = 1e-3
"""Allowed deviation of the sum of a file's shares from 1."""


MadeFor = LinedMapping
"""The block and the machines that a plan was made for: the section ``made_for`` of a file."""


def made_for(block: Block, *, cluster: str, ranks_per_node: int) -> MadeFor:
    """The record of a block on machines with this description; fields that are None are left out."""
    record = MadeFor(line=1)
    for key, recorded in RECORDED.items():
        if (value := recorded.metadata["text"](getattr(block, recorded.name))) is not None:
            record[key] = value
    record |= {"ranks_per_node": ranks_per_node, "cluster": cluster}
    return record


def differences(planned: MadeFor, running: MadeFor) -> dict[str, bool]:
    """All differences between a run and the run that a plan was made for, except the machines' description.

    Returns:
        For each difference, in words, whether it makes the plan unusable.
    """
    different = {}
    for key in {**running, **planned}:
        before, now = planned.get(key), running.get(key)
        if before != now and key != "cluster":
            columns: Any = RECORDED[key].metadata if key in RECORDED else {"flag": key.replace("_", " ")}
            essential = key != "ranks_per_node" and bool(columns.get("essential", True))
            different[f"{columns['flag']} {_shown(before)} (this run: {_shown(now)})"] = essential
    return different


def _shown(value: object) -> str:
    if value is None:
        return "not given"
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """The fields that a plan and its file have in the same form; see :class:`Plan`."""

    num_layers: int = 1
    stock_ms: float | None = None
    predicted_ms: float | None = None
    stages_forward_ms: float | None = None
    stages_backward_ms: float | None = None
    hidden_share: float | None = None
    memory_gib: float | None = None
    partner_ms: float | None = None
    partner_stock_ms: float | None = None
    reason: str
    made_for: MadeFor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(_Planned):
    """How to run every block of a model, and why: from a planner, a file, or a run's trials.

    Predictions are None in a plan that a run has found by measuring (``--ampipe-save-plan``). They cover all
    layers that share a schedule, or one block if layers share none.

    Attributes:
        pipeline: How they run. In a planner's plan and in a file, it has an order of the stages, and a share
            for each chunk.
        num_layers: Number of layers that the predictions cover.
        stock_ms: Predicted time of Megatron's own layers, forward and backward.
        predicted_ms: Predicted time with this plan.
        stages_forward_ms: Predicted time of a forward pass from the start of its first stage to the end of
            its last stage, as a run's recorder measures it.
        stages_backward_ms: The same for a backward pass, without the forward pass of a recompute.
        hidden_share: Share of the communication that is hidden under computation, 0 to 1.
        memory_gib: Estimated peak of one block's activations.
        partner_ms: Predicted time of a forward and a backward pass that run together.
        partner_stock_ms: The same for Megatron's own layers, one pass after the other.
        reason: Why this plan was chosen, in one sentence.
        made_for: The block and the machines; None if it was removed to run the plan for another block.
        notes: Further information for the user of a run, one sentence each; not in the file.
    """

    pipeline: Pipeline
    notes: tuple[str, ...] = ()

    @property
    def schedule(self) -> Schedule:
        """The order of the stages in both directions; it repeats if layers share it."""
        assert self.pipeline.order is not None
        return self.pipeline.order

    @property
    def predicted_speedup(self) -> float:
        """Speedup over Megatron's own layers, with a partner where there is one; only with predictions."""
        if self.partner_ms is not None and self.partner_stock_ms is not None:
            return self.partner_stock_ms / self.partner_ms
        assert self.stock_ms is not None and self.predicted_ms is not None
        return self.stock_ms / self.predicted_ms

    @property
    def helps(self) -> bool:
        """Whether blocks run differently from Megatron's: in chunks, with another exchange, or a partner."""
        return self.pipeline.partner is not None or not self.pipeline.is_stock

    @property
    def searched(self) -> bool:
        """Whether it has an order of stages without a name."""
        partner = self.pipeline.partner
        return self.schedule.name not in SCHEDULE_NAMES or bool(partner and partner.period)

    @property
    def stages_ms(self) -> tuple[float, float] | None:
        """Predicted time from first to last stage, forward and backward, to compare with a run's.

        None without a prediction, and with partners, for which a run measures both passes together.
        """
        if self.pipeline.partner is not None:
            return None
        if self.stages_forward_ms is None or self.stages_backward_ms is None:
            return None
        return self.stages_forward_ms, self.stages_backward_ms

    def pipeline_of(self, rows: int) -> Pipeline:
        """The pipeline for ``rows`` rows of the residual stream of a rank; with None for equal shares."""
        shares = self.pipeline.shares
        assert shares is not None
        even = even_chunks(rows, len(shares))
        equal = (max(shares) - min(shares)) * rows < 1 + 1e-6 or all(
            abs(share * rows - length) < 0.5 for share, length in zip(shares, even, strict=True)
        )
        return replace(self.pipeline, shares=None) if equal else self.pipeline

    def write(self, path: Path, *, head: str) -> None:
        """Write the file. The first line is the comment ``head``, such as the command that created it."""
        pipeline = self.pipeline
        record = {
            "format": "ampipe-plan-1",
            "forward_degree": pipeline.degree,
            "backward_degree": pipeline.backward_degree,
            "schedule": to_text(self.schedule),
            "exchange": pipeline.exchange.value,
            "partner": pipeline.partner and _partner_section(pipeline.partner),
            "shares": pipeline.shares,
            "stack": pipeline.stack,
            "memory": pipeline.memory,
            **{name: getattr(self, name) for name in _Planned.__slots__},
        }
        known = {name: value for name, value in record.items() if value is not None}
        write_record(path, known, head=head)

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Read a file of :meth:`write`, or a file written by hand.

        Raises:
            BadInput: the file is wrong; the message names file, line and key.
        """
        top = load(path, what="plan", remedy="Give a file that ampipe plan --output wrote.")
        record, lines = read_record(path, _PlanFile, top)
        try:
            schedule = from_text(record.schedule)
            check_memory(record.memory, backward_degree=schedule.backward_degree)
        except BadInput as error:
            key = "memory" if error.name == "--ampipe-memory" else "schedule"
            refuse(path, lines[key], f"{error.name} {error.value}", error.rule, error.remedy)
        num_chunks, total = schedule.num_chunks, sum(record.shares)
        sums_to_one = min(record.shares) > 0 and abs(total - 1) <= SHARE_TOLERANCE
        for key, good, rule in (
            ("forward_degree", record.forward_degree == schedule.degree, schedule.degree),
            ("backward_degree", record.backward_degree == schedule.backward_degree, schedule.backward_degree),
            ("shares", len(record.shares) == num_chunks, f"{num_chunks}, one for each chunk of the schedule"),
            ("shares", sums_to_one, f"above 0 with a sum of 1; the sum is {total:g}"),
        ):
            if not good:
                shown = f"{key} {getattr(record, key)}"
                refuse(path, lines[key], shown, f"must be {rule}", "Change the schedule, or this.")
        pipeline = Pipeline(
            degree=schedule.degree,
            backward_degree=schedule.backward_degree,
            shares=tuple(share / total for share in record.shares),
            order=schedule,
            stack=record.stack,
            memory=record.memory,
            exchange=Exchange(record.exchange),
            partner=None if record.partner is None else _partner_of(path, record.partner, lines),
        )
        return cls(pipeline=pipeline, **{name: getattr(record, name) for name in _Planned.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartnerFile:
    """The section ``partner``; see :class:`~megatron_ampipe.schedule.Partner`."""

    degree: int = 1
    schedule: Literal["ampipe", "lancet"]
    order: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlanFile(_Planned):
    """The format of the file; see :class:`Plan`."""

    format: Literal["ampipe-plan-1"]
    forward_degree: int
    backward_degree: int
    schedule: str
    exchange: ExchangeName = "rows"
    partner: _PartnerFile | None = None
    shares: tuple[float, ...]
    stack: int = field(default=1, metadata={"minimum": 0})
    memory: str = KEEP


def _partner_section(partner: Partner) -> _PartnerFile:
    """The section for a partner; a searched order is text, one line per lane."""
    order = partner.order if partner.period is None else program_to_text(partner.period)
    return _PartnerFile(degree=partner.degree, schedule=partner.schedule, order=order)  # type: ignore[arg-type]


def _partner_of(path: Path, section: _PartnerFile, lines: Mapping[str, int]) -> Partner:
    if section.order in (None, *PARTNER_ORDERS):
        return Partner(section.degree, section.schedule, section.order)
    try:
        period = program_from_text(section.order, degree=section.degree)
    except BadInput as error:
        remedy = f"{error.remedy} Or name one: {' or '.join(PARTNER_ORDERS)}."
        refuse(path, lines["partner.order"], f"{error.name} {error.value}", error.rule, remedy)
    return Partner(section.degree, section.schedule, period=period)
