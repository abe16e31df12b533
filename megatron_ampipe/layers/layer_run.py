"""Which layers share a schedule: consecutive ones of a ``TransformerBlock`` of Megatron, cut into stacks.

Megatron builds the layers of a block one after the other and calls them one after the other. While they are
built, each adds itself to a :class:`LayerRun`; when they are called, the first layer of a stack runs all of
it.
Used by :mod:`.layer`; :mod:`.spec` says which layers are consecutive.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_ampipe.layers.context import AMPipeContext
from megatron_ampipe.layers.pipelined_block import BlockStack, PipelinedBlock
from megatron_ampipe.schedule.features import boundary


class LayerRun:
    """Consecutive layers that can share schedules.

    Args:
        context: Shared settings and machinery; its pipeline says how many layers share a schedule.
    """

    def __init__(self, context: AMPipeContext) -> None:
        self._context = context
        self._blocks: list[PipelinedBlock] = []
        self._stacks: dict[tuple[int, int], BlockStack] = {}

    def add(self, block: PipelinedBlock) -> int:
        """Add the next layer; returns its place."""
        self._blocks.append(block)
        return len(self._blocks) - 1

    def stack_from(self, place: int) -> BlockStack | None:
        """The stack that begins with a layer; None for a layer that an earlier one runs."""
        size = self._size()
        first = place - place % size
        if all(block.modules.dense for block in self._blocks[first : first + size]):
            first, size = place, 1
        if first < place:
            return None
        key = (place, size)
        if key not in self._stacks:
            self._stacks[key] = BlockStack(self._blocks[place : place + size], self._context)
        return self._stacks[key]

    def _size(self) -> int:
        """How many layers share a schedule."""
        config, pipeline = self._blocks[0].modules.config, self._context.pipeline
        if boundary(config, whole_attention=pipeline.whole_attention) is not None:
            return 1
        if config.tensor_model_parallel_size > 1 and any(
            block.modules.has_router_hook for block in self._blocks
        ):
            # As for the records of the routing that only the arguments of a launch know.
            return 1
        return pipeline.stack_of(len(self._blocks))


@dataclass(slots=True)
class RunBuilder:
    """Collects the layers of a run while Megatron builds them; one for each run of a specification.

    Attributes:
        context: Shared settings and machinery.
        latest: Of the model that is built at present: a specification can be built several times.
    """

    context: AMPipeContext
    latest: LayerRun | None = field(default=None, repr=False)

    def __deepcopy__(self, memo: dict[int, object]) -> RunBuilder:
        """Return the same object: Megatron deep-copies layer specifications."""
        return self


@dataclass(frozen=True, slots=True)
class PlaceInRun:
    """Where in a run the layer of a specification is.

    Attributes:
        builder: Of the run.
        is_first: Whether the run begins with this layer.
    """

    builder: RunBuilder
    is_first: bool

    def run(self) -> LayerRun:
        """The run to which the layer that is built now belongs."""
        if self.is_first or self.builder.latest is None:
            self.builder.latest = LayerRun(self.builder.context)
        return self.builder.latest
