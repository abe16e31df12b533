"""The times of a cluster's operations: the format of the files in ``configs/clusters``, read and written.

Each figure is a linear function of the size of one operation: ``alpha_us`` is the fixed time, and a slope is
the time per size. All times are in microseconds; MB is 10**6 bytes, GFLOP is 10**9 operations, where a
multiplication and an addition are two.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

from megatron_ampipe.files.inputs import LinedMapping, find_config, load, refuse, shown
from megatron_ampipe.files.records import read_record, write_record
from megatron_ampipe.schedule import Direction

Basis = Literal["measured", "derived", "datasheet"]
"""``measured``: timed by ``ampipe profile`` or by the named source. ``derived``: computed or assumed, see the
source text. ``datasheet``: a vendor's figure."""
Dtype = Literal["fp32", "bf16", "fp16", "fp8"]
FlexBackend = Literal["deepep", "hybridep"]
"""Backends of the flex dispatcher: a token is sent once to each node, and there once to each rank."""
Operation = Literal[
    "all_to_all",
    "direct_all_to_all",
    "stock_all_to_all",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    FlexBackend,
]
IssuedKind = Literal[
    "qkv", "attention", "route", "losses", "shared", "counts", "dispatch", "expert", "combine", "merge"
]
OverheadKind = Literal["any", "qkv", "attention", "route", "losses", "shared", "expert", "merge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """The common fields of all figures."""

    basis: Basis = field(metadata={"last": True})
    source: str = field(metadata={"last": True})
    """Text: a paper's section, a data sheet, or a command and a machine."""
    r_squared: float | None = field(default=None, metadata={"last": True})
    """Coefficient of determination of the line; only for fitted figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The measured time of one size."""

    mb: float
    us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCost(Figure):
    """A collective, or a pass over memory: ``alpha_us + size * beta_us_per_mb``.

    The size of a collective is the bytes that one rank sends to others: for an all-to-all the rows for other
    ranks, for an all-gather or a reduce-scatter its own rows times the number of other ranks. For memory it
    is bytes read plus bytes written.

    ``table`` has sizes in ascending order with their times, for an operation whose time is not linear in the
    size. Times are interpolated between two sizes, and between size 0 (``alpha_us``) and the first one; above
    the last size they grow by ``beta_us_per_mb``.
    """

    alpha_us: float
    beta_us_per_mb: float
    table: tuple[Point, ...] | None = None

    def time_us(self, size_bytes: float) -> float:
        """Time for this number of bytes."""
        mb = size_bytes * 1e-6
        below = Point(mb=0.0, us=self.alpha_us)
        for point in self.table or ():
            if mb <= point.mb:
                return below.us + (point.us - below.us) * (mb - below.mb) / (point.mb - below.mb)
            below = point
        return below.us + (mb - below.mb) * self.beta_us_per_mb

    @property
    def least(self) -> TransferCost:
        """The highest line from ``alpha_us`` that is nowhere above these times."""
        slopes = [(point.us - self.alpha_us) / point.mb for point in self.table or ()]
        return dataclasses.replace(self, beta_us_per_mb=min([self.beta_us_per_mb, *slopes]), table=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm(Figure):
    """A matrix product of ``rows x k`` by ``k x n``.

    ``alpha_us + 2 * rows * k * n * beta + k * n * weights``. The last term does not depend on the rows, so a
    product with few rows is less efficient; it is zero if it was not measured.
    """

    alpha_us: float
    beta_us_per_gflop: float
    weights_us_per_million: float

    def time_us(self, rows: float, k: float, n: float, *, calls: int = 1, matrices: int = 1) -> float:
        """Time of ``calls`` launches that multiply ``rows`` rows in total, each by one of ``matrices``."""
        flops, weights = 2e-9 * rows * k * n, 1e-6 * k * n * matrices
        return calls * self.alpha_us + flops * self.beta_us_per_gflop + weights * self.weights_us_per_million


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLine(Figure):
    """Core attention of the query rows of a chunk in one direction.

    ``flops`` counts unmasked query-key pairs: ``4 * pairs * heads * head size`` forward, ``10 * ...``
    backward. ``merged`` is the size of the output rows of a chunk that is not the first: a kernel that
    computes its attention in two parts has to merge their outputs. ``merge_us_per_mb`` is zero for kernels
    with a bottom-right causal mask (flash-attn, Transformer Engine).
    """

    alpha_us: float
    beta_us_per_gflop: float
    merge_us_per_mb: float

    def time_us(self, gflops: float, merge_mb: float) -> float:
        """Time for ``gflops`` operations and ``merge_mb`` of output to merge."""
        return self.alpha_us + gflops * self.beta_us_per_gflop + merge_mb * self.merge_us_per_mb


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Core attention in one dtype."""

    forward: AttentionLine
    backward: AttentionLine


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """The computation on one rank; matrix products and core attention by the dtype of their inputs.

    Attributes:
        memory: Passes over memory: norms, residuals, activation functions, sums of gradients.
        permute: Permutation of rows into the order of the experts, and the inverse.
        copy: Copies to host memory and back, by the bytes copied; on a GPU to pinned memory. None if not
            measured; then strategies that copy (``--ampipe-memory``) cannot be predicted.
    """

    gemm: Mapping[Dtype, Gemm]
    attention: Mapping[Dtype, Attention]
    memory: TransferCost
    permute: TransferCost
    copy: TransferCost | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead(Figure):
    """A fixed time for each direction."""

    forward_us: float
    backward_us: float

    def of(self, direction: Direction) -> float:
        """The time in one direction."""
        return self.forward_us if direction is Direction.FORWARD else self.backward_us


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOverhead(Overhead):
    """The time of a stage in addition to its operations, which were timed in isolation.

    A factor is the time of its operations in a block, where caches hold other data, divided by their time in
    isolation.
    """

    forward_factor: float = field(default=1.0, metadata={"minimum": 1.0})
    backward_factor: float = field(default=1.0, metadata={"minimum": 1.0})


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Overheads of the host.

    Attributes:
        issue: Time for which the host is busy issuing one stage to the device. Zero for training on the CPU.
        issue_of: The same by kind of stage, with one local expert; ``issue`` is for all other kinds.
        graph: Time for which the host is busy in a layer's pass that a CUDA graph holds, in addition to the
            launch: hooks of parameters, and autograd. If None, a share of the time to issue Megatron's layer.
        stage: Added to every compute stage, on a GPU or a CPU: the cost of one more chunk. ``any`` applies to
            kinds without an entry.
        block: Added once to a pipelined pass: entering the block, and its autograd function.
        stock: Added once to a pass of Megatron's layer.
    """

    issue: Overhead
    stage: Mapping[OverheadKind, StageOverhead]
    block: Overhead
    stock: Overhead
    issue_of: Mapping[IssuedKind, Overhead] | None = None
    graph: Overhead | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap(Figure):
    """How much concurrent computation and communication slow each other down; factor 1 means not at all.

    ``latency_us`` is added to a collective that begins during a computation: in training on the CPU, the
    threads that start a collective and wait for its end have to wait for a core.
    """

    compute_slowdown: float = field(metadata={"minimum": 1.0})
    communication_slowdown: float = field(metadata={"minimum": 1.0})
    latency_us: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The contents of a cluster file.

    Attributes:
        ranks_per_node: Ranks on one node; ``intra`` applies between them.
        nvlink: Whether all transfers inside a node are over NVLink, not held to a lower rate.
        device_memory_gib: Memory of one rank; if given, it is compared with the memory that a plan needs.
        intra: Collectives between ranks of one node. ``stock_all_to_all`` is the operation of Megatron's
            layer if it differs from AMPipe's (gloo).
        inter: Collectives between ranks on different nodes. ``all_to_all`` is between ranks with the same
            index in all nodes, so each uses the adapters of one GPU; all others are between all ranks of all
            nodes. The size of ``direct_all_to_all`` and ``stock_all_to_all`` is the bytes that leave the
            node. Without ``direct_all_to_all``, that exchange takes as long as the slower class of links. An
            all-gather or a reduce-scatter uses all adapters of a node; in a group with only some ranks of
            each node, the adapters of these ranks, as fast as in ``all_to_all``.
        flags: Flags for runs on this cluster; checked at launch or by ``ampipe config``.
        path: The file that was read.
        lines: The line of each key in that file.
    """

    description: str
    ranks_per_node: int
    nvlink: bool = False
    device_memory_gib: float | None = None
    intra: Mapping[Operation, TransferCost] | None = None
    inter: Mapping[Operation, TransferCost] | None = None
    compute: Compute
    host: Host
    overlap: Overlap
    flags: LinedMapping | None = field(default=None, compare=False)
    path: str = field(default="(no file)", compare=False, metadata={"derived": True})
    lines: Mapping[str, int] = field(default_factory=dict, compare=False, metadata={"derived": True})

    @property
    def least(self) -> Cluster:
        """The same cluster with times that are linear in the size, and never above these."""

        def least(figures: Mapping[Operation, TransferCost] | None) -> dict[Operation, TransferCost] | None:
            return None if figures is None else {name: figure.least for name, figure in figures.items()}

        compute = dataclasses.replace(
            self.compute,
            memory=self.compute.memory.least,
            permute=self.compute.permute.least,
            copy=None if self.compute.copy is None else self.compute.copy.least,
        )
        return dataclasses.replace(self, intra=least(self.intra), inter=least(self.inter), compute=compute)

    @property
    def trains_on_host(self) -> bool:
        """Whether training runs on the CPU, without a device."""
        return not self.host.issue.forward_us

    @property
    def basis(self) -> str:
        """The basis of the figures of products and collectives, in words."""
        known: list[Mapping[Any, Figure]] = [
            self.compute.gemm,
            self.intra or {},
            self.inter or {},
        ]
        flex = get_args(FlexBackend)
        bases = [figure.basis for figures in known for key, figure in figures.items() if key not in flex]
        measured = bases.count("measured")
        if measured == len(bases):
            return "all measured"
        return (
            f"{measured} of {len(bases)} measured, the rest from data sheets or assumed; no GPU has run this"
        )

    def basis_of(self, operation: Operation) -> str:
        """The basis of the figures of one operation, in a word."""
        figures = (figures.get(operation) for figures in (self.intra or {}, self.inter or {}))
        measured = {figure.basis == "measured" for figure in figures if figure is not None}
        return "partly measured" if len(measured) > 1 else "measured" if True in measured else "estimated"

    def collective(self, operation: Operation, *, across_nodes: bool) -> TransferCost:
        """The figure of a collective; raises BadInput if the file has none."""
        section, figures = ("inter", self.inter) if across_nodes else ("intra", self.intra)
        return self.figure(section, figures, operation)

    def stage_overhead(self, kind: str) -> StageOverhead:
        """The overhead of a compute stage of this kind, or of ``any``."""
        figures: Mapping[str, StageOverhead] = dict(self.host.stage.items())
        return self.figure("host.stage", figures, kind if kind in figures else "any")

    def figure[Key: str, Value](
        self, section: str, figures: Mapping[Key, Value | None] | None, key: Key
    ) -> Value:
        """A figure of a section; raises BadInput if it is missing."""
        value = (figures or {}).get(key)
        if value is None:
            rule, remedy = "is missing, and this block needs it", "Add it, or measure with ampipe profile."
            all_to_all = (
                "Use --moe-token-dispatcher-type alltoall (ampipe plan --set "
                "moe-token-dispatcher-type=alltoall)"
            )
            if key in get_args(FlexBackend):
                added = "or add it, as measured by DeepEP's own tests; see configs/clusters/dgx-h100.yaml."
                remedy = f"{all_to_all}, {added}"
            elif key == "ncclep":
                # Cluster files have no figures of it.
                remedy = f"{all_to_all}."
            self.refuse(f"{section}.{key}", rule, remedy)
        return value

    def refuse(self, key: str, rule: str, remedy: str) -> NoReturn:
        """Raise BadInput for a key of the file, or a missing one."""
        line = self.lines.get(key, self.lines.get(key.rpartition(".")[0], 1))
        refuse(self.path, line, key, rule, remedy)


def read_cluster(path: Path) -> Cluster:
    """Read and check a cluster file.

    Raises:
        BadInput: the file is wrong; the message names file, line, key, and the nearest known key.
    """
    top = load(path, what="cluster", remedy="Look at configs/clusters/a800x8-20gbps.yaml for the format.")
    record, lines = read_record(path, Cluster, top)
    cluster = dataclasses.replace(record, path=shown(path), lines=lines)
    for section, figures in (("intra", cluster.intra), ("inter", cluster.inter)):
        for operation, figure in (figures or {}).items():
            sizes = [0.0, *(point.mb for point in figure.table or ())]
            if any(larger <= smaller for smaller, larger in itertools.pairwise(sizes)):
                key = f"{section}.{operation}.table"
                cluster.refuse(key, "sizes must be above 0 MB and ascending", "Sort its points by size.")
    return cluster


def write_cluster(cluster: Cluster, path: Path, *, head: str) -> None:
    """Write a file that :func:`read_cluster` reads; ``head`` is a comment for its first line."""
    write_record(path, cluster, head=head)


def find_cluster(text: str, *, flag: str = "--cluster") -> Path:
    """The file that a flag names: a path, or the name of a file in ``configs/clusters``."""
    return find_config(text, folders=("clusters",), flag=flag, what="cluster")
