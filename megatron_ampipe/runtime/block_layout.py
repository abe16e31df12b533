"""What the compiler of tapes knows of a block: its functions, its chunks, the rows of each value."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch.nn import Parameter

from megatron_ampipe.runtime.steps import Function
from megatron_ampipe.runtime.weight_products import WeightProducts
from megatron_ampipe.schedule import (
    BlockFeatures,
    Chunk,
    DataFlow,
    Layout,
    Source,
    Span,
    StageKind,
    Value,
    data_flow,
    is_whole,
)


class BlockFunctions(Protocol):
    """What the stages of a block compute: functions of the state of one of its halves (``BlockState``).

    A function of a kind that is computed takes ``(state, chunk, *values it takes)`` to the values it gives.
    The chunk is an index, or None for the whole sequence. A kind that takes keys and values also gets
    ``sums``, a :class:`~.key_value_sums.KeyValueSums` to which its backward may add their gradients; it then
    returns none. A kind that does not keep all that its backward needs, and the kind that restores it, get
    the same ``inner``, an :class:`~.inner_tensors.InnerTensors` that must run its products.

    A function of a kind that is started and waited for takes ``(state, chunks, tensors, direction)``, where
    ``tensors`` are, for each chunk, what the stage takes; in the backward pass the gradients of what it gave.
    It returns a transfer whose outputs are, chunk by chunk, what the stage gives; in the backward pass the
    gradients of what it took.
    """

    recomputed: Collection[StageKind]
    """Kinds of stages of which only the inputs are kept, and that run again right before their backward."""
    stage_parameters: Mapping[StageKind, Sequence[Parameter]]
    """The trainable parameters of each kind; may lack kinds without."""
    all_parameters: Sequence[Parameter]
    """Of the block, each once."""

    def run(self, kind: StageKind) -> tuple[int, Function]:
        """The half of a kind, and its function."""

    def differentiate(self, kind: StageKind) -> tuple[int, Function]:
        """The half and the backward of a kind that has its own.

        ``(state, chunk, gradients, recalled, sums)``: of what the stage gave, the keys and values that it
        took, and what their gradients are added to. Returns the gradients of what it took; None for keys and
        values.
        """

    def weights_apart(self, kind: StageKind, products: WeightProducts) -> AbstractContextManager[None]:
        """Within it, the function of a kind leaves the gradients of its weights to ``products``."""


class BlockLayout:
    """One block: which chunks it has, and which kinds of stages are of the whole sequence."""

    def __init__(
        self,
        layer: int,
        features: BlockFeatures,
        chunks: Sequence[Chunk],
        functions: BlockFunctions,
        *,
        whole_attention: bool,
    ) -> None:
        self.layer, self.chunks, self.functions = layer, chunks, functions
        self.flow = data_flow(features)
        _check_transfers(self.flow)
        self._flows = [data_flow(features.of_chunk(chunk)) for chunk in range(max(1, len(features.restored)))]
        self.recomputed = features.recomputed
        self.restores = not features.recomputed and any(kind.restores is not None for kind in self.flow.kinds)
        self._whole = {kind for kind in self.flow.kinds if is_whole(kind, whole_attention=whole_attention)}
        self._joined = Chunk.joined(chunks)
        numbers = {parameter: number for number, parameter in enumerate(functions.all_parameters)}
        self._parameters = {
            kind: tuple(numbers[parameter] for parameter in parameters)
            for kind, parameters in functions.stage_parameters.items()
        }

    def parameters_of(self, kind: StageKind) -> tuple[int, ...]:
        """Numbers of the parameters that a kind uses."""
        return self._parameters.get(kind, ())

    def flow_of(self, chunk: int | None) -> DataFlow:
        """The data flow of a chunk, or of the block: chunks differ in what is restored."""
        return self.flow if chunk is None else self._flows[chunk * len(self._flows) // len(self.chunks)]

    def spans(self, layout: Layout, chunk: int | None) -> Sequence[Span]:
        """The rows of a value that belong to a chunk."""
        found = self._joined if chunk is None else self.chunks[chunk]
        return found.hidden if layout is Layout.HIDDEN else found.queries

    def num_rows(self, layout: Layout) -> int:
        """How many rows a value of the whole sequence has."""
        return sum(span.length for span in self.spans(layout, None))

    def num_keys(self, chunk: int | None) -> int:
        """How many rows of keys and values the queries of a chunk see."""
        return (self._joined if chunk is None else self.chunks[chunk]).num_keys

    def part(self, layout: Layout, span: Span) -> slice | None:
        """A span as a slice of rows; None if it is all rows."""
        rows = self.num_keys(None) if layout is Layout.KEYS else self.num_rows(layout)
        return None if span.length == rows else slice(span.local_start, span.local_end)

    def keys_taken(self, kind: StageKind) -> list[str]:
        """The names of the keys and values that a kind takes."""
        return [value.name for value, _ in self.flow.taken[kind] if value.layout is Layout.KEYS]

    def index_of(self, giver: StageKind, value: Value) -> int:
        """Whether a value is the keys (0) or the values (1) that a kind gives."""
        given = self.flow.given[giver]
        names = [one.name for one, _ in given if one.layout in (Layout.KEYS, Layout.BLOCK)]
        return names.index(value.name)

    def is_kept_whole(self, source: Source) -> bool:
        """Whether the value is one tensor for the whole sequence, rather than one for each chunk."""
        if source.giver is not None:
            return source.giver in self._whole
        return any(kind in self._whole for kind in self.flow.takers[source])

    def num_summed(self, source: Source) -> int:
        """How many compute stages give a gradient of a value, or of a chunk of it."""
        per_stage = len(self.chunks) if self.is_kept_whole(source) else 1
        return sum(
            1 if kind in self._whole else per_stage
            for kind in self.gradient_givers(source)
            if kind.lane.computes
        )

    def num_adding_rows(self, source: Source) -> int:
        """How many compute stages of a chunk give a gradient of its rows of a value that is kept whole."""
        givers = self.gradient_givers(source)
        return sum(kind.lane.computes and kind not in self._whole for kind in givers)

    def gradient_givers(self, source: Source) -> list[StageKind]:
        """The kinds that give a gradient of a value."""
        return [kind for kind in self.flow.takers.get(source, ()) if kind.is_differentiated]


def _check_transfers(flow: DataFlow) -> None:
    """What a transfer brings is kept as it is until it has arrived: it cannot be written into a buffer."""
    for kind in flow.kinds:
        if not kind.lane.computes:
            values = (*kind.takes, *kind.gives)
            assert all(value.layout is not Layout.KEYS for value in values), f"{kind} transfers keys"
            assert kind is not flow.output.giver, f"{kind} is a transfer and gives what the block returns"
