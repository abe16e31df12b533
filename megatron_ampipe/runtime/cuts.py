"""Where a backward pass is cut into several CUDA graphs, so that the host starts reductions between them.

Between two graphs all lanes wait for each other. So a pass is cut where that changes nothing: where the next
call of every lane needs, directly or not, the last calls of all other lanes. Such places come once or twice
in a block. Which micro-batch reduces is known to Megatron's hooks, which the host calls between the graphs:
the same graphs serve all micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from megatron_ampipe.runtime.tape import Call, Tape


def is_reduction(call: Call) -> bool:
    """Whether a call starts reductions of gradients, and nothing else."""
    return not call.steps and call.stage.kind.of_parameters


def starts_of_reductions(tape: Tape, *, overlaps: bool) -> list[int]:
    """The positions of calls of a backward pass at which reductions can start, of gradients before them.

    These are the calls of reductions (``--ampipe-grad-reduce placed``). Without any, the last calls of
    blocks, if reductions overlap with the pass: then all gradients of a block are handed over.
    """
    placed = [call.position for call in tape.calls if is_reduction(call)]
    return placed or [call.position for call in tape.calls if call.ends and overlaps]


def parts_of(tape: Tape, wanted: Iterable[int]) -> list[tuple[Call, ...]]:
    """The calls of a pass in consecutive parts, each for a graph; without calls that are reductions.

    Args:
        tape: The tape of the pass.
        wanted: Positions of calls. After each of them, the pass is cut at the first place that delays no
            call; not at all if there is none.
    """
    issued = [call for call in tape.calls if not is_reduction(call)]
    free = _free_places(issued)
    cuts = {next((place for place in free if issued[place].position > position), 0) for position in wanted}
    bounds = [0, *sorted(cuts - {0}), len(issued)]
    return [tuple(issued[start:end]) for start, end in pairwise(bounds)]


def alone(calls: Sequence[Call]) -> Tape:
    """Calls of a pass as a tape to be captured, without what the host does at the end of a layer."""
    positions = {call.position: position for position, call in enumerate(calls)}
    return Tape(
        [
            replace(
                call,
                position=positions[call.position],
                # Earlier parts have ended.
                needs=tuple(positions[needed] for needed in call.needs if needed in positions),
                ends=False,
                ends_half=False,
            )
            for call in calls
        ]
    )


def _free_places(calls: Sequence[Call]) -> list[int]:
    """The indices of calls before which a cut delays no call.

    Calls of a lane run in order, so it is enough to look at those next to the cut.
    """
    masks = _ended_before(calls)
    last: dict[str, int] = {}
    last_by_place: list[dict[str, int]] = []
    for place, call in enumerate(calls):
        last_by_place.append(dict(last))
        last[call.lane] = 1 << place
    places: list[int] = []
    next_masks: dict[str, int] = {}
    for place in reversed(range(len(calls))):
        next_masks[calls[place].lane] = masks[place]
        bits = last_by_place[place].values()
        if all(mask & bit for mask in next_masks.values() for bit in bits):
            places.append(place)
    return places[::-1]


def _ended_before(calls: Sequence[Call]) -> list[int]:
    """For each call, a bit mask of the calls, by index, that have ended whenever it begins."""
    index_of = {call.position: index for index, call in enumerate(calls)}
    masks: list[int] = []
    latest: dict[str, int] = {}
    for index, call in enumerate(calls):
        needed = [index_of[position] for position in call.needs if position in index_of]
        if call.lane in latest:
            needed.append(latest[call.lane])
        mask = 0
        for earlier in needed:
            mask |= masks[earlier] | 1 << earlier
        masks.append(mask)
        latest[call.lane] = index
    return masks
