"""Where backward passes are cut into graphs: often enough, and so that no call is ever delayed."""

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from megatron_ampipe.errors import BadInput
from megatron_ampipe.runtime.compile import _ends
from megatron_ampipe.runtime.cuts import is_reduction, parts_of, starts_of_reductions
from megatron_ampipe.runtime.tape import Call, Tape
from megatron_ampipe.schedule import Direction, issue_order, needs_of
from tests.golden.write import BLOCKS, schedule_of

LAYERS = 3
SETTINGS = ("shared", "latent-attention", "context-ring", "tensor-experts-nodes", "everything")
"""Blocks with lanes and stages of all kinds."""


def tapes(**reductions: bool) -> Iterator[tuple[str, Tape]]:
    """Backward passes of three layers that share a schedule."""
    for block in SETTINGS:
        for schedule in ("ampipe", "moe-only", "lancet", "joined"):
            for degree in (1, 2, 4):
                flags: dict[str, Any] = {"schedule": schedule, "degree": degree, "layers": LAYERS}
                try:
                    whole, layers, _ = schedule_of({**BLOCKS[block], **reductions}, flags)
                except BadInput:
                    continue
                needs = needs_of(whole, layers, Direction.BACKWARD)
                order = issue_order(whole.backward, needs, host_waits=True)
                ends = _ends(order, needs)
                calls = [replace(call, ends=call.stage in ends) for call in Tape.of(order, needs).calls]
                yield f"{block} {schedule} {degree}", Tape(calls)


def end_of(calls: Sequence[Call], durations: Sequence[float], cuts: Collection[int]) -> float:
    """When a pass ends whose lanes all wait for each other before the calls at these positions."""
    ended: dict[int, float] = {}
    of_lane: dict[str, float] = {}
    barrier = 0.0
    for call in calls:
        if call.position in cuts:
            barrier = max(ended.values())
        earlier = [ended[needed] for needed in call.needs if needed in ended]
        begin = max([barrier, of_lane.get(call.lane, 0.0), *earlier])
        of_lane[call.lane] = ended[call.position] = begin + durations[call.position]
    return max(ended.values())


@pytest.mark.parametrize(
    ("reduces", "reduces_experts", "fewest", "most"),
    [
        # At the end of each layer but the last one.
        pytest.param(False, False, LAYERS, LAYERS, id="overlapped"),
        # After the transfers of each layer; reductions of experts can start elsewhere in it.
        pytest.param(True, False, LAYERS + 1, LAYERS + 1, id="placed"),
        pytest.param(True, True, LAYERS + 1, 2 * LAYERS + 1, id="experts"),
    ],
)
def test_cuts_delay_nothing(reduces: bool, reduces_experts: bool, fewest: int, most: int) -> None:
    draw = random.Random(3)
    names = []
    for name, tape in tapes(reduces=reduces, reduces_experts=reduces_experts):
        wanted = starts_of_reductions(tape, overlaps=True)
        parts = parts_of(tape, wanted)
        calls = [call for part in parts for call in part]
        assert calls == [call for call in tape.calls if not is_reduction(call)], name
        assert fewest <= len(parts) <= most, name
        cuts = [part[0].position for part in parts[1:]]
        # Each starts before the pass has ended, but at the end of the last layer.
        assert all(position < cuts[-1] for position in (wanted if reduces else wanted[:-1])), name
        for _ in range(3):
            durations = [draw.random() for _ in tape.calls]
            assert end_of(calls, durations, cuts) == end_of(calls, durations, ()), name
        names.append(name)
    assert len(names) > 20


def test_a_cut_right_after_a_reduction_would_delay_calls() -> None:
    """Else the test above could not fail."""
    delayed = 0
    for _, tape in tapes(reduces=True, reduces_experts=False):
        calls = [call for call in tape.calls if not is_reduction(call)]
        cuts = [position + 1 for position in starts_of_reductions(tape, overlaps=True)]
        durations = [1.0 for _ in tape.calls]
        delayed += end_of(calls, durations, cuts) > end_of(calls, durations, ())
    assert delayed > 10
