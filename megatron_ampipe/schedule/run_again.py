"""Where the stages of recomputed blocks run again: among the backward stages of the block above.

Two blocks that do not wait for each other then share the backward pass: while the transfers of one are under
way, the other computes. Called by :mod:`.build` and :mod:`.stack`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_ampipe.schedule.issue import completed
from megatron_ampipe.schedule.types import Stage


def with_stages_again(order: Sequence[Stage], needs: Mapping[Stage, Sequence[Stage]]) -> list[Stage]:
    """A backward order with the stages that run again.

    They run in the mirrored order of the backward stages of their block, spread evenly over those of the
    block above. A recomputed block is differentiated when the block above it has ended.

    Args:
        order: Stages of the backward pass, each after what it needs; may lack some.
        needs: The dependencies of the backward pass.

    Returns:
        All stages; one may stand before a stage that it needs.
    """
    layers = {stage.layer for stage in needs if stage.again}
    if not layers:
        return list(order)
    plain = {
        stage: [one for one in needed if not one.again] for stage, needed in needs.items() if not stage.again
    }
    by_layer = sorted(
        completed(order, plain), key=lambda stage: sum(layer >= stage.layer for layer in layers)
    )
    after: dict[Stage, list[Stage]] = {}
    found: list[Stage] = []
    for layer in sorted(layers, reverse=True):
        again = _again(by_layer, layer, needs)
        above = _alone(by_layer, layer + 1)
        if not above:
            found += again
        for place, stage in enumerate(again if above else ()):
            after.setdefault(above[place * len(above) // len(again)], []).append(stage)
    for stage in by_layer:
        found += (stage, *after.get(stage, ()))
    return found


def _again(order: Sequence[Stage], layer: int, needs: Mapping[Stage, Sequence[Stage]]) -> list[Stage]:
    """The stages of a layer that run again; each transfer as soon as it can be started."""
    found_again = (
        Stage(stage.kind, stage.chunk, layer, again=True) for stage in reversed(order) if stage.layer == layer
    )
    mirrored = [stage for stage in found_again if stage in needs]
    transfers = [stage for stage in mirrored if stage.is_communication]
    found: dict[Stage, None] = {}
    for stage in mirrored:
        if stage.is_communication:
            continue
        found[stage] = None
        for transfer in transfers:
            if all(needed in found for needed in needs[transfer]):
                found.setdefault(transfer)
    return [*found, *(stage for stage in transfers if stage not in found)]


def _alone(order: Sequence[Stage], layer: int) -> list[Stage]:
    """The stages of a layer that stand after all of the layer above it."""
    first = max((place for place, stage in enumerate(order) if stage.layer == layer + 1), default=-1) + 1
    return [stage for stage in order[first:] if stage.layer == layer]
