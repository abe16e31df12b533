"""What the experts keep for their backward, and how the rest is restored there: the named strategies.

MPipeMoE, section III-D and table II. What arrives at a rank is T_DI there, and the experts' inner tensors
(first product, activation) are T_M.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_ampipe.errors import BadInput
from megatron_ampipe.schedule.features import BlockFeatures, Restored

KEEP = "keep"
"""The strategy that restores nothing."""

STRATEGIES: Mapping[str, tuple[Restored, ...]] = {
    KEEP: (),
    "rebuild": (Restored.REBUILD,),
    "redispatch": (Restored.REBUILD, Restored.REDISPATCH),
    "offload": (Restored.OFFLOAD,),
    "S2": (Restored.REDISPATCH, Restored.OFFLOAD),
    "S3": (Restored.REBUILD, Restored.OFFLOAD_TOKENS),
}
"""What each strategy restores, as in ``BlockFeatures.restored``.

``S2`` and ``S3`` are those of the paper's table II. ``rebuild`` is not in it: what arrived is kept, the inner
tensors are computed once more. Of the first three, each keeps less than the one before.
"""
PAPER_NAMES: Mapping[str, str] = {"S1": "offload", "S4": "redispatch"}
"""Other names of strategies, from the same table."""
COPYING = tuple(
    name
    for name, restored in STRATEGIES.items()
    if Restored.OFFLOAD in restored or Restored.OFFLOAD_TOKENS in restored
)
"""The strategies that copy to host memory."""

BETWEEN_CHUNKS = "/"
"""Between the strategies of the chunks, from the first to the last: ``keep/rebuild/rebuild/rebuild``."""


def with_memory(features: BlockFeatures, memory: str) -> BlockFeatures:
    """The features of a block that trains under a strategy. A block without experts, or a recomputed one, has
    nothing that a strategy could restore.

    Args:
        features: Of the block without a strategy.
        memory: As ``Pipeline.memory``.
    """
    if features.dense or features.recomputed:
        return features
    restored = tuple(STRATEGIES[name] for name in of_chunks(memory))
    return replace(features, restored=restored if any(restored) else ())


def of_chunks(memory: str) -> tuple[str, ...]:
    """The strategy of each chunk of the backward pass, or one of all."""
    return tuple(PAPER_NAMES.get(name, name) for name in memory.split(BETWEEN_CHUNKS))


def memory_to_text(names: Sequence[str]) -> str:
    """What :func:`of_chunks` reads; one name if all chunks have the same."""
    return names[0] if len(set(names)) == 1 else BETWEEN_CHUNKS.join(names)


def check_memory(memory: str, *, backward_degree: int | None = None, flag: str = "--ampipe-memory") -> None:
    """Verify that these are strategies, and that every chunk has one.

    Args:
        memory: As ``Pipeline.memory``.
        backward_degree: Number of chunks of the backward pass; None where it is not known yet.
        flag: The flag with this value, for error messages.

    Raises:
        BadInput: there is no such strategy, or it is named for another number of chunks.
    """
    names = of_chunks(memory)
    for name in names:
        if name not in STRATEGIES:
            raise BadInput(
                flag,
                name or "(empty)",
                rule=f"is not one of {', '.join((*STRATEGIES, *PAPER_NAMES))}",
                remedy=f"Use {flag} rebuild, or leave it out to keep everything.",
            )
    if backward_degree is not None and len(names) not in (1, backward_degree):
        example = BETWEEN_CHUNKS.join([KEEP, *["rebuild"] * (backward_degree - 1)])
        raise BadInput(
            flag,
            memory,
            rule=f"names strategies of {len(names)} chunks, and the backward pass has {backward_degree}",
            remedy=f"Name one of all chunks, or one of each: {flag} {example}.",
        )
