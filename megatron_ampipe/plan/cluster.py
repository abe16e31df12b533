"""What a cluster's operations cost: the form of the files in ``configs/clusters``, read and written.

Every figure is the line that was fitted (or derived, or taken from a data sheet) for one operation:
``alpha_us`` for doing it at all, and a slope for its size. All times are microseconds; MB is 10**6 bytes,
GFLOP 10**9 operations, a multiplication and an addition being two. Each figure says where it comes from.
Written by ``ampipe profile``, read by ``ampipe plan``; :mod:`.cost` turns it into times of stages.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megatron_ampipe.errors import BadInput
from megatron_ampipe.records import Lines, read_record, refuse, write_record
from megatron_ampipe.shipped import find_config, shown
from megatron_ampipe.yaml_lines import LinedMapping, load

Basis = Literal["measured", "derived", "datasheet"]
"""``measured``: timed, by ``ampipe profile`` or by the named source. ``derived``: computed or assumed, as the
source text says. ``datasheet``: a vendor's figure."""
Dtype = Literal["fp32", "bf16", "fp16", "fp8"]
Operation = Literal["all_to_all", "stock_all_to_all", "all_gather", "reduce_scatter", "all_reduce"]
OverheadKind = Literal["any", "qkv", "attention", "route", "losses", "shared", "expert", "merge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What every figure has.

    Attributes:
        basis: What kind of knowledge it is.
        source: Where it comes from, in words: a paper's section, a data sheet, a command and a machine.
        r_squared: How much of the spread of the measurements the line explains; for fitted figures.
    """

    basis: Basis = field(metadata={"last": True})
    source: str = field(metadata={"last": True})
    r_squared: float | None = field(default=None, metadata={"last": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What one size took."""

    mb: float
    us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer(Figure):
    """A collective, or a pass over memory: ``alpha_us + size * beta_us_per_mb``.

    The size of a collective is what one rank sends to the others of the group: of an all-to-all the rows
    for other ranks, of an all-gather its own rows times the other ranks, of a reduce-scatter the same. Of
    memory it is bytes read plus bytes written.

    Attributes:
        table: For what lies on no line, sizes in rising order and what they took. Between two of them the
            time is interpolated, below the first from ``alpha_us`` on, and above the last it goes on by
            ``beta_us_per_mb``.
    """

    alpha_us: float
    beta_us_per_mb: float
    table: tuple[Point, ...] | None = None

    def time_us(self, size_bytes: float) -> float:
        """Time for that many bytes."""
        mb = size_bytes * 1e-6
        below = Point(mb=0.0, us=self.alpha_us)
        for point in self.table or ():
            if mb <= point.mb:
                return below.us + (point.us - below.us) * (mb - below.mb) / (point.mb - below.mb)
            below = point
        return below.us + (mb - below.mb) * self.beta_us_per_mb


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm(Figure):
    """One matrix product of ``rows x k`` by ``k x n``.

    ``alpha_us + 2 * rows * k * n * beta + k * n * weights``: the last term does not depend on the rows, so a
    product with few rows is less efficient. It is zero where that was not measured.
    """

    alpha_us: float
    beta_us_per_gflop: float
    weights_us_per_million: float

    def time_us(self, rows: float, k: float, n: float, *, calls: int = 1) -> float:
        """Time of ``calls`` products that have ``rows`` rows together."""
        flops, weights = 2e-9 * rows * k * n, 1e-6 * k * n * calls
        return calls * self.alpha_us + flops * self.beta_us_per_gflop + weights * self.weights_us_per_million


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLine(Figure):
    """Core attention of some query rows in one direction.

    ``alpha_us + flops * beta_us_per_gflop + merged * merge_us_per_mb``. ``flops`` counts the pairs of a
    query and a key that it sees: ``4 * pairs * heads * head size`` forward, ``10 * ...`` backward.
    ``merged`` is the size of the output rows of a chunk that does not begin the sequence: a kernel that
    attends in two parts has to join them. Zero for kernels that know the mask (flash-attn, Transformer
    Engine).
    """

    alpha_us: float
    beta_us_per_gflop: float
    merge_us_per_mb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Core attention in one dtype."""

    forward: AttentionLine
    backward: AttentionLine


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """What runs on one rank.

    Attributes:
        gemm: Matrix products, by the dtype of their inputs.
        attention: Core attention, by dtype. ``fp8`` models attend in bf16.
        memory: Passes over memory: norms, residuals, activation functions, sums of gradients.
        permute: Moving rows into another order: permutation by expert and back.
    """

    gemm: Mapping[Dtype, Gemm]
    attention: Mapping[Dtype, Attention]
    memory: Transfer
    permute: Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead(Figure):
    """A fixed time, in each direction."""

    forward_us: float
    backward_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOverhead(Overhead):
    """What a stage of a block takes beyond the operations in it, timed alone.

    Attributes:
        forward_factor: By how much its operations take longer than alone, forward: in a block each finds
            other data in the caches than its own.
        backward_factor: Likewise backward.
    """

    forward_factor: float = field(default=1.0, metadata={"minimum": 1.0})
    backward_factor: float = field(default=1.0, metadata={"minimum": 1.0})


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What the host costs.

    Attributes:
        issue: Time the host needs to issue one stage; it runs ahead of the device. Zero where the host
            computes itself.
        stage: Added to every compute stage, on the device or on a host that computes: ``any`` for those
            that have no figure of their own. This is what one more chunk costs.
        block: Added once to a pipelined pass: entering the block, autograd around it.
        stock: Added once to a pass of Megatron's own layer.
    """

    issue: Overhead
    stage: Mapping[OverheadKind, StageOverhead]
    block: Overhead
    stock: Overhead


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap(Figure):
    """How much computation and communication slow each other while both run.

    Attributes:
        compute_slowdown: Factor on a computation while something is on the wire; 1 is not at all.
        communication_slowdown: Factor on the time that a collective is on the wire while something computes.
        latency_us: Added to a collective that begins while something is computed: where the host computes,
            the threads that start one and learn of its end wait for the processor.
    """

    compute_slowdown: float = field(metadata={"minimum": 1.0})
    communication_slowdown: float = field(metadata={"minimum": 1.0})
    latency_us: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster file.

    Attributes:
        description: What it is, in words.
        ranks_per_node: Ranks that reach each other by ``intra``.
        device_memory_gib: Memory of one rank, if it is to be held against what a plan needs.
        intra: Collectives among ranks of one node. ``stock_all_to_all`` is what Megatron's own layer
            calls, where that is another operation than AMPipe's exchange (gloo).
        inter: Collectives among ranks on different nodes.
        compute: Work of one rank.
        host: Overheads.
        overlap: Mutual slow-down.
        flags: Flags for launches on the cluster; a launch, or ``ampipe config``, checks them.
        path: The file it was read from.
        lines: Where its keys stand there.
    """

    description: str
    ranks_per_node: int
    device_memory_gib: float | None = None
    intra: Mapping[Operation, Transfer] | None = None
    inter: Mapping[Operation, Transfer] | None = None
    compute: Compute
    host: Host
    overlap: Overlap
    flags: LinedMapping | None = field(default=None, compare=False)
    path: str = field(default="(no file)", compare=False, metadata={"derived": True})
    lines: Mapping[str, int] = field(default_factory=dict, compare=False, metadata={"derived": True})

    def collective(self, operation: Operation, *, across_nodes: bool) -> Transfer:
        """The figure of a collective.

        Raises:
            BadInput: the file has none; names file and line.
        """
        group = "inter" if across_nodes else "intra"
        figures = (self.inter if across_nodes else self.intra) or {}
        if operation not in figures:
            raise self.missing(group, operation)
        return figures[operation]

    def gemm(self, dtype: Dtype) -> Gemm:
        """The figure of matrix products.

        Raises:
            BadInput: the file has none for this dtype.
        """
        if dtype not in self.compute.gemm:
            raise self.missing("compute.gemm", dtype)
        return self.compute.gemm[dtype]

    def attention(self, dtype: Dtype) -> Attention:
        """The figures of core attention.

        Raises:
            BadInput: the file has none for this dtype.
        """
        if dtype not in self.compute.attention:
            raise self.missing("compute.attention", dtype)
        return self.compute.attention[dtype]

    def stage_overhead(self, kind: OverheadKind) -> StageOverhead:
        """What a compute stage of this kind costs beside its work.

        Raises:
            BadInput: the file has a figure neither for this kind nor for any.
        """
        found = self.host.stage.get(kind, self.host.stage.get("any"))
        if found is None:
            raise self.missing("host.stage", kind)
        return found

    def missing(self, section: str, key: str) -> BadInput:
        """The error for a figure that this workload needs and the file does not have."""
        line = self.lines.get(section, 1)
        return BadInput(
            f"{self.path}:{line}:",
            f"{section}.{key}",
            rule="is missing, and this workload needs it",
            remedy="Add the figure, or measure the cluster with ampipe profile.",
        )


def read_cluster(path: Path) -> Cluster:
    """Read and check a cluster file.

    Raises:
        BadInput: naming the file, the line, the key and the nearest known one.
    """
    top = load(path, what="cluster", remedy="Look at configs/clusters/a800x8-20gbps.yaml for the form.")
    cluster, lines = read_record(path, Cluster, top)
    for group, figures in (("intra", cluster.intra), ("inter", cluster.inter)):
        for operation, figure in (figures or {}).items():
            _check_table(path, lines, f"{group}.{operation}", figure)
    return dataclasses.replace(cluster, path=shown(path), lines=lines)


def _check_table(path: Path, lines: Lines, where: str, figure: Transfer) -> None:
    sizes = [0.0, *(point.mb for point in figure.table or ())]
    for smaller, larger in itertools.pairwise(sizes):
        if larger <= smaller:
            key = f"{where}.table"
            rule = f"has {larger:g} MB after {smaller:g} MB, and its sizes must rise from above 0"
            refuse(path, lines[key], key, rule, "Put its points in order.")


def write_cluster(cluster: Cluster, path: Path, *, head: str) -> None:
    """Write a cluster file; it appears under its name only when it is whole.

    Args:
        cluster: What to write; :func:`read_cluster` reads an equal one.
        path: Of the file.
        head: A comment for the first line, such as the command that made it.
    """
    write_record(path, cluster, head=head)


def find_cluster(text: str) -> Path:
    """The file that ``--cluster`` means: one that exists, or the name of one in ``configs/clusters``.

    Raises:
        BadInput: neither.
    """
    return find_config(text, folders=("clusters",), flag="--cluster", what="cluster")
