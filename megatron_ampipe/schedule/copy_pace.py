"""How far copies to and from host memory run ahead of what they are copied for.

Data alone would allow all tensors to be loaded when the backward pass begins, and all to wait for their copy
until the forward pass ends: nothing would be gained. So both keep pace, from block to block without a
boundary. Called by :mod:`.graph`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron_ampipe.schedule.kinds import EXPERT, LOAD, LOAD_TOKENS, STORE, STORE_TOKENS
from megatron_ampipe.schedule.stage_kind import Direction
from megatron_ampipe.schedule.types import Stage

AHEAD = 2
"""Of how many chunks tensors are loaded before the experts need them, or wait to be stored after that."""


def with_copies_in_time(
    needs: Mapping[Stage, tuple[Stage, ...]], direction: Direction
) -> dict[Stage, tuple[Stage, ...]]:
    """The dependencies of a pass, with those that bound how much is held on the device.

    Forward, the experts of a chunk wait until what was kept of the chunk :data:`AHEAD` before it is stored;
    backward, a load waits until the experts of the chunk that many before its own are differentiated.

    Args:
        needs: What each stage waits for.
        direction: Of the pass.
    """
    found = dict(needs)
    if not any(stage.kind.copies for stage in needs):
        return found
    forward = direction is Direction.FORWARD
    experts = [stage for stage in needs if stage.kind == EXPERT and not stage.again]
    experts.sort(key=lambda stage: (stage.layer, stage.chunk), reverse=not forward)
    for before, after in zip(experts, experts[AHEAD:], strict=False):
        for kind in (STORE_TOKENS, STORE) if forward else (LOAD_TOKENS, LOAD):
            copy = replace(before if forward else after, kind=kind)
            if copy in found:
                waiting, awaited = (after, copy) if forward else (copy, before)
                found[waiting] = (*found[waiting], awaited)
    return found
