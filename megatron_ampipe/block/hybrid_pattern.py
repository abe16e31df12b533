"""Which layers of a hybrid model are pipelined, from its ``--hybrid-layer-pattern``. Pure.

The letters are Megatron's: ``*`` attention, ``+`` latent attention, ``E`` MoE, ``-`` MLP, ``M`` Mamba and
others. ``|`` separates pipeline stages, ``/`` the layers of multi-token prediction. An attention layer and
the MoE layer right after it are a pair, which is pipelined as one block. An attention layer and an MLP right
after it are also a pair if they are next to a pair with experts, whose schedule they can share.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol

ATTENTION, EXPERTS, DENSE = "*+", "E", "-"


class _PipelineArguments(Protocol):
    @property
    def pipeline_model_parallel_size(self) -> int | None: ...


def stages_of(arguments: _PipelineArguments) -> tuple[str, ...] | None:
    """The layers of every (virtual) pipeline stage, from Megatron's arguments; None for a GPT.

    Layers of multi-token prediction are left out, because they run unchanged. Megatron spreads a pattern
    without ``|`` over the stages; the first and the last stage may have another number of layers.
    """
    text = getattr(arguments, "hybrid_layer_pattern", None)
    if text is None:
        return None
    layers, stages = text.partition("/")[0], arguments.pipeline_model_parallel_size or 1
    if "|" in layers or stages == 1:
        return tuple(layers.split("|"))
    first = getattr(arguments, "decoder_first_pipeline_num_layers", None)
    last = getattr(arguments, "decoder_last_pipeline_num_layers", None)
    between = stages - (first is not None) - (last is not None)
    sizes = [(len(layers) - (first or 0) - (last or 0)) // max(1, between)] * stages
    if first is not None:
        sizes[0] = first
    if last is not None:
        sizes[-1] = last
    letters = iter(layers)
    return tuple("".join(itertools.islice(letters, size)) for size in sizes)


def runs_of(stages: Sequence[str]) -> tuple[tuple[bool, ...], ...]:
    """The pairs that can share a schedule, and whether each has experts."""
    return tuple(
        tuple(stage[first + 2 * pair + 1] in EXPERTS for pair in range(num_pairs))
        for stage in stages
        for first, num_pairs in runs_of_pairs(stage)
    )


def runs_of_pairs(layers: Sequence[str]) -> Iterator[tuple[int, int]]:
    """The index of the first layer, and the number of pairs, of each run of pairs with experts among them.

    ``layers`` are the letters of one pipeline stage.
    """
    first = 0
    while first < len(layers) - 1:
        end = first
        while end < len(layers) - 1 and layers[end] in ATTENTION and layers[end + 1] in EXPERTS + DENSE:
            end += 2
        if any(layers[second] in EXPERTS for second in range(first + 1, end, 2)):
            yield first, (end - first) // 2
        first = max(end, first + 1)
