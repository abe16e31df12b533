"""Routing replay of several micro-batches in flight: a pass that runs again chooses as in its first run."""

from dataclasses import replace

import pytest

from tests.dist.cases import PARITY

TOLERANCE = 1e-5
ORDER = "F0 F1 B0 F2 B1 B2"
CASE = next(case for case in PARITY if case.name == "replay-prescribed-stack-recompute")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("replay", ("replay_forward", "replay_backward"))
def test_a_recompute_chooses_as_the_first_run(replay: str) -> None:
    """Whether a framework says what backward passes replay, or not. Stock layers do not run again."""
    from tests.dist.blocks import build_layers, wrong
    from tests.dist.micro_batches import step_in_order
    from tests.dist.routing_records import waiting

    case = replace(CASE, replay=replay)
    stock, ours = build_layers(case)
    expected, found = step_in_order(stock, case, ORDER), step_in_order(ours, case, ORDER)
    assert wrong(expected, found, TOLERANCE) == {}
    # Megatron's list grows with each forward pass, and each pass that runs again takes an entry.
    taken = 3 if replay == "replay_backward" else 0
    assert set(waiting(stock)) == {3} and set(waiting(ours)) == {3 - taken}
