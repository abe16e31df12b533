"""What a block consists of for the runtime: what its stages compute, and in which order they run.

The layer implements :class:`BlockStages`; :class:`CompiledSchedule` is a schedule made ready for an executor.
Both are read by :mod:`.block_call`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.nn import Parameter

from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.runtime.executors import Executor
from megatron_ampipe.runtime.key_value_sums import KeyValueSums
from megatron_ampipe.runtime.weight_products import WeightProducts
from megatron_ampipe.schedule import (
    BlockFeatures,
    Chunk,
    DataFlow,
    Direction,
    Layout,
    Schedule,
    Stage,
    StageKind,
    data_flow,
    is_whole,
    issue_order,
    needs_of,
)
from megatron_ampipe.schedule.graph import is_of_feed_forward

ComputeFunction = Callable[..., tuple[Tensor, ...]]
"""Of a kind that is computed: ``(chunk, *values it takes)`` to the values it gives.

The chunk is an index, or None for the whole sequence. A kind that takes keys and values also gets ``sums``, a
:class:`~.key_value_sums.KeyValueSums` to which its backward may add their gradients; it then returns none. A
kind that does not keep all that its backward needs, and the kind that restores it, get the same ``inner``, an
:class:`~.inner_tensors.InnerTensors` that must run its products.
"""


class BackwardFunction(Protocol):
    """The backward of a kind with ``own_backward``."""

    def __call__(
        self,
        chunk: int | None,
        gradients: Sequence[Tensor | None],
        recalled: Sequence[Tensor],
        sums: KeyValueSums,
    ) -> Sequence[Tensor | None]:
        """Differentiate one stage.

        Args:
            chunk: Index; None for the whole sequence.
            gradients: Of what the stage gave.
            recalled: Keys and values that it took.
            sums: Where the gradients of these are added.

        Returns:
            The gradients of what it took; None for keys and values.
        """
        ...


class CommunicationFunction(Protocol):
    """Of a kind that is started and waited for."""

    def __call__(
        self, chunks: Sequence[Any], tensors: Sequence[Sequence[Tensor]], direction: Direction
    ) -> Transfer:
        """Start the transfer of several chunks at once.

        Args:
            chunks: Indices; ``[None]`` for a kind of the whole sequence.
            tensors: For each chunk what the stage takes; in the backward pass the gradients of what it gave.
            direction: Of which pass.

        Returns:
            Its outputs are, chunk by chunk, what the stage gives; in the backward pass the gradients of what
            it took.
        """
        ...


class BlockParameters(NamedTuple):
    """The trainable parameters of a block, each once.

    Attributes:
        feed_forward: Those that only kinds of ``kinds.FEED_FORWARD`` use.
        others: All others.
    """

    feed_forward: tuple[Parameter, ...]
    others: tuple[Parameter, ...]


class BlockStages(Protocol):
    """What one pass through a layer computes. The layer makes one for every forward call."""

    chunks: Sequence[Chunk]
    recomputed: Collection[StageKind]
    """Kinds of stages of which only the inputs are kept, and that run again right before their backward."""
    parameters: Mapping[StageKind, Sequence[Parameter]]
    """The trainable parameters of each kind that has any."""

    def compute(self, kind: StageKind) -> ComputeFunction:
        """The function of a kind that is computed."""

    def differentiate(self, kind: StageKind) -> BackwardFunction:
        """The backward of a kind that has its own."""

    def communicate(self, kind: StageKind) -> CommunicationFunction:
        """The function of a kind that is started and waited for."""

    def weights_apart(self, kind: StageKind, products: WeightProducts) -> AbstractContextManager[None]:
        """Within it, the function of a kind leaves the gradients of its weights to ``products``."""

    def again(self) -> BlockStages:
        """The same stages for a second run of the forward pass, which computes the same as the first.

        Called when the first has ended. Knows what kinds give that run forward only.
        """


@dataclass(frozen=True, slots=True)
class AddedStage:
    """A stage beyond those of the table, which runs in every block.

    Attributes:
        kind: Its row; says which row it follows.
        compute: Its function, if it is computed.
        communicate: Its function, if it is started and waited for.
        parameters: The trainable parameters that it uses; must belong to the layers of the block.
    """

    kind: StageKind
    compute: ComputeFunction | None = None
    communicate: CommunicationFunction | None = None
    parameters: Sequence[Parameter] = ()


@dataclass(frozen=True, slots=True)
class CompiledBlock:
    """What the runtime reads of one of the blocks of a schedule.

    Attributes:
        flow: Which stage takes what from which.
        flows: The same of each chunk of the backward pass, or one of all: they differ in what is restored.
        whole: Kinds of stages that are of the whole sequence.
        recomputed: Its forward stages run again in the backward pass.
        restores: Some of its stages restore in the backward pass what others have not kept.
        apart: Kinds of stages whose weight gradients are separate stages.
    """

    flow: DataFlow
    flows: tuple[DataFlow, ...]
    whole: frozenset[StageKind]
    recomputed: bool
    restores: bool
    apart: frozenset[StageKind]


@dataclass(frozen=True, slots=True)
class CompiledSchedule:
    """A schedule made ready for one executor: what can be derived once, for both directions.

    Attributes:
        blocks: The blocks that share it, in order.
        needs: What each stage waits for.
        order: Lanes and stages in issue order.
        parts: Each stage as the same stage of each of its chunks: several where the other direction has the
            larger degree.
        ends: Stages after which a block has no other stage left; a block that has none ends with the pass.
        halves: Stages of the backward pass after which the gradients of the feed-forward half of a block are
            complete.
    """

    blocks: tuple[CompiledBlock, ...]
    needs: dict[Direction, dict[Stage, tuple[Stage, ...]]]
    order: dict[Direction, tuple[tuple[str, Stage], ...]]
    parts: dict[Direction, dict[Stage, tuple[Stage, ...]]]
    ends: dict[Direction, frozenset[Stage]]
    halves: frozenset[Stage]

    @classmethod
    def of(
        cls, schedule: Schedule, *, layers: Sequence[BlockFeatures], executor: Executor
    ) -> CompiledSchedule:
        """Derive both directions from a schedule of these blocks that was checked."""
        needs = {direction: needs_of(schedule, layers, direction) for direction in Direction}
        order = {
            direction: issue_order(
                schedule.program(direction), needs[direction], host_waits=executor.host_waits
            )
            for direction in Direction
        }
        parts = {
            direction: {stage: schedule.chunks_of(stage, direction) for stage in needs[direction]}
            for direction in Direction
        }
        apart = frozenset(
            kind.weights_of for kind in schedule.backward.weights if kind.weights_of is not None
        )
        blocks = []
        for features in layers:
            flow = data_flow(features)
            _check_transfers(flow)
            whole = (kind for kind in flow.kinds if is_whole(kind, whole_attention=schedule.whole_attention))
            flows = tuple(
                data_flow(features.of_chunk(chunk)) for chunk in range(max(1, len(features.restored)))
            )
            restores = any(kind.restores is not None for kind in flow.kinds)
            blocks.append(CompiledBlock(flow, flows, frozenset(whole), features.recomputed, restores, apart))
        ends = {direction: _ends(order[direction], needs[direction]) for direction in Direction}
        last = {stage.layer: stage for _, stage in order[Direction.BACKWARD] if is_of_feed_forward(stage)}
        return cls(tuple(blocks), needs, order, parts, ends, frozenset(last.values()))


def _ends(order: Sequence[tuple[str, Stage]], needs: Mapping[Stage, Sequence[Stage]]) -> frozenset[Stage]:
    """For each block its last computed stage, if all of its transfers have ended by then."""
    left = Counter(stage.layer for _, stage in order if not stage.kind.of_parameters)
    ended: set[Stage] = set()
    found = []
    for _, stage in order:
        if not stage.kind.lane.computes:
            continue
        pending = [stage]
        while pending:
            one = pending.pop()
            if one not in ended and not one.kind.of_parameters:
                ended.add(one)
                left[one.layer] -= 1
                pending += needs[one]
        if not left[stage.layer]:
            found.append(stage)
    return frozenset(found)


def _check_transfers(flow: DataFlow) -> None:
    """What a transfer brings is kept as it is until it has arrived: it cannot be written into a buffer."""
    for kind in flow.kinds:
        if not kind.lane.computes:
            values = (*kind.takes, *kind.gives)
            assert all(value.layout is not Layout.KEYS for value in values), f"{kind} transfers keys"
            assert kind is not flow.output.giver, f"{kind} is a transfer and gives what the block returns"
