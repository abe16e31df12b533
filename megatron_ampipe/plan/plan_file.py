"""A plan: how to run the blocks of a model, and why; and its file, for ``--ampipe-plan``.

Made by :func:`make_plan` from a workload and a cluster, written and read as YAML. Reading checks the format;
``schedule.check`` checks whether the plan fits a block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from megatron_ampipe.errors import BadInput
from megatron_ampipe.plan.cost import Pair
from megatron_ampipe.plan.made_for import MadeFor
from megatron_ampipe.plan.memory import peak_bytes
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.search import DEGREES, Candidate, candidates, choose_degree, full_plan
from megatron_ampipe.records import read_record, refuse, write_record
from megatron_ampipe.schedule import Pipeline, Schedule, build, even_chunks, from_text, to_text
from megatron_ampipe.yaml_lines import load

MINIMUM_SPEEDUP = 1.01
"""Blocks are not split into chunks for a smaller predicted speedup: predictions are not that exact."""
SHARE_TOLERANCE = 1e-3
"""Allowed deviation of the sum of a file's shares from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to run every block of a model.

    Predictions are None in a plan that a run found by measuring (``--ampipe-save-plan``).

    Attributes:
        schedule: Degrees of both directions and the order of the stages.
        shares: Share of the sequence in each chunk, with a sum of 1; the number of chunks is the larger
            degree.
        stock_ms: Predicted time of Megatron's own block, forward and backward.
        predicted_ms: Predicted time with this plan.
        stages_forward_ms: Predicted time of a forward pass from the start of its first stage to the end of
            its last one, which is what a run's recorder measures.
        stages_backward_ms: The same of a backward pass, without the forward pass of a recompute.
        hidden_share: Share of the communication that is hidden under computation, 0 to 1.
        memory_gib: Estimated peak of one block's activations.
        reason: Why this plan, in one sentence.
        made_for: The block and the machines; None in a file of an earlier version, or if it was removed in
            order to run the plan for another block.
    """

    schedule: Schedule
    shares: tuple[float, ...]
    stock_ms: float | None = None
    predicted_ms: float | None = None
    stages_forward_ms: float | None = None
    stages_backward_ms: float | None = None
    hidden_share: float | None = None
    memory_gib: float | None = None
    reason: str
    made_for: MadeFor | None = None

    @property
    def forward_degree(self) -> int:
        """Degree of the forward pass; 1 is Megatron's own layer."""
        return self.schedule.degree

    @property
    def backward_degree(self) -> int:
        """Degree of the backward pass."""
        return self.schedule.backward_degree

    @property
    def predicted_speedup(self) -> float:
        """Speedup over Megatron's own layer; only for a plan with predictions."""
        assert self.stock_ms is not None and self.predicted_ms is not None
        return self.stock_ms / self.predicted_ms

    @property
    def helps(self) -> bool:
        """Whether the blocks are split into chunks."""
        return max(self.forward_degree, self.backward_degree) > 1

    @property
    def stages_ms(self) -> tuple[float, float] | None:
        """Predicted time from first to last stage, forward and backward; None without a prediction."""
        if self.stages_forward_ms is None or self.stages_backward_ms is None:
            return None
        return self.stages_forward_ms, self.stages_backward_ms

    def pipeline(self, *, rows: int | None = None) -> Pipeline:
        """The pipeline of the blocks.

        The order of the file is used even if its name is that of a named schedule: it may have been edited.

        Args:
            rows: Rows of the residual stream of one rank, to recognize equal chunks; None if not known.
        """
        equal = rows is not None and self._are_equal(rows)
        return Pipeline(
            degree=self.forward_degree,
            backward_degree=self.backward_degree,
            shares=None if equal else self.shares,
            order=self.schedule,
        )

    def _are_equal(self, rows: int) -> bool:
        """Whether the shares of this number of rows are the lengths of equal chunks."""
        even = even_chunks(rows, len(self.shares))
        return (max(self.shares) - min(self.shares)) * rows < 1 + 1e-6 or all(
            abs(share * rows - length) < 0.5 for share, length in zip(self.shares, even, strict=True)
        )

    def write(self, path: Path, *, head: str) -> None:
        """Write the file atomically: under a temporary name that is then renamed.

        Args:
            path: Path of the file.
            head: A comment for the first line, such as the command that made it.
        """
        record = _PlanFile(
            format=FORMAT,
            forward_degree=self.forward_degree,
            backward_degree=self.backward_degree,
            shares=self.shares,
            stock_ms=self.stock_ms,
            predicted_ms=self.predicted_ms,
            stages_forward_ms=self.stages_forward_ms,
            stages_backward_ms=self.stages_backward_ms,
            hidden_share=self.hidden_share,
            memory_gib=self.memory_gib,
            reason=self.reason,
            made_for=self.made_for,
            schedule=to_text(self.schedule),
        )
        write_record(path, record, head=head)

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Read a file of :meth:`write`, or one that was written by hand.

        Raises:
            BadInput: the file is wrong; the message names file, line and key.
        """
        top = load(path, what="plan", remedy="Give a file that ampipe plan --output wrote.")
        found, lines = read_record(path, _PlanFile, top)
        try:
            schedule = from_text(found.schedule)
        except BadInput as error:
            refuse(path, lines["schedule"], f"{error.name} {error.value}", error.rule, error.remedy)
        degrees = {"forward_degree": schedule.degree, "backward_degree": schedule.backward_degree}
        for key, inside in degrees.items():
            if getattr(found, key) != inside:
                shown = f"{key} {getattr(found, key)}"
                refuse(path, lines[key], shown, f"the schedule has {inside}", f"Write {inside}.")
        chunks = schedule.num_chunks
        if len(found.shares) != chunks:
            rule = f"has {len(found.shares)} shares for {chunks} chunks"
            refuse(path, lines["shares"], "shares", rule, "Give one share for each chunk.")
        if (found.hidden_share or 0.0) > 1:
            shown = f"hidden_share {found.hidden_share:g}"
            refuse(path, lines["hidden_share"], shown, "is a share, from 0 to 1", "Write for example 0.9.")
        total = sum(found.shares)
        if min(found.shares) <= 0 or abs(total - 1) > SHARE_TOLERANCE:
            rule = f"must be above 0 with a sum of 1; the sum is {total:g}"
            refuse(path, lines["shares"], "shares", rule, "Write for example [0.5, 0.5].")
        return cls(
            schedule=schedule,
            shares=tuple(share / total for share in found.shares),
            stock_ms=found.stock_ms,
            predicted_ms=found.predicted_ms,
            stages_forward_ms=found.stages_forward_ms,
            stages_backward_ms=found.stages_backward_ms,
            hidden_share=found.hidden_share,
            memory_gib=found.memory_gib,
            reason=found.reason,
            made_for=found.made_for,
        )


FORMAT: Literal["ampipe-plan-1"] = "ampipe-plan-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlanFile:
    """The format of the file; see :class:`Plan`."""

    format: Literal["ampipe-plan-1"]
    forward_degree: int
    backward_degree: int
    shares: tuple[float, ...]
    made_for: MadeFor | None = None
    schedule: str
    stock_ms: float | None = None
    predicted_ms: float | None = None
    stages_forward_ms: float | None = None
    stages_backward_ms: float | None = None
    hidden_share: float | None = None
    memory_gib: float | None = None
    reason: str


def make_plan(predictor: Predictor, *, degrees: tuple[int, ...] = DEGREES, full: bool = True) -> Plan:
    """Make a plan for the blocks of a workload on a cluster.

    Args:
        predictor: Of the workload on the cluster.
        degrees: The degrees that are tried.
        full: Whether unequal chunks and other orders are searched too; without them, the search takes a few
            milliseconds.

    Returns:
        The plan; of degree 1 if no speedup is predicted.

    Raises:
        BadInput: the predicted time of a block is 0.
    """
    stock = predictor.stock()
    workload = predictor.workload
    if not stock.forward + stock.backward > 0:
        raise BadInput(
            "cluster",
            predictor.cluster.path,
            rule="has figures with which the time of a block is 0",
            remedy="Write the times of its operations, or measure the cluster with ampipe profile.",
        )
    best: Candidate | None = None
    if workload.rows > 1 and workload.expert > 1:
        best = (full_plan if full else choose_degree)(predictor, degrees)
    if best is None or _speedup(stock, best) < MINIMUM_SPEEDUP:
        schedule = build("sequential", degree=1, features=workload.features)
        timeline = predictor.timeline(schedule, (workload.rows,))
        whole = Plan(
            schedule=schedule,
            shares=(1.0,),
            stock_ms=_ms(stock),
            predicted_ms=_ms(stock),
            stages_forward_ms=timeline.length_us("forward") / 1e3,
            stages_backward_ms=timeline.length_us("backward") / 1e3,
            hidden_share=0.0,
            memory_gib=peak_bytes(workload, forward_degree=1, backward_degree=1) / 2**30,
            reason="",
            made_for=MadeFor.on(workload, predictor.cluster),
        )
        return replace(whole, reason=_reason_against(predictor, best))
    return plan_of(predictor, best, degrees=degrees)


def plan_of(predictor: Predictor, found: Candidate, *, degrees: tuple[int, ...] = DEGREES) -> Plan:
    """The plan of a candidate, with its predictions and the reason for the choice.

    Args:
        predictor: Of the workload on the cluster.
        found: The chosen candidate.
        degrees: Degrees that were tried; the reason compares the next smaller and the next larger one.
    """
    forward, backward = found.schedule.degree, found.schedule.backward_degree
    timeline = predictor.timeline(found.schedule, found.lengths)
    plan = Plan(
        schedule=found.schedule,
        shares=tuple(length / predictor.workload.rows for length in found.lengths),
        stock_ms=_ms(predictor.stock()),
        predicted_ms=_ms(found.time),
        stages_forward_ms=timeline.length_us("forward") / 1e3,
        stages_backward_ms=timeline.length_us("backward") / 1e3,
        hidden_share=timeline.hidden_share,
        memory_gib=peak_bytes(predictor.workload, forward_degree=forward, backward_degree=backward) / 2**30,
        reason="",
        made_for=MadeFor.on(predictor.workload, predictor.cluster),
    )
    return replace(plan, reason=_reason(predictor, plan, timeline.communication_us / 1e3, degrees))


def _reason(predictor: Predictor, plan: Plan, communication_ms: float, degrees: tuple[int, ...]) -> str:
    chosen = f"{plan.forward_degree} chunks"
    if plan.backward_degree != plan.forward_degree:
        chosen = f"{plan.forward_degree} chunks forward and {plan.backward_degree} backward"
    count = plan.schedule.num_chunks
    fewer = [degree for degree in degrees if degree < count][-1:]
    more = [degree for degree in degrees if count < degree <= predictor.workload.rows][:1]
    others = []
    for degree in (*fewer, *more):
        best = min(candidates(predictor, [degree]), key=lambda one: one.total_us)
        others.append(f"{_speedup(predictor.stock(), best):.2f} with {degree}")
    compared = f", compared with {' and '.join(others)} equal chunks" if others else ""
    return (
        f"With {chosen}, {plan.hidden_share:.0%} of {communication_ms:.3g} ms of communication are hidden "
        f"under computation: the block is predicted to be {plan.predicted_speedup:.2f} times as fast as "
        f"Megatron's{compared}."
    )


def _reason_against(predictor: Predictor, best: Candidate | None) -> str:
    if predictor.workload.expert == 1:
        return "AMPipe will not help: each rank holds all experts, so nothing is sent that could be hidden."
    if best is None:
        return "AMPipe will not help: a sequence of one row cannot be split."
    stock = predictor.stock()
    share = predictor.communication_us() / (stock.forward + stock.backward)
    return (
        f"AMPipe will not help: communication is {share:.0%} of the block, and the overhead of chunks is "
        f"about as large as the time that they hide, or larger (the best degree that was found, "
        f"{best.schedule.num_chunks}, is predicted to be {_speedup(stock, best):.2f} times as fast)."
    )


def _speedup(stock: Pair, found: Candidate) -> float:
    return (stock.forward + stock.backward) / found.total_us


def _ms(time: Pair) -> float:
    return (time.forward + time.backward) / 1e3
