"""Grids: YAML files that say which blocks to measure.

A grid holds ``cases`` (a list), or ``axes`` (a list of lists: every combination of one entry of each is a
case, named by joining the entries' names, unless its name is in ``without``). ``defaults`` are the values of
keys that an entry does not give.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_ampipe.errors import nearest
from megatron_ampipe.files.inputs import LinedMapping, find_config, load, refuse
from megatron_ampipe.files.records import read_record
from megatron_ampipe.plan.block import Block

_ABOVE_0 = {"above": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One block, with the tokens of one micro-batch.

    Attributes:
        sequence_length: Rows of the sequence on each rank.
        batch: Sequences in the micro-batch.
        hidden: Width of the residual stream.
        heads: Query heads.
        query_groups: Key and value heads; the number of query heads if left out.
        head_size: Width of a head; hidden / heads if left out.
        experts: Experts over all ranks.
        topk: Experts per token.
        ffn: Width inside an expert.
        shared_ffn: Width inside the shared experts together; none if left out.
        activation: Inside experts.
        expert_kind: ``sequential``: a rank's experts one after another. ``torch-grouped``: torch's grouped
            GEMM, as with --moe-grouped-gemm.
        transformer_impl: As --transformer-impl, for all layers. ``transformer_engine`` needs a GPU, and
            computes a rank's experts in grouped products.
        capacity: Capacity factor; tokens above it are dropped by their position. If left out, none is.
        imbalance: Rows of the busiest rank over the mean: a bias of the router for the experts of rank 0.
        dtype: Type of parameters and activations.
    """

    name: str
    sequence_length: int
    batch: int
    hidden: int
    heads: int
    query_groups: int | None = None
    head_size: int | None = None
    experts: int
    topk: int
    ffn: int
    shared_ffn: int | None = None
    activation: Literal["gelu", "swiglu"]
    expert_kind: Literal["sequential", "torch-grouped"] = "sequential"
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    capacity: float | None = field(default=None, metadata=_ABOVE_0)
    imbalance: float = field(default=1.0, metadata={"minimum": 1.0})
    dtype: Literal["fp32", "bf16", "fp16"]

    @property
    def local(self) -> bool:
        """Whether the layers are Megatron's own."""
        return self.transformer_impl == "local"

    @property
    def grouped(self) -> bool:
        """Whether a rank's experts are computed in grouped products."""
        return not self.local or self.expert_kind != "sequential"


def model_flags(case: Case, *, num_ranks: int) -> dict[str, Any]:
    """The model of a block as Megatron's flags without dashes; True for a flag without a value.

    Without dropout and router losses; the experts are spread over ``num_ranks``.
    """
    flags: dict[str, Any] = {
        "hidden-size": case.hidden,
        "num-attention-heads": case.heads,
        "kv-channels": case.head_size or case.hidden // case.heads,
        "group-query-attention": case.query_groups and True,
        "num-query-groups": case.query_groups,
        "ffn-hidden-size": case.ffn,
        "moe-ffn-hidden-size": case.ffn,
        "swiglu": case.activation == "swiglu" or None,
        "num-experts": case.experts,
        "expert-model-parallel-size": num_ranks,
        "moe-router-topk": case.topk,
        # With one expert per token, a softmax over the chosen would always be 1.
        "moe-router-pre-softmax": case.topk == 1 or None,
        "moe-router-load-balancing-type": "none",
        "moe-token-dispatcher-type": "alltoall",
        "moe-shared-expert-intermediate-size": case.shared_ffn,
        "moe-expert-capacity-factor": case.capacity,
        "moe-token-drop-policy": case.capacity and "position",
        "normalization": "RMSNorm",
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
    }
    if case.imbalance > 1:
        # A bias of scores decides which experts are chosen, not what their results are multiplied with.
        flags |= {"moe-router-score-function": "sigmoid", "moe-router-enable-expert-bias": True}
    if case.dtype != "fp32":
        # Otherwise rounding, which differs in chunks, could reorder experts with nearly equal scores.
        flags |= {case.dtype: True, "moe-router-dtype": "fp32"}
    return {flag: value for flag, value in flags.items() if value is not None}


def block_of_case(case: Case, *, num_ranks: int, fused_gradients: bool) -> Block:
    """The block as the planner needs it: no router losses, as :mod:`.blocks` builds it."""
    # It imports pydantic, which ranks that only time layers do not need.
    from megatron_ampipe.plan.model_block import block_of
    from megatron_ampipe.plan.model_file import ModelFile

    flags = model_flags(case, num_ranks=num_ranks) | {
        "seq-length": case.sequence_length,
        "micro-batch-size": case.batch,
        "transformer-impl": case.transformer_impl,
        "moe-grouped-gemm": case.grouped,
        "no-gradient-accumulation-fusion": not fused_gradients,
    }
    model = ModelFile(Path(case.name), flags, {})
    block, _ = block_of(model, None, ranks=num_ranks, imbalance=case.imbalance)
    return block


@dataclass(frozen=True, slots=True, kw_only=True)
class _GridFile:
    """The form of the file; see the head of this module."""

    description: str | None = None
    defaults: LinedMapping | None = None
    cases: tuple[LinedMapping, ...] | None = None
    axes: tuple[tuple[LinedMapping, ...], ...] | None = None
    without: tuple[str, ...] = ()


def find_grid(text: str) -> Path:
    """The file of ``--grid``: a path, or the name of a file in ``configs/bench``."""
    return find_config(text, folders=["bench"], flag="--grid", what="grid")


def read_grid(path: Path, *, only: str | None = None, num_ranks: int = 1) -> tuple[Case, ...]:
    """Read and check a grid; BadInput names the file, the line and the key that is wrong.

    Args:
        path: The file.
        only: Names of the wanted cases, separated by commas; None for all.
        num_ranks: Over which the experts are spread.
    """
    top = load(path, what="grid", remedy="Look at configs/bench/cpu-small.yaml for the format.")
    file, _ = read_record(path, _GridFile, top)
    if (file.cases is None) == (file.axes is None):
        refuse(path, top.line, "cases", "exactly one of cases and axes must be given", "Give cases.")
    axes = file.axes or (file.cases or (),)
    cases = [_case(path, file.defaults, parts) for parts in itertools.product(*axes)]
    cases = [case for case in cases if case.name not in file.without]
    by_name = {case.name: case for case in cases}
    if not cases or len(by_name) < len(cases):
        refuse(path, top.line, "cases", "none is left, or two have one name", "Give each another name.")
    chosen = list(by_name) if only is None else only.split(",")
    for name in chosen:
        if name not in by_name:
            refuse(path, top.line, f"case {name}", "is not in this grid", nearest(name, by_name))
        if by_name[name].experts % num_ranks:
            rule = f"{num_ranks} ranks cannot share its {by_name[name].experts} experts equally"
            refuse(path, top.line, f"case {name}", rule, "Use --ranks 2, or change the grid.")
    return tuple(case for case in cases if case.name in chosen)


def _case(path: Path, defaults: LinedMapping | None, parts: Sequence[LinedMapping]) -> Case:
    """One case: later parts win over earlier ones, and all over the defaults."""
    merged = LinedMapping(parts[0].line)
    for part in parts if defaults is None else (defaults, *parts):
        merged.update(part)
        merged.lines.update(part.lines)
    names = [str(part["name"]) for part in parts if "name" in part]
    if len(names) == len(parts):
        merged["name"] = "-".join(names)
    case, lines = read_record(path, Case, merged, add="Add '{key}: ...' here or to defaults.")
    if case.head_size is None and case.hidden % case.heads:
        rule, remedy = f"does not divide hidden {case.hidden}", "Choose a divisor, or give head_size."
        refuse(path, lines["heads"], f"heads {case.heads} (case {case.name})", rule, remedy)
    return case
