"""``--ampipe-routing-dir``: every Nth iteration, the routing of one micro-batch becomes a file.

Forward hooks on the routers of a model count who goes where, while one micro-batch passes: on Megatron's own
layers and on pipelined ones, whose routers see chunks. The counts go to one rank in one all-reduce. Which
rows are similar is asked of a few of them: comparing all takes longer than a training step of a small model.
A restart that goes on from an earlier iteration removes the files of later ones, which it will write again.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils.hooks import RemovableHandle

from megatron_ampipe.errors import RunFailed
from megatron_ampipe.exchange.codecs import ROUNDING
from megatron_ampipe.launch.auto import print_on_first_rank
from megatron_ampipe.launch.hooks import Hook
from megatron_ampipe.layers.context import AMPipeContext
from megatron_ampipe.plan.recorded_routing import (
    THRESHOLDS,
    LayerRouting,
    RoutingRecord,
    files_of,
    places_of,
)
from megatron_ampipe.schedule.pipeline import AMPipeConfig

# R rows of a chunk, B sequences of a micro-batch, E experts, D hidden size, P ranks of the group.


class RoutingRecording(Hook):
    """Records the first micro-batch of every Nth training step.

    In each turn a rank compares the rows of one expert in one of its layers: layers take turns, then experts.

    Args:
        args: Megatron's validated arguments.
        config: What AMPipe's flags resolve to, with a folder for the files.
        context: What pipelined layers share; None at degree 1.
    """

    def __init__(self, args: argparse.Namespace, config: AMPipeConfig, context: AMPipeContext | None) -> None:
        assert config.routing_dir is not None
        self._args, self._interval, self._context = args, config.routing_interval, context
        self._folder, self._is_first = Path(config.routing_dir), True
        condensed = [] if config.condense is None else [config.condense]
        self._thresholds = tuple(sorted({*THRESHOLDS, *condensed}))
        self._places = places_of(args.num_experts)
        self._handles: list[RemovableHandle] = []
        self._seen: dict[tuple[int, int], _CountedChunk] = {}

    @property
    def _iteration(self) -> int:
        iteration: int = self._args.curr_iteration + 1
        return iteration

    @property
    def _num_chunks(self) -> int:
        return 1 if self._context is None else self._context.pipeline.num_chunks

    def before_step(self, models: list[Any]) -> None:
        """Count, in every Nth step. Routers of multi-token prediction are left out."""
        if self._is_first and dist.get_rank() == 0:
            # An interrupted run may have recorded more iterations than this one begins with.
            for iteration, path in files_of(self._folder).items():
                if iteration >= self._iteration:
                    path.unlink(missing_ok=True)
        self._is_first = False
        # Only this group is asked in the end.
        if self._iteration % self._interval or parallel_state.get_expert_data_parallel_rank() > 0:
            return
        routers = [
            module
            for model in models
            for name, module in model.named_modules()
            if isinstance(module, TopKRouter) and "mtp" not in name.split(".")
        ]
        turn = self._iteration // self._interval - 1
        for index, router in enumerate(routers):
            pick = None
            if index == turn % len(routers):
                # Each rank compares the rows of another expert.
                rank = parallel_state.get_expert_tensor_and_model_parallel_group().rank()
                pick = turn // len(routers) + rank
            see = functools.partial(self._see, pick)
            # Other hooks of a router are called once for all chunks; this form sees each.
            self._handles.append(router.register_forward_hook(see, with_kwargs=True))

    def _see(self, pick: int | None, router: Any, inputs: Any, options: dict[str, Any], outputs: Any) -> None:
        place = router.layer_number, options.get("chunk", 0)
        # Later micro-batches, and a second run of the first one for its recompute, are not counted.
        if router.training and place not in self._seen:
            with torch.no_grad():
                self._seen[place] = _CountedChunk.of(
                    inputs[0], outputs[1], self._places, self._thresholds, pick=pick
                )

    def after_step(self) -> None:
        """Join what all ranks have counted, and write it on the first rank."""
        if self._iteration % self._interval:
            return
        for handle in self._handles:
            handle.remove()
        group = parallel_state.get_expert_tensor_and_model_parallel_group()
        joined = torch.zeros(
            (self._args.num_layers, group.size(), sum(self._widths)),
            dtype=torch.int64,
            device=torch.cuda.current_device(),
        )
        for layer in {layer for layer, _ in self._seen}:
            chunks = [self._seen[place] for place in sorted(self._seen) if place[0] == layer]
            # A MoE layer of a hybrid model that is not pipelined sees no chunks.
            if len(chunks) == self._num_chunks:
                joined[layer - 1, group.rank()] = _CountedChunk.joined(chunks)
        self._handles, self._seen = [], {}
        dist.all_reduce(joined)
        record = self._record(joined.cpu()) if dist.get_rank() == 0 else None
        if record is not None:
            try:
                record.write(self._folder)
            except RunFailed as error:
                # Training is worth more than its statistics.
                print_on_first_rank(f"the routing of iteration {self._iteration} was not recorded: {error}")

    @property
    def _widths(self) -> list[int]:
        """Numbers of one layer on one rank: counts, arrivals, tokens of a chunk, rows compared, rows left."""
        batch = self._args.micro_batch_size
        counts = batch * self._num_chunks * self._args.num_experts
        arrivals = (batch * places for places in self._places)
        return [counts, *arrivals, self._num_chunks, 1, len(self._thresholds)]

    def _record(self, joined: Tensor) -> RoutingRecord | None:
        """The record of ``joined [layers, P, widths]``; layers whose routers saw nothing are left out."""
        args, layers, tokens = self._args, [], ()
        for index, layer in enumerate(joined):
            if not layer.any():
                continue
            counts, *arrivals, of_chunks, compared, left = layer.split(self._widths, dim=1)
            tokens = tuple(of_chunks[0].tolist())
            layers.append(
                LayerRouting(
                    layer=index + 1,
                    counts=_tuples(counts.reshape(-1, self._num_chunks, args.num_experts).tolist()),
                    arrivals={
                        places: _tuples(arrival.reshape(-1, places).tolist())
                        for places, arrival in zip(self._places, arrivals, strict=True)
                    },
                    rows_compared=int(compared.sum()),
                    rows_left=dict(zip(self._thresholds, left.sum(dim=0).tolist(), strict=True)),
                )
            )
        if not layers:
            return None
        return RoutingRecord(
            iteration=self._iteration,
            num_experts=args.num_experts,
            ranks=parallel_state.get_expert_model_parallel_world_size(),
            batch=args.micro_batch_size,
            ranks_per_sequence=args.tensor_model_parallel_size * args.context_parallel_size,
            hidden_size=args.hidden_size,
            tokens=tokens,
            layers=tuple(layers),
        )


def _tuples(nested: Any) -> Any:
    return tuple(map(_tuples, nested)) if isinstance(nested, list) else nested


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
        cls,
        hidden: Tensor,
        routing_map: Tensor,
        places: Sequence[int],
        thresholds: Sequence[float],
        *,
        pick: int | None,
    ) -> _CountedChunk:
        """Count a chunk of ``hidden [R, B, D]`` with its choice ``[R * B, E]``; the rest as below."""
        rows, batch = hidden.shape[:2]
        chosen = routing_map.bool().view(rows, batch, -1)
        return cls(
            chosen.sum(dim=0),
            [chosen.unflatten(2, (count, -1)).any(dim=3).sum(dim=0) for count in places],
            compared_rows(hidden, chosen, thresholds, pick=pick),
            rows,
        )

    @staticmethod
    def joined(chunks: Sequence[_CountedChunk]) -> Tensor:
        """The numbers of one layer on one rank, in the order of ``_widths``."""
        counts = torch.stack([chunk.counts for chunk in chunks], dim=1)
        arrivals = [sum(parts) for parts in zip(*(chunk.arrivals for chunk in chunks), strict=True)]
        tokens = counts.new_tensor([chunk.num_tokens for chunk in chunks])
        rows = torch.stack([chunk.rows for chunk in chunks]).sum(dim=0)
        return torch.cat([part.flatten() for part in (counts, *arrivals, tokens, rows)])


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
    numbers = np.zeros(1 + len(thresholds), dtype=np.int64)
    used = [] if pick is None else chosen.flatten(0, 1).any(dim=0).nonzero()[:, 0].tolist()
    if pick is not None and used:
        expert = used[pick % len(used)]
        for sequence in range(hidden.shape[1]):
            rows = hidden[:, sequence][chosen[:, sequence, expert]]
            directions = normalize(rows.detach().float(), dim=1)
            cosines = (directions @ directions.T).cpu().numpy()
            numbers += [len(rows), *(_num_sent(cosines, threshold) for threshold in thresholds)]
    return torch.from_numpy(numbers).to(hidden.device)


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
