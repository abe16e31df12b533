"""What the experts keep for their backward, and how the rest is restored there: the named strategies.

MPipeMoE, section III-D and table II. What arrives at a rank is T_DI there, and the experts' inner tensors
(first product, activation) are T_M.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron_ampipe.errors import BadInput
from megatron_ampipe.schedule.graph import BlockFeatures

KEEP = "keep"
"""The strategy that restores nothing."""

STRATEGIES: Mapping[str, tuple[str, ...]] = {
    KEEP: (),
    "rebuild": ("rebuild",),
    "redispatch": ("rebuild", "redispatch"),
}
"""The fields of :class:`~.graph.BlockFeatures` that each strategy sets. The first keeps most, the last least.

``redispatch`` is S4 of the paper's table II. ``rebuild`` is not in it: what arrived is kept, the inner
tensors are computed once more.
"""


def with_memory(features: BlockFeatures, strategy: str) -> BlockFeatures:
    """The features of a block that trains under a strategy. A block without experts, or a recomputed one, has
    nothing that a strategy could restore.

    Args:
        features: Of the block without a strategy.
        strategy: One of :data:`STRATEGIES`.
    """
    if features.dense or features.recomputed:
        return features
    restored = STRATEGIES[strategy]
    return replace(features, rebuild="rebuild" in restored, redispatch="redispatch" in restored)


def check_strategy(name: str) -> None:
    """Verify that there is such a strategy.

    Raises:
        BadInput: there is not.
    """
    if name not in STRATEGIES:
        raise BadInput(
            "--ampipe-memory",
            name,
            rule=f"is not one of {', '.join(STRATEGIES)}",
            remedy="Use --ampipe-memory rebuild, or leave it out to keep everything.",
        )
