"""Counts who goes where: forward hooks on the routers of a model, while one micro-batch passes.

Works on Megatron's own layers and on pipelined ones, whose routers see chunks. What it counts goes to one
rank in one all-reduce. Which rows are similar is asked of a few of them: comparing all takes longer than a
training step of a small model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils.hooks import RemovableHandle

from megatron_ampipe.exchange.codecs import ROUNDING
from megatron_ampipe.plan.recorded_routing import LayerRouting, RoutingRecord, places_of

# R rows of a chunk, B sequences of a micro-batch, E experts, D hidden size, P ranks of the group.


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSizes:
    """What the counts of all ranks have in common.

    Attributes:
        num_layers: Layers of the model.
        num_experts: Experts of a layer.
        num_chunks: Chunks of a sequence.
        batch: Sequences of a micro-batch.
        hidden_size: Elements of a row.
        ranks_per_sequence: Consecutive ranks that hold a part of a sequence each.
        thresholds: Cosines for which rows are counted.
    """

    num_layers: int
    num_experts: int
    num_chunks: int
    batch: int
    hidden_size: int
    ranks_per_sequence: int
    thresholds: tuple[float, ...]

    @property
    def places(self) -> tuple[int, ...]:
        """Numbers of places for which tokens are counted."""
        return places_of(self.num_experts)

    @property
    def width(self) -> int:
        """Numbers of one layer on one rank: counts, arrivals, tokens of a chunk, rows compared and left."""
        of_part = self.num_chunks * self.num_experts + sum(self.places)
        return self.batch * of_part + self.num_chunks + 1 + len(self.thresholds)


class RoutingRecorder:
    """Counts the first micro-batch that passes the routers of a model between its begin and its end.

    Args:
        models: The parts of the model on this rank; routers of multi-token prediction are left out.
        sizes: The same on all ranks.
        turn: How many were made before. In each turn a rank compares the rows of one expert in one of its
            layers: layers take turns, then experts.
    """

    def __init__(self, models: Iterable[torch.nn.Module], sizes: RecordedSizes, *, turn: int) -> None:
        self._sizes = sizes
        routers = [
            module
            for model in models
            for name, module in model.named_modules()
            if isinstance(module, TopKRouter) and "mtp" not in name.split(".")
        ]
        group = parallel_state.get_expert_tensor_and_model_parallel_group()
        # Each rank compares the rows of another expert.
        self._pick = turn // max(1, len(routers)) + group.rank()
        self._compared = routers[turn % len(routers)] if routers else None
        self._seen: dict[tuple[int, int], _CountedChunk] = {}
        # Only this group is asked in the end.
        self._is_counted = parallel_state.get_expert_data_parallel_rank() == 0
        # Other hooks of a router are called once for all chunks; this form sees each.
        self._handles: list[RemovableHandle] = [
            router.register_forward_hook(self._see, with_kwargs=True)
            for router in routers
            if self._is_counted
        ]

    def _see(self, router: Any, inputs: tuple[Any, ...], options: dict[str, Any], outputs: Any) -> None:
        place = router.layer_number, options.get("chunk", 0)
        # Later micro-batches, and a second run of the first one for its recompute, are not counted.
        if router.training and place not in self._seen:
            with torch.no_grad():
                pick = self._pick if router is self._compared else None
                self._seen[place] = _CountedChunk.of(inputs[0], outputs[1], self._sizes, pick=pick)

    def stop(self) -> None:
        """See nothing more."""
        for handle in self._handles:
            handle.remove()

    def finish(self, iteration: int) -> RoutingRecord | None:
        """Stop, and join what all ranks have counted. All ranks call it.

        Args:
            iteration: Counted from 1.

        Returns:
            The record of the first expert-parallel group on the first rank of the world; None on other ranks,
            and if no token was routed.
        """
        self.stop()
        sizes, group = self._sizes, parallel_state.get_expert_tensor_and_model_parallel_group()
        device = next((chunk.counts.device for chunk in self._seen.values()), None)
        if device is None:
            device = torch.device("cpu" if not torch.cuda.is_available() else torch.cuda.current_device())
        joined = torch.zeros((sizes.num_layers, group.size(), sizes.width), dtype=torch.int64, device=device)
        if self._is_counted:
            for layer in sorted({layer for layer, _ in self._seen}):
                chunks = [self._seen[place] for place in sorted(self._seen) if place[0] == layer]
                # A MoE layer of a hybrid model that is not pipelined sees no chunks.
                if len(chunks) == sizes.num_chunks:
                    joined[layer - 1, group.rank()] = _CountedChunk.joined(chunks)
        dist.all_reduce(joined)
        if dist.get_rank() > 0:
            return None
        return _record(joined, sizes, iteration)


@dataclass(frozen=True, slots=True)
class _CountedChunk:
    """The counts of one chunk.

    Attributes:
        counts: ``[B, E]``, tokens for each expert.
        arrivals: For each number of places, ``[B, places]``.
        rows: ``[1 + thresholds]``, rows that were compared, and those that are left.
        num_tokens: Of a sequence.
    """

    counts: Tensor
    arrivals: Sequence[Tensor]
    rows: Tensor
    num_tokens: int

    @classmethod
    def of(
        cls, hidden: Tensor, routing_map: Tensor, sizes: RecordedSizes, *, pick: int | None
    ) -> _CountedChunk:
        """Count a chunk of ``hidden [R, B, D]`` with its choice ``[R * B, E]``.

        Args:
            hidden: The tokens.
            routing_map: Their experts.
            sizes: Of all chunks.
            pick: Which of the experts with tokens has its rows compared, modulo their number; None for none.
        """
        rows, batch = hidden.shape[:2]
        assert batch == sizes.batch
        chosen = routing_map.bool()
        by_row = chosen.view(rows, batch, -1)
        return cls(
            by_row.sum(dim=0),
            [by_row.unflatten(2, (places, -1)).any(dim=3).sum(dim=0) for places in sizes.places],
            compared_rows(hidden, by_row, sizes.thresholds, pick=pick),
            rows,
        )

    @staticmethod
    def joined(chunks: Sequence[_CountedChunk]) -> Tensor:
        """The numbers of one layer on one rank, as :func:`_record` reads them."""
        counts = torch.stack([chunk.counts for chunk in chunks], dim=1)
        arrivals = [sum(of_chunks) for of_chunks in zip(*(chunk.arrivals for chunk in chunks), strict=True)]
        tokens = counts.new_tensor([chunk.num_tokens for chunk in chunks])
        of_rows = torch.stack([chunk.rows for chunk in chunks]).sum(dim=0)
        return torch.cat([part.flatten() for part in (counts, *arrivals, tokens, of_rows)])


def compared_rows(hidden: Tensor, chosen: Tensor, thresholds: Sequence[float], *, pick: int | None) -> Tensor:
    """Rows of one expert, and how many a :class:`Condenser` would send at each threshold.

    Args:
        hidden: ``[R, B, D]``, the tokens of a chunk.
        chosen: ``[R, B, E]`` bool, their experts.
        thresholds: Cosines from which on two rows are similar.
        pick: Which of the experts that have tokens, modulo their number; None compares nothing.

    Returns:
        ``[1 + thresholds]`` int64.
    """
    found = np.zeros(1 + len(thresholds), dtype=np.int64)
    used = [] if pick is None else chosen.flatten(0, 1).any(dim=0).nonzero()[:, 0].tolist()
    if pick is not None and used:
        expert = used[pick % len(used)]
        for sequence in range(hidden.shape[1]):
            rows = hidden[:, sequence][chosen[:, sequence, expert]]
            directions = normalize(rows.detach().float(), dim=1)
            cosines = (directions @ directions.T).cpu().numpy()
            found += [len(rows), *(_num_sent(cosines, threshold) for threshold in thresholds)]
    return torch.from_numpy(found).to(hidden.device)


def _num_sent(cosines: np.ndarray[Any, Any], threshold: float) -> int:
    """Rows that go: those that are not similar to an earlier one that goes.

    Row by row on the host, with one bit for each row: on a CPU this takes a small part of the time of
    ``_earliest_similar``, which also says whose result the others take.
    """
    # A NaN is similar to nothing.
    packed = np.packbits(cosines >= threshold - ROUNDING, axis=1, bitorder="little")
    size, similar = packed.shape[1], packed.tobytes()
    open_rows, num_sent = (1 << len(cosines)) - 1, 0
    while open_rows:
        first = open_rows & -open_rows
        row = first.bit_length() - 1
        open_rows &= ~(int.from_bytes(similar[row * size : (row + 1) * size], "little") | first)
        num_sent += 1
    return num_sent


def _record(joined: Tensor, sizes: RecordedSizes, iteration: int) -> RoutingRecord | None:
    """The record of ``joined [layers, P, width]``; layers whose routers saw nothing have no experts."""
    batch, chunks, experts = sizes.batch, sizes.num_chunks, sizes.num_experts
    widths = [batch * chunks * experts, *(batch * places for places in sizes.places), chunks, 1]
    found, tokens = [], ()
    for index, of_layer in enumerate(joined.cpu()):
        if not of_layer.any():
            continue
        counts, *arrivals, of_chunks, compared, left = of_layer.split([*widths, len(sizes.thresholds)], dim=1)
        tokens = tuple(of_chunks[0].tolist())
        found.append(
            LayerRouting(
                layer=index + 1,
                counts=_tuples(counts.reshape(-1, chunks, experts)),
                arrivals={
                    places: _tuples(of_places.reshape(-1, places))
                    for places, of_places in zip(sizes.places, arrivals, strict=True)
                },
                rows_compared=int(compared.sum()),
                rows_left=dict(zip(sizes.thresholds, left.sum(dim=0).tolist(), strict=True)),
            )
        )
    if not found:
        return None
    return RoutingRecord(
        iteration=iteration,
        num_experts=experts,
        ranks=parallel_state.get_expert_model_parallel_world_size(),
        batch=batch,
        ranks_per_sequence=sizes.ranks_per_sequence,
        hidden_size=sizes.hidden_size,
        tokens=tokens,
        layers=tuple(found),
    )


def _tuples(table: Tensor) -> Any:
    """Nested tuples of a table's numbers."""
    if table.dim() == 1:
        return tuple(table.tolist())
    return tuple(_tuples(row) for row in table)
