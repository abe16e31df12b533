"""What ranks report to the command that started them: the form of each report. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict


class PassTimes(TypedDict):
    """The passes of one layer on one rank, in order; by field of :class:`.timed_passes.PassSample`."""

    wall_s: Sequence[float]
    backward_s: Sequence[float]
    wire_bytes: Sequence[dict[str, int] | None]


class VariantReport(PassTimes):
    """A variant in one rank.

    Attributes:
        stages: By direction and stage, microseconds of each pass, of the stage alone; None for Megatron's
            layer, as all other fields about stages.
        needs: By direction and stage, the stages that it waits for.
        issued_us: By direction and kind, the host's microseconds to issue a stage on a GPU.
        alone: The passes in which stages ran alone.
        apart_s: By direction, the seconds of each of these passes between stages.
        difference: The largest relative difference from Megatron's layer, over tensors and ranks.
        peak_bytes: The peak of the bytes that a pass allocates, with those that graphs hold.
        graph_bytes: Those that graphs hold between passes, on a GPU.
    """

    stages: dict[str, dict[str, list[float]]] | None
    needs: dict[str, dict[str, list[str]]] | None
    issued_us: dict[str, dict[str, float]] | None
    alone: PassTimes | None
    apart_s: dict[str, list[float]] | None
    difference: float
    peak_bytes: int
    graph_bytes: int


class CaseReport(TypedDict):
    """A case of ``ampipe bench`` in one rank; ``variants`` in the order of the job's, stock first."""

    kernel: str
    fused_gradients: bool
    variants: list[VariantReport]


class BlockTimes(TypedDict):
    """Median microseconds of a block's parts.

    Attributes:
        stock: Megatron's layer, by direction.
        stages: Each stage alone, by degree, direction and stage.
        around: The part of a pass outside its stages, by direction.
    """

    stock: dict[str, float]
    stages: dict[str, dict[str, dict[str, float]]]
    around: dict[str, float]


@dataclass(frozen=True, slots=True)
class Sample:
    """One size of one operation.

    Attributes:
        family: The operation: ``gemm``, ``intra.all_to_all``, ``attention.forward``.
        columns: How often each figure of the cluster file counts in its time, by name.
        us: Microseconds.
    """

    family: str
    columns: Mapping[str, float]
    us: float


class OperationsReport(TypedDict):
    """The measurements of ``ampipe profile`` in one rank.

    Attributes:
        samples: The times of operations.
        slowdowns: How much computation and an all-to-all slow each other, as in a cluster file.
        block: The times of a block's parts.
        issue_of: As :class:`VariantReport` has in ``issued_us``.
        kernel: The attention kernel.
        fused_gradients: Whether linear layers add to ``main_grad`` themselves.
        device_memory_gib: None on a CPU.
    """

    samples: list[Sample]
    slowdowns: dict[str, float]
    block: BlockTimes
    issue_of: dict[str, dict[str, float]]
    kernel: str
    fused_gradients: bool
    device_memory_gib: float | None
