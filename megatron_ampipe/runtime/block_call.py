"""One pass of one micro-batch through a block: what runs when the schedule says so, forward and backward.

:class:`BlockCall` holds everything of one forward pass and its backward, so that several micro-batches
can be in flight in one layer. Called by :mod:`.autograd_block`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_ampipe.runtime.block_stages import BlockStages, CompiledSchedule
from megatron_ampipe.runtime.collectives import Transfer, exchange_chunks, gather_chunks
from megatron_ampipe.runtime.crossing import Crossing
from megatron_ampipe.runtime.executors import Executor
from megatron_ampipe.runtime.key_value_sums import KeyValueSums
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.rows import put_rows, put_sum, take_rows
from megatron_ampipe.runtime.segment import GradientSums, Segment
from megatron_ampipe.schedule import Chunk, Direction, Stage, StageKind

# S sequence rows, B batch, D hidden size.

Handlers = dict[StageKind, Callable[[Stage], Transfer | None]]
"""What does the work of a stage, by its kind; collectives are only started."""


class BlockCall:
    """One forward pass through a block and its backward.

    Tensors that pass between stages are kept by name and chunk, in forward ``_values`` and in backward
    ``_gradients``, and leave as soon as their last reader has run.
    """

    def __init__(
        self,
        stages: BlockStages,
        plan: CompiledSchedule,
        executor: Executor,
        recorder: Recorder,
        *,
        layer: int,
        keep_graph: bool,
    ) -> None:
        self._stages, self._plan, self._executor, self._recorder = stages, plan, executor, recorder
        self._layer, self._keep_graph = layer, keep_graph
        self._whole = Chunk.joined(stages.chunks)
        self._segments: dict[Stage, Segment] = {}
        self._values: dict[tuple[str, int | None], Tensor] = {}
        self._gradients: dict[tuple[str, int | None], Tensor | None] = {}
        self._crossing = Crossing() if executor.crosses_streams else None
        self._travelled_inputs: dict[Stage, tuple[StorageWeakRef, ...]] = {}
        self._sums = GradientSums()

    # Forward

    def forward(self, hidden: Tensor) -> Tensor:
        """Run the forward program on ``hidden`` ``[S, B, D]``."""
        self._hidden = hidden.detach()
        self._key: Tensor | None = None
        self._key_value_sums: KeyValueSums | None = None
        self._output: Tensor | None = None
        self._execute(
            Direction.FORWARD,
            {
                StageKind.QKV: self._qkv,
                StageKind.ATTENTION: self._attention,
                StageKind.ROUTE: self._route,
                StageKind.LOSSES: self._losses,
                StageKind.SHARED: self._shared,
                StageKind.COUNTS: self._counts,
                StageKind.DISPATCH: self._dispatch,
                StageKind.EXPERT: self._expert,
                StageKind.COMBINE: self._combine,
                StageKind.MERGE: self._merge,
            },
        )
        output = self._output
        assert output is not None
        del self._hidden, self._output
        self._values.clear()
        return output

    def _qkv(self, stage: Stage) -> None:
        chunk = self._chunk(stage)
        hidden = take_rows(self._hidden, chunk.hidden)
        query, key, value = self._run(stage, lambda x: self._stages.qkv(chunk, x), hidden)
        self._values["query", stage.chunk] = query
        if stage.chunk is None:
            self._key, self._value = key, value
            return
        if self._key is None:
            length = self._whole.num_keys
            self._key, self._value = (part.new_empty((length, *part.shape[1:])) for part in (key, value))
        put_rows(self._key, chunk.queries, key)
        put_rows(self._value, chunk.queries, value)

    def _attention(self, stage: Stage) -> None:
        chunk = self._chunk(stage)
        whole_query = self._values.get(("query", None))
        if whole_query is None:
            query = self._values.pop(("query", stage.chunk))
        else:
            query = take_rows(whole_query, chunk.queries)
        if self._key_value_sums is None and self._keep_graph:
            self._key_value_sums = KeyValueSums(self._key, self._value)
        residual, normed = self._run(
            stage,
            lambda *inputs: self._stages.attention(chunk, *inputs, sums=self._key_value_sums),
            query,
            self._key[: chunk.num_keys],
            self._value[: chunk.num_keys],
            take_rows(self._hidden, chunk.hidden),
        )
        if stage.chunk is not None:
            self._values["residual", stage.chunk] = residual
            self._values["normed", stage.chunk] = normed
            return
        for index, part in enumerate(self._stages.chunks):
            self._values["residual", index] = take_rows(residual, part.hidden)
            self._values["normed", index] = take_rows(normed, part.hidden)

    def _route(self, stage: Stage) -> None:
        index = self._index(stage)
        normed = self._values["normed", index]
        tokens, probs, logits = self._run(stage, lambda x: self._stages.route(index, x), normed)
        self._values["tokens", index] = tokens
        self._values["probs", index] = probs
        if self._plan.features.losses:
            self._values["logits", index] = logits
        if not self._plan.features.shared:
            del self._values["normed", index]

    def _losses(self, stage: Stage) -> None:
        logits = [self._values.pop(("logits", index)) for index in range(len(self._stages.chunks))]
        self._run(stage, self._stages.losses, *logits)

    def _shared(self, stage: Stage) -> None:
        index = self._index(stage)
        (output,) = self._run(stage, self._stages.shared, self._values["normed", index])
        self._values["shared", index] = output

    def _counts(self, stage: Stage) -> Transfer:
        indices = self._indices(stage, Direction.FORWARD)
        counts = [self._stages.counts(index) for index in indices]
        gathered = gather_chunks(counts, group=self._stages.counts_group)
        for index, of_ranks in zip(indices, gathered.outputs, strict=True):
            self._stages.set_counts(index, of_ranks)
        self._note_travel(*counts, *gathered.outputs)
        return gathered

    def _dispatch(self, stage: Stage) -> Transfer:
        indices = self._indices(stage, Direction.FORWARD)
        return self._travel(indices, self._values, ("tokens", "probs"), ("received", "received_probs"))

    def _expert(self, stage: Stage) -> None:
        index = self._index(stage)
        (output,) = self._run(
            stage,
            lambda *inputs: self._stages.expert(index, *inputs),
            self._values.pop(("received", index)),
            self._values.pop(("received_probs", index)),
        )
        self._values["expert", index] = output

    def _combine(self, stage: Stage) -> Transfer:
        indices = self._indices(stage, Direction.FORWARD)
        return self._travel(indices, self._values, ("expert",), ("combined",), combine=True)

    def _merge(self, stage: Stage) -> None:
        index = self._index(stage)
        inputs = [self._values.pop(("combined", index)), self._values.pop(("residual", index))]
        if self._plan.features.shared:
            inputs.append(self._values.pop(("shared", index)))
        (rows,) = self._run(stage, lambda *tensors: self._stages.merge(index, *tensors), *inputs)
        if self._output is None:
            self._output = rows.new_empty(self._hidden.shape)
        put_rows(self._output, self._stages.chunks[index].hidden, rows)

    def _run(
        self, stage: Stage, function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        travelled = self._crossing.use(inputs) if self._crossing is not None else ()
        segment = Segment(
            function,
            *inputs,
            keep_graph=self._keep_graph,
            recompute=stage.kind in self._stages.recomputed,
        )
        values, segment.values = segment.values, ()
        if self._keep_graph:
            self._segments[stage] = segment
            self._travelled_inputs[stage] = travelled
        return values

    # Backward

    def backward(self, gradient: Tensor) -> tuple[Tensor, GradientSums]:
        """Run the backward program.

        Args:
            gradient: Of the output, ``[S, B, D]``.

        Returns:
            The gradient of ``hidden`` and the sums of the parameters' gradients.
        """
        self._output_gradient = gradient
        self._hidden_gradient: Tensor | None = None
        self._execute(
            Direction.BACKWARD,
            {
                StageKind.QKV: self._qkv_backward,
                StageKind.ATTENTION: self._attention_backward,
                StageKind.ROUTE: self._route_backward,
                StageKind.LOSSES: self._losses_backward,
                StageKind.SHARED: self._shared_backward,
                StageKind.DISPATCH: self._dispatch_backward,
                StageKind.EXPERT: self._expert_backward,
                StageKind.COMBINE: self._combine_backward,
                StageKind.MERGE: self._merge_backward,
            },
        )
        assert self._hidden_gradient is not None
        return self._hidden_gradient, self._sums

    def _merge_backward(self, stage: Stage) -> None:
        index = self._index(stage)
        rows = take_rows(self._output_gradient, self._stages.chunks[index].hidden)
        combined, residual, *shared = self._differentiate(stage, rows)
        self._gradients["combined", index] = combined
        self._gradients["residual", index] = residual
        if shared:
            self._gradients["shared", index] = shared[0]

    def _combine_backward(self, stage: Stage) -> Transfer:
        indices = self._indices(stage, Direction.BACKWARD)
        return self._travel(indices, self._gradients, ("combined",), ("expert",))

    def _expert_backward(self, stage: Stage) -> None:
        index = self._index(stage)
        received, probs = self._differentiate(stage, self._take_gradient("expert", index))
        self._gradients["received", index] = received
        self._gradients["received_probs", index] = probs

    def _dispatch_backward(self, stage: Stage) -> Transfer:
        indices = self._indices(stage, Direction.BACKWARD)
        names = ("received", "received_probs"), ("tokens", "probs")
        return self._travel(indices, self._gradients, *names, combine=True)

    def _losses_backward(self, stage: Stage) -> None:
        # The losses hang on the number that carries them: a zero gradient lets only theirs through.
        gradients = self._differentiate(stage, torch.zeros((), device=self._output_gradient.device))
        for index, gradient in enumerate(gradients):
            self._gradients["logits", index] = gradient

    def _shared_backward(self, stage: Stage) -> None:
        index = self._index(stage)
        (gradient,) = self._differentiate(stage, self._take_gradient("shared", index))
        self._add_gradient("normed", index, gradient)

    def _route_backward(self, stage: Stage) -> None:
        index = self._index(stage)
        (normed,) = self._differentiate(
            stage,
            self._take_gradient("tokens", index),
            self._take_gradient("probs", index),
            self._take_gradient("logits", index) if self._plan.features.losses else None,
        )
        self._add_gradient("normed", index, normed)

    def _attention_backward(self, stage: Stage) -> None:
        chunk = self._chunk(stage)
        if stage.chunk is not None:
            residual = self._take_gradient("residual", stage.chunk)
            normed = self._take_gradient("normed", stage.chunk)
        else:
            residual, normed = self._join("residual"), self._join("normed")
        query, key, value, hidden = self._differentiate(stage, residual, normed)
        if key is not None:
            self._key_value_sums.add(0, key, value)
        if Stage(StageKind.QKV, stage.chunk) in self._segments:
            self._gradients["query", stage.chunk], self._gradients["hidden", stage.chunk] = query, hidden
            return
        # Queries of the whole sequence, attention in chunks.
        if ("query", None) not in self._gradients:
            self._gradients["query", None] = query.new_empty(
                (self._whole.queries[-1].local_end, *query.shape[1:])
            )
            self._gradients["hidden", None] = torch.empty_like(self._output_gradient, dtype=hidden.dtype)
        put_rows(self._gradients["query", None], chunk.queries, query)
        put_rows(self._gradients["hidden", None], chunk.hidden, hidden)

    def _qkv_backward(self, stage: Stage) -> None:
        chunk = self._chunk(stage)
        gradients = (
            self._take_gradient("query", stage.chunk),
            *(
                (total if stage.chunk is None else take_rows(total, chunk.queries)).to(self._key.dtype)
                for total in self._key_value_sums.totals()
            ),
        )
        (hidden,) = self._differentiate(stage, *gradients)
        if self._hidden_gradient is None:
            self._hidden_gradient = torch.empty_like(self._output_gradient, dtype=hidden.dtype)
        # What came past attention, and what came through it.
        put_sum(self._hidden_gradient, chunk.hidden, hidden, self._take_gradient("hidden", stage.chunk))

    def _differentiate(self, stage: Stage, *gradients: Tensor | None) -> tuple[Tensor, ...]:
        parameters = self._stages.parameters(stage.kind)
        segment = self._segments.pop(stage)
        if self._crossing is not None:
            self._crossing.use(gradients)
            self._crossing.use_again(self._travelled_inputs.pop(stage))
        return segment.backward(gradients, parameters=parameters, sums=self._sums)

    def _take_gradient(self, name: str, index: int | None) -> Tensor | None:
        return self._gradients.pop((name, index))

    def _add_gradient(self, name: str, index: int, gradient: Tensor) -> None:
        earlier = self._gradients.get((name, index))
        self._gradients[name, index] = gradient if earlier is None else earlier + gradient

    def _join(self, name: str) -> Tensor:
        """The gradients of all chunks as one tensor, rows where they belong."""
        parts = [self._gradients.pop((name, index)) for index in range(len(self._stages.chunks))]
        joined = torch.empty_like(self._output_gradient, dtype=parts[0].dtype)
        for chunk, part in zip(self._stages.chunks, parts, strict=True):
            put_rows(joined, chunk.hidden, part)
        return joined

    # Both directions

    def _execute(self, direction: Direction, handlers: Handlers) -> None:
        parts = self._plan.parts[direction]

        def run(stage: Stage) -> Transfer | None:
            handle = handlers[stage.kind]
            if stage.is_communication:
                return handle(stage)
            for of_chunk in parts[stage]:
                handle(of_chunk)
            return None

        self._recorder.enter(self._layer, direction)
        with self._recorder.passes.timed(direction):
            self._executor.execute(
                self._plan.order[direction],
                self._plan.needs[direction],
                run,
                self._recorder,
                self._crossing,
            )

    def _travel(
        self,
        indices: Sequence[int],
        store: dict[tuple[str, int | None], Any],
        leaving: Sequence[str],
        arriving: Sequence[str],
        *,
        combine: bool = False,
    ) -> Transfer:
        """Start to bring tensors of some chunks to the experts' ranks, or back from there.

        Args:
            indices: Of the chunks that share the collective.
            store: Where the tensors are taken from, and those that arrive are put.
            leaving: Their names.
            arriving: Likewise.
            combine: From the experts' ranks.
        """
        transports = [self._stages.transport(index) for index in indices]
        tensors = [[store.pop((name, index)) for name in leaving] for index in indices]
        transfer = exchange_chunks(transports, tensors, combine=combine)
        places = [(name, index) for index in indices for name in arriving]
        store.update(zip(places, transfer.outputs, strict=True))
        self._note_travel(*itertools.chain(*tensors), *transfer.outputs)
        return transfer

    def _indices(self, stage: Stage, direction: Direction) -> list[int]:
        """The chunks that share a collective."""
        return [self._index(of_chunk) for of_chunk in self._plan.parts[direction][stage]]

    def _note_travel(self, *tensors: Tensor) -> None:
        if self._crossing is not None:
            self._crossing.travel(tensors)

    def _chunk(self, stage: Stage) -> Chunk:
        return self._whole if stage.chunk is None else self._stages.chunks[stage.chunk]

    def _index(self, stage: Stage) -> int:
        assert stage.chunk is not None
        return stage.chunk
